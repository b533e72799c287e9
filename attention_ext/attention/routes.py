"""Where PyTorch's back ends were measured faster than this package's kernels; scripts/make_routes.py writes this file.

By compute capability, then (dtypes, kind of call, whether a gradient is wanted): (back end, widest head dim), in the
order in which they are tried. The head dim is the larger of E and Ev.
"""

__all__ = ["ROUTES"]

ROUTES: dict[tuple[int, int], dict[tuple[str, str, bool], tuple[tuple[str, int], ...]]] = {
    # NVIDIA H200, torch 2.11.0, cuDNN 9.19: bench/results/backends_nvidia_h200.json
    (9, 0): {
        ("half", "plain, one query", False): (("cudnn", 128),),
        ("half", "plain", True): (("cudnn", 128), ("flash", 32)),
        ("half", "plain, another width of values", True): (("cudnn", 128),),
        ("half", "causal", True): (("cudnn", 128),),
        ("half", "causal, another width of values", True): (("cudnn", 192),),
        ("half", "causal, L and S apart", True): (("cudnn", 128),),
    },
}
