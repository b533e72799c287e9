#!/usr/bin/env python3
"""What a call costs the host, ours beside PyTorch's: JSON on stdout, progress on stderr.

    python bench/host_time.py [--only TEXT] [--turns N]

Microseconds a call as the caller waits for it: calls are queued without waiting for the device, which is idle before each batch of
them. The medians of batches that are taken in turns. `operator` is torch.ops.attention_ext.*, `function` attention_ext.*, and
`ratio` the slower of both over PyTorch's, which is not to be above `goal`. On CUDA: a small problem for which PyTorch's operator
runs, and one that a kernel of this package runs; both without and with a gradient, in inference mode and compiled; and single
calls, each of a length that the process has not seen, for which cuDNN builds a plan: by own kernels beside cuDNN, by sdpa beside
PyTorch's default. On the CPU: a tiny call, and the linear operators beside what they replace.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from common import by_back_end, log
from torch import Tensor

import attention_ext

__all__ = ["Row", "measure", "rows"]

SDPA = {
    "operator": torch.ops.attention_ext.sdpa,
    "function": attention_ext.sdpa,
    "torch": F.scaled_dot_product_attention,
}
BATCH = 50  # calls; each launches few kernels, and CUDA queues a thousand
WARM_UP = 2  # batches that are not counted
FIRST = 9  # first calls at new shapes that are counted


@dataclass(frozen=True)
class Row:
    """Calls of the same result, by who makes them, and the goal for the ratio of ours to PyTorch's; `most` batches can be taken."""

    name: str
    calls: dict[str, Callable[[], Any]]
    goal: float
    mode: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    batch: int = BATCH
    most: int | None = None


def _qkv(shape: tuple[int, ...], dtype: torch.dtype, device: str, grad: bool = False) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device=device).requires_grad_(grad) for _ in range(3)]


