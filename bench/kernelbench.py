#!/usr/bin/env python3
"""KernelBench's problems as examples/kernelbench solves them, next to the benchmark's Model: JSON on stdout, progress on stderr.

    python bench/kernelbench.py

Problem 97 of level 1 in float16 and float32, problem 84 of level 2 in float32, at the benchmark's sizes, with inputs uniform in
[0, 1) as it draws them, and without TF32. Both are called in turns under no_grad, as its harness does: milliseconds a call, the
ratio, PyTorch's time over ours, and how far the two results are apart, relative to the largest value, with a limit for it.
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
# Of the largest difference: in float32 the benchmark's own tolerance; in float16 a unit in the last place of the largest value for
# each of the two results, a fifth of the benchmark's 1e-2.
LIMITS = {torch.float16: 2 * torch.finfo(torch.float16).eps, torch.float32: 1e-4}
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
    """{"ours", "torch"} in milliseconds, "ratio", "max_difference", "limit", "within_limit", which a NaN is not."""
    with torch.no_grad():
        got, want = (calls[who]() for who in ("ours", "torch"))
        limit = LIMITS[want.dtype]
        difference = float((got.float() - want.float()).abs().max() / want.float().abs().max())
        del got, want
        times = in_turns(calls)
    errors = {"max_difference": difference, "limit": limit, "within_limit": difference <= limit}
    return {**times, "ratio": times["torch"] / times["ours"]} | errors


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
