#!/usr/bin/env python3
"""KernelBench's problems as examples/kernelbench solves them, next to the benchmark's Model: JSON on stdout, progress on stderr.

    python bench/kernelbench.py

Problem 97 of level 1 in float16 and float32, problem 84 of level 2 in float32, at the benchmark's sizes, with inputs uniform in
[0, 1) as it draws them, and without TF32. Both are called in turns under no_grad, as its harness does: milliseconds a call, the
ratio, PyTorch's time over ours, and how far the two results are apart, relative to the largest value.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import attempt, in_turns, log
from loader import script  # of tests/support, which common.py puts on the path
from torch import Tensor

__all__ = ["PROBLEMS", "measure"]

FOLDER = "examples/kernelbench"
Calls = dict[str, Callable[[], Tensor]]


def _problem97(dtype: torch.dtype) -> Calls:
    example = script("level1_problem97.py", FOLDER)
    model, inputs = example.ModelNew(*example.get_init_inputs()), example.get_inputs(dtype)
    return {"ours": lambda: model(*inputs), "torch": lambda: F.scaled_dot_product_attention(*inputs)}


def _problem84() -> Calls:
    """In training mode: the harness never calls eval()."""
    example = script("level2_problem84.py", FOLDER)
    (x,) = example.get_inputs()
    model = example.ModelNew(*example.get_init_inputs()).to(x.device)
    return {"ours": lambda: model(x), "torch": lambda: torch.softmax(model.scale * model.bn(model.gemm(x)), 1)}


PROBLEMS: dict[str, Callable[[], Calls]] = {
    "level 1 problem 97, float16": lambda: _problem97(torch.float16),
    "level 1 problem 97, float32": lambda: _problem97(torch.float32),
    "level 2 problem 84, float32": _problem84,
}


def measure(calls: Calls) -> dict[str, Any]:
    """{"ours", "torch"} in milliseconds, "ratio", "max_difference"."""
    with torch.no_grad():
        got, want = (calls[who]().float() for who in ("ours", "torch"))
        difference = float((got - want).abs().max() / want.abs().max())
        del got, want
        times = in_turns(calls)
    return {**times, "ratio": times["torch"] / times["ours"], "max_difference": difference}


def rows() -> Iterator[dict[str, Any]]:
    for name, problem in PROBLEMS.items():
        row = {"name": name} | attempt(lambda problem=problem: measure(problem()))
        log(f"{name:30} {row.get('not_available') or round(row['ratio'], 3)}")
        yield row


def main() -> int:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        json.dump({"kernelbench": list(rows())}, sys.stdout, indent=1)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return 0


if __name__ == "__main__":
    sys.exit(main())
