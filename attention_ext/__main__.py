"""The command attention-ext: the operator beside PyTorch's on KernelBench level 1 problem 97, or what is installed."""

import argparse
import platform
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _measure, explain, sdpa
from ._libraries import BUILD, CUDA_PROBLEM

__all__ = ["main"]

_FULL = {"batch": 32, "heads": 32, "length": 512, "head_dim": 1024}  # KernelBench level 1 problem 97
_CPU_BATCH = 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attention-ext", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("run", "info"), default="run", help="default run")
    parser.add_argument(
        "--device", type=torch.device, default="cuda" if torch.cuda.is_available() and CUDA_PROBLEM is None else "cpu"
    )
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float64"), default="float16")
    parser.add_argument("--batch", type=_positive, help=f"default {_FULL['batch']}, on a CPU {_CPU_BATCH}")
    parser.add_argument("--heads", type=_positive, default=_FULL["heads"], help="default %(default)s")
    parser.add_argument("--length", type=_positive, default=_FULL["length"], help="queries and keys, default %(default)s")
    parser.add_argument("--head-dim", type=_positive, default=_FULL["head_dim"], help="default %(default)s")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeat", type=_positive, help="timed calls of each operator, default 20, on a CPU 3")
    return parser.parse_args(argv)


def _info() -> None:
    card = "none found"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        card = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    print(f"attention_ext  {BUILD.version}, csrc {BUILD.csrc}")
    print(f"built for      {BUILD.built_for or 'CPU only'}")
    print(f"python, torch  {platform.python_version()}, {torch.__version__} (CUDA {torch.version.cuda or 'none'})")
    print(f"CUDA device    {card}")
    print("libraries      _C (schemas, planning): loaded")
    print(f"               _cuda (kernels): {'loaded' if CUDA_PROBLEM is None else CUDA_PROBLEM}")


def _progress(label: str, total: int) -> Callable[[int], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(done: int) -> None:
        print(f"\r{label}: call {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


def _run(args: argparse.Namespace) -> None:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    batch = args.batch or (_FULL["batch"] if device.type == "cuda" else _CPU_BATCH)
    repeat = args.repeat or (20 if device.type == "cuda" else 3)
    shape = (batch, args.heads, args.length, args.head_dim)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    print(f"q, k, v of {shape}, {args.dtype}, N(0, 1), {'causal, ' if args.causal else ''}on {args.device}")
    if device.type == "cpu" and args.batch is None:
        print(f"No CUDA device is used: batch {batch} in place of {_FULL['batch']}.")
    print(f"kernel: {explain(q, k, v, is_causal=args.causal)}")

    calls: dict[str, Callable[[], Tensor]] = {
        "attention_ext": lambda: sdpa(q, k, v, is_causal=args.causal),
        "PyTorch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=args.causal),
    }
    heads = _measure.sample_heads(batch, args.heads)
    want = torch.stack([_measure.float64_attention(q[b, h], k[b, h], v[b, h], args.causal) for b, h in heads])
    flop = 4 * batch * args.heads * args.length**2 * args.head_dim * (0.5 if args.causal else 1.0)
    print(f"{'':14} {'ms':>10} {'TFLOP/s':>8} {'ratio':>6} {'max error':>10} {'rel. Frobenius':>15}")
    times: dict[str, float] = {}
    with torch.no_grad():
        for name in ("PyTorch", "attention_ext"):
            times[name] = _measure.time_ms(calls[name], device, repeat, _progress(name, repeat + 2))
            out = calls[name]()
            largest, frobenius = _measure.errors(torch.stack([out[b, h] for b, h in heads]), want)
            ratio = times["PyTorch"] / times[name]
            rate = flop / times[name] / 1e9
            print(f"{name:14} {times[name]:10.3f} {rate:8.3f} {ratio:6.2f} {largest:10.2e} {frobenius:15.2e}")
    print(f"medians of {repeat} calls; errors against float64 on {len(heads)} of {batch * args.heads} heads")


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console command; returns the exit status."""
    args = _parse(argv)
    if args.command == "info":
        _info()
    else:
        _run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
