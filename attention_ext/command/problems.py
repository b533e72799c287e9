"""attention-ext run: the operators next to PyTorch's on two KernelBench problems.

"attention" is level 1 problem 97, "linear" level 2 problem 84 (linear + batch norm + scale + softmax in float32).
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _measure, explain, sdpa
from .._libraries import BUILD
from ..nn import LinearBatchNormSoftmax
from . import cards
from .info import built_for
from .output import Progress, Table, say

__all__ = ["FULL", "run"]

FULL = {"batch": 32, "heads": 32, "length": 512, "head_dim": 1024, "rows": 1024, "features": 8192}
_ON_A_CPU = {"batch": 1, "rows": 128, "features": 1024}
_WARM_UP = 2  # calls before those that are timed, as _measure has it


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    default = FULL if args.device.type == "cuda" else FULL | _ON_A_CPU
    return {name: getattr(args, name) or size for name, size in default.items()}


def _smaller(args: argparse.Namespace, sizes: dict[str, int], *names: str) -> None:
    """Says which sizes are not the benchmark's because there is no card."""
    if args.device.type == "cpu" and not any(getattr(args, name) for name in names):
        used, full = (" and ".join(f"{name} {of[name]}" for name in names) for of in (sizes, FULL))
        say(f"No CUDA device is used: {used} in place of {full}.")


def _attention(args: argparse.Namespace, repeat: int) -> None:
    device, dtype, sizes = args.device, args.dtype or torch.float16, _sizes(args)
    batch, heads, length, head_dim = (sizes[name] for name in ("batch", "heads", "length", "head_dim"))
    shape = (batch, heads, length, head_dim)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    say(f"q, k, v of {shape}, {str(dtype).removeprefix('torch.')}, N(0, 1), {'causal, ' if args.causal else ''}on {device}")
    _smaller(args, sizes, "batch")
    say(f"kernel: {explain(q, k, v, is_causal=args.causal)}")

    calls: dict[str, Callable[[], Tensor]] = {
        "PyTorch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=args.causal),
        "attention_ext": lambda: sdpa(q, k, v, is_causal=args.causal),
    }
    picked = _measure.sample_heads(batch, heads)
    want = torch.stack([_measure.float64_attention(q[b, h], k[b, h], v[b, h], args.causal) for b, h in picked])
    flop = 4 * batch * heads * length**2 * head_dim * (0.5 if args.causal else 1.0)
    table = Table("", "ms", "TFLOP/s", "ratio", "max error", "rel. Frobenius")
    times: dict[str, float] = {}
    with torch.no_grad(), Progress(len(calls) * (repeat + _WARM_UP)) as progress:
        for name, call in calls.items():
            ms = times[name] = _measure.time_ms(call, device, repeat, partial(progress.step, name))
            out = call()
            largest, frobenius = _measure.errors(torch.stack([out[b, h] for b, h in picked]), want)
            cells = f"{ms:.3f}", f"{flop / ms / 1e9:.3f}", f"{times['PyTorch'] / ms:.2f}", f"{largest:.2e}", f"{frobenius:.2e}"
            table.add(name, *cells)
    table.print()
    say(f"medians of {repeat} calls; errors against float64 on {len(picked)} of {batch * heads} heads")


def _float64_layer(input: Tensor, linear: nn.Linear, bn: nn.BatchNorm1d) -> Tensor:
    """The layer in float64, its product on the input's device, the rest on the CPU."""
    x = F.linear(input.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()).cpu()
    if bn.training:
        mean, var = x.mean(0), x.var(0, correction=0)
    else:
        assert bn.running_mean is not None and bn.running_var is not None
        mean, var = bn.running_mean.cpu().double(), bn.running_var.cpu().double()
    return torch.softmax((x - mean) / (var + bn.eps).sqrt() * bn.weight.cpu().double() + bn.bias.cpu().double(), -1)


def _linear(args: argparse.Namespace, repeat: int) -> None:
    device, sizes = args.device, _sizes(args)
    rows, features = sizes["rows"], sizes["features"]
    torch.manual_seed(0)
    x = torch.rand(rows, features, device=device)
    linear, bn, scale = nn.Linear(features, features).to(device), nn.BatchNorm1d(features).to(device), torch.ones(1, device=device)
    module = LinearBatchNormSoftmax(linear, bn, scale)
    calls: dict[str, Callable[[], Tensor]] = {
        "PyTorch": lambda: torch.softmax(scale * bn(linear(x)), 1),
        "attention_ext": lambda: module(x),
    }
    say(f"linear + batch norm + scale + softmax, ({rows}, {features}) to {features} features, float32 without TF32, on {device}")
    _smaller(args, sizes, "rows", "features")
    table = Table("", "ms", "TFLOP/s", "ratio", "rel. Frobenius", "worst row")
    with Progress(2 * len(calls) * (repeat + _WARM_UP)) as progress:
        for mode in ("train", "eval"):
            bn.train(mode == "train")
            with torch.no_grad():
                want = _float64_layer(x, linear, bn)
                times: dict[str, float] = {}
                for name, call in calls.items():
                    label = f"{name} {mode}"
                    ms = _measure.time_ms(call, device, repeat, partial(progress.step, label))
                    times[name] = ms
                    frobenius, worst = _measure.row_errors(call().cpu(), want)
                    rate, ratio = 2 * rows * features**2 / ms / 1e9, times["PyTorch"] / ms
                    table.add(label, f"{ms:.3f}", f"{rate:.3f}", f"{ratio:.2f}", f"{frobenius:.2e}", f"{worst:.2e}")
    table.print()
    say(f"medians of {repeat} calls; errors against float64 on all rows; train is what the benchmark runs")


def run(args: argparse.Namespace) -> int:
    on_card = args.device.type == "cuda"
    repeat = args.repeat or (20 if on_card else 3)
    if on_card and cards.at(args.device).lacks_kernels:
        say(f"{args.device} is a Hopper card, and attention_ext {BUILD.version} was built for {built_for()}.")
        say()
    if args.problem in ("attention", "both"):
        _attention(args, repeat)
    if args.problem == "both":
        say()
    if args.problem in ("linear", "both"):
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            _linear(args, repeat)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed
    if not on_card:
        say()
        say("ratio: PyTorch's time over ours. On the CPU nothing is to be gained: sdpa is PyTorch's own operator there.")
    return 0
