"""The kernels of sdpa_forward on CUDA by name: the one place from which tests, benches and scripts have them."""


def kernel_names() -> tuple[str, ...]:
    """Of the table in csrc/plan, in its order. The package is imported by the call, so that a caller chooses when."""
    from attention_ext._limits import _KERNELS

    return _KERNELS