def _sdpa(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, goals: dict[str, float], compiled: bool
) -> Iterator[Row]:
    """A problem in every mode; goals: "plain", "forward", "both" and "compiled"."""
    tensors, leaves = _qkv(shape, dtype, device), _qkv(shape, dtype, device, grad=True)
    grad = torch.randn(shape, dtype=dtype, device=device)

    def rows_of(kind: str, call: Callable[[Callable[..., Tensor]], Callable[[], Any]], goal: str, **options: Any) -> Row:
        return Row(f"{name}, {kind}", {who: call(operator) for who, operator in SDPA.items()}, goals[goal], **options)

    def both(operator: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(operator(*leaves), leaves, grad)

    yield rows_of("nothing requires grad", lambda operator: lambda: operator(*tensors), "plain")
    yield rows_of("no_grad", lambda operator: lambda: operator(*leaves), "plain", mode=torch.no_grad)
    yield rows_of("inference_mode", lambda operator: lambda: operator(*tensors), "plain", mode=torch.inference_mode)
    yield rows_of("with a gradient, forward", lambda operator: lambda: operator(*leaves), "forward")
    yield rows_of("with a gradient, forward and backward", both, "both")
    if compiled:
        torch._dynamo.reset()  # its limit of recompilations counts all programs of one line of code

        def program(operator: Callable[..., Tensor]) -> Callable[[], Any]:
            made = torch.compile(lambda q, k, v: operator(q, k, v), fullgraph=True)
            return lambda: made(*tensors)

        yield rows_of("compiled", program, "compiled", mode=torch.no_grad)


def _first_calls(device: str, cudnn: str = "torch_cudnn") -> Iterator[Row]:
    """Single calls with tensors that are there, of lengths that no call before had."""
    lengths = itertools.count(520, 8)

    def each(operator: Callable[..., Tensor], gradients: bool) -> Callable[[], Any]:
        def made() -> tuple[list[Tensor], Tensor]:
            shape = (1, 8, next(lengths), 64)
            return _qkv(shape, torch.bfloat16, device, gradients), torch.randn(shape, dtype=torch.bfloat16, device=device)

        unseen = iter([made() for _ in range(WARM_UP + FIRST)])

        def call() -> Any:
            tensors, grad = next(unseen)
            out = operator(*tensors)
            return torch.autograd.grad(out, tensors, grad) if gradients else out

        return call

    def own(*tensors: Tensor) -> Tensor:
        return torch.ops.attention_ext.sdpa_forward(*tensors, None, None, 0.0, False)[0]

    by_whom = {
        "own kernels beside cuDNN": ({"operator": own, "torch": lambda *tensors: by_back_end(cudnn, *tensors)()}, 0.1),
        "sdpa beside the default": ({"function": SDPA["function"], "torch": SDPA["torch"]}, 1.3),
    }
    for who, (operators, goal) in by_whom.items():
        for way, gradients in (("forward", False), ("forward and backward", True)):
            calls = {name: each(operator, gradients) for name, operator in operators.items()}
            yield Row(f"{device}, first call at a new shape, {who}, {way}", calls, goal, batch=1, most=FIRST)


def _linear(rows: int, features: int) -> Iterator[Row]:
    x, weight, bias = torch.randn(rows, features), torch.randn(features, features) * features**-0.5, torch.randn(features)
    mean, var, one = torch.zeros(features), torch.ones(features), torch.ones(())
    ours = torch.ops.attention_ext
    name = f"{rows} rows of {features} features"
    calls: dict[str, Callable[[], Any]] = {
        "operator": lambda: ours.linear_float32(x, weight, bias),
        "function": lambda: attention_ext.linear_float32(x, weight, bias),
        "torch": lambda: F.linear(x, weight, bias),
    }
    yield Row(f"linear_float32, {name}", calls, 1.05, mode=torch.no_grad, batch=5)
    for training in (False, True):
        calls = {
            "function": lambda training=training: attention_ext.linear_batchnorm_softmax(
                x, weight, bias, running_mean=mean, running_var=var, training=training
            ),
            "torch": lambda training=training: torch.softmax(
                F.batch_norm(F.linear(x, weight, bias), mean, var, training=training), -1
            ),
        }
        if not training:
            arguments = (x, weight, bias, None, None, mean, var, one, training, 1e-5)
            calls["operator"] = lambda arguments=arguments: ours.linear_batchnorm_softmax(*arguments)
        kind = "training" if training else "evaluation"
        yield Row(f"linear_batchnorm_softmax, {kind}, {name}", calls, 1.05, mode=torch.no_grad, batch=5)


def rows(device: str, compiled: bool = True) -> Iterator[Row]:
    if device == "cuda":
        goals = {"plain": 1.3, "forward": 2.0, "both": 1.3, "compiled": 1.15}
        yield from _sdpa("cuda, PyTorch's kernel", (1, 8, 128, 32), torch.bfloat16, "cuda", goals, compiled)  # routes.py
        yield from _sdpa("cuda, our kernel", (1, 8, 128, 512), torch.bfloat16, "cuda", goals, compiled)
        yield from _first_calls("cuda")
    goals = dict.fromkeys(("plain", "forward", "both"), 2.0) | {"compiled": 1.15}
    yield from _sdpa("cpu, tiny", (1, 1, 4, 8), torch.float32, "cpu", goals, compiled)
    yield from _linear(128, 1024)


def _microseconds(call: Callable[[], Any], batch: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(batch):
        call()
    return (time.perf_counter() - begin) / batch * 1e6


def measure(row: Row, turns: int) -> dict[str, Any]:
    """{"name", "operator", "function", "torch", "ratio", "goal", "kept"}; times in microseconds."""
    times: dict[str, list[float]] = {who: [] for who in row.calls}
    with row.mode():
        for turn in range(WARM_UP + min(turns, row.most or turns)):
            first = turn % len(row.calls)  # in turn, as who follows whom counts
            for who, call in [*row.calls.items()][first:] + [*row.calls.items()][:first]:
                taken = _microseconds(call, row.batch)
                if turn >= WARM_UP:
                    times[who].append(taken)
    found = {who: round(statistics.median(own), 2) for who, own in times.items()}
    ratio = max(value for who, value in found.items() if who != "torch") / found["torch"]
    return {"name": row.name, **found, "ratio": round(ratio, 3), "goal": row.goal, "kept": ratio <= row.goal}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--turns", type=int, default=21, help="batches of each call")
    parser.add_argument("--no-compile", action="store_true", help="leave compiled programs out")
    args = parser.parse_args()
    torch.manual_seed(0)
    measured = []
    for row in rows("cuda" if torch.cuda.is_available() else "cpu", compiled=not args.no_compile):
        if args.only in row.name:
            measured.append(measure(row, args.turns))
            log(" ".join(f"{key} {value}" for key, value in measured[-1].items()))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    made_on = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    json.dump(made_on | {"host_time": measured}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
