"""The command attention-ext: the operators beside PyTorch's on two KernelBench problems, or what is installed.

"attention" is level 1 problem 97, "linear" level 2 problem 84 (linear + batch norm + scale + softmax in float32).
"""

import argparse
import platform
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _measure, explain, sdpa
from ._libraries import BUILD, CUDA_PROBLEM
from .nn import LinearBatchNormSoftmax

__all__ = ["main"]

_FULL = {"batch": 32, "heads": 32, "length": 512, "head_dim": 1024}  # KernelBench level 1 problem 97
_CPU_BATCH = 1
_FULL_LINEAR = {"rows": 1024, "features": 8192}  # KernelBench level 2 problem 84
_CPU_LINEAR = {"rows": 128, "features": 1024}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attention-ext", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("run", "info"), default="run", help="default run")
    parser.add_argument("--problem", choices=("attention", "linear", "both"), default="both", help="default %(default)s")
    parser.add_argument(
        "--device", type=torch.device, default="cuda" if torch.cuda.is_available() and CUDA_PROBLEM is None else "cpu"
    )
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32", "float64"), default="float16", help="of attention, default float16"
    )
    parser.add_argument("--batch", type=_positive, help=f"default {_FULL['batch']}, on a CPU {_CPU_BATCH}")
    parser.add_argument("--heads", type=_positive, default=_FULL["heads"], help="default %(default)s")
    parser.add_argument("--length", type=_positive, default=_FULL["length"], help="queries and keys, default %(default)s")
    parser.add_argument("--head-dim", type=_positive, default=_FULL["head_dim"], help="default %(default)s")
    parser.add_argument("--causal", action="store_true")
    for name, size in _FULL_LINEAR.items():
        parser.add_argument(f"--{name}", type=_positive, help=f"of linear, default {size}, on a CPU {_CPU_LINEAR[name]}")
    parser.add_argument("--repeat", type=_positive, help="timed calls of each operator, default 20, on a CPU 3")
    args = parser.parse_args(argv)
    if args.rows == 1:
        parser.error("argument --rows: training takes more than one")
    return args


def _built_for() -> str:
    if BUILD.cuda_major == 0:
        return "CPU only"
    missing = "" if BUILD.has_hopper_kernels else " without the kernels for Hopper (9.0a in TORCH_CUDA_ARCH_LIST builds them)"
    return BUILD.built_for + missing


def _lacks_kernels_for(device: torch.device) -> bool:
    """A Hopper card, and a build for it (9.0) that is without the kernels for it (9.0a)."""
    lacking = device.type == "cuda" and BUILD.cuda_major > 0 and not BUILD.has_hopper_kernels
    return lacking and torch.cuda.get_device_capability(device) == (9, 0)


def _info() -> None:
    card = "none found"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        card = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    print(f"attention_ext  {BUILD.version}, csrc {BUILD.csrc}")
    print(f"built for      {_built_for()}")
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


def _run_attention(args: argparse.Namespace) -> None:
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


def _float64_layer(input: Tensor, linear: nn.Linear, bn: nn.BatchNorm1d) -> Tensor:
    """The layer in float64, its product on the input's device, the rest on the CPU."""
    x = F.linear(input.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()).cpu()
    if bn.training:
        mean, var = x.mean(0), x.var(0, correction=0)
    else:
        assert bn.running_mean is not None and bn.running_var is not None
        mean, var = bn.running_mean.cpu().double(), bn.running_var.cpu().double()
    return torch.softmax((x - mean) / (var + bn.eps).sqrt() * bn.weight.cpu().double() + bn.bias.cpu().double(), -1)


def _run_linear(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    sizes = _FULL_LINEAR if device.type == "cuda" else _CPU_LINEAR
    rows, features = args.rows or sizes["rows"], args.features or sizes["features"]
    repeat = args.repeat or (20 if device.type == "cuda" else 3)
    torch.manual_seed(0)
    x = torch.rand(rows, features, device=device)
    linear, bn, scale = nn.Linear(features, features).to(device), nn.BatchNorm1d(features).to(device), torch.ones(1, device=device)
    module = LinearBatchNormSoftmax(linear, bn, scale)
    calls: dict[str, Callable[[], Tensor]] = {
        "PyTorch": lambda: torch.softmax(scale * bn(linear(x)), 1),
        "attention_ext": lambda: module(x),
    }
    print(f"linear + batch norm + scale + softmax, ({rows}, {features}) to {features} features, float32 without TF32, on {device}")
    if device.type == "cpu" and args.rows is None and args.features is None:
        print("No CUDA device is used: {rows} rows and {features} features in place of ".format(**sizes), end="")
        print("{rows} and {features}.".format(**_FULL_LINEAR))
    print(f"{'':20} {'ms':>10} {'TFLOP/s':>8} {'ratio':>6} {'rel. Frobenius':>15} {'worst row':>10}")
    for mode in ("train", "eval"):
        bn.train(mode == "train")
        with torch.no_grad():
            want = _float64_layer(x, linear, bn)
            times: dict[str, float] = {}
            for name, call in calls.items():
                label = f"{name} {mode}"
                times[name] = _measure.time_ms(call, device, repeat, _progress(label, repeat + 2))
                frobenius, worst = _measure.row_errors(call().cpu(), want)
                rate = 2 * rows * features**2 / times[name] / 1e9
                ratio = times["PyTorch"] / times[name]
                print(f"{label:20} {times[name]:10.3f} {rate:8.3f} {ratio:6.2f} {frobenius:15.2e} {worst:10.2e}")
    print(f"medians of {repeat} calls; errors against float64 on all rows; train is what the benchmark runs")


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console command; returns the exit status."""
    args = _parse(argv)
    if args.command == "info":
        _info()
        return 0
    if _lacks_kernels_for(args.device):
        print(f"{args.device} is a Hopper card, and attention_ext {BUILD.version} was built for {_built_for()}.\n")
    if args.problem in ("attention", "both"):
        _run_attention(args)
    if args.problem == "both":
        print()
    if args.problem in ("linear", "both"):
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            _run_linear(args)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed
    return 0


if __name__ == "__main__":
    sys.exit(main())
