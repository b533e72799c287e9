"""Gradients of a case, of its bias too: ours beside PyTorch's default, up to head dim 256 its fused back ends for half precision,
and the formula in three calls. A part of record.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases import MOST_BACK_END, Case
from common import DEVICE, attempt, by_back_end, log, naive, own_kernels, time_ms
from torch import Tensor

__all__ = ["measure"]

OPS = torch.ops.attention_ext
MOST_SCORES = 10e9  # bytes of a score matrix, of which three calls under autograd hold several


def measure(case: Case) -> dict[str, dict[str, Any]]:
    """By the names of the forward's entries, milliseconds of the backward alone, and under "both" of forward and backward.

    "three_calls" has neither where the formula has a mask or too large a score matrix or ran out of memory, and a back end where
    it does not take the case. "tflops" is of ours, the backward alone, by five products where the forward has two.
    """
    leaves = [t.requires_grad_() for t in case.inputs(str(DEVICE))]
    options = case.options(str(DEVICE))
    mask = options["attn_mask"]
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.requires_grad_())
    q, k, v = leaves[:3]
    calls: dict[str, Callable[[], Tensor]] = {
        "attention_ext": lambda: OPS.sdpa(q, k, v, **options),
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, **options),
    }
    if case.E <= MOST_BACK_END:
        calls["own"] = own_kernels(case, q, k, v, mask=mask)
    calls |= {name: by_back_end(name, q, k, v, **options) for name in case.fused_back_ends}
    if mask is None and case.scores * case.dtype.itemsize <= MOST_SCORES:
        calls["three_calls"] = naive(case, q, k, v)[0]
    times = {name: attempt(partial(both_ways, call, leaves)) for name, call in calls.items()}
    log(f"{case.name} backward: {times}")
    own = times.pop("own", None)
    entries = {case.name: times} | ({} if own is None else {f"{case.name} own": times | {"attention_ext": own}})
    return {name: entry(case, rows) for name, rows in entries.items()}


def both_ways(call: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, float]:
    result = call()
    grad = torch.randn_like(result)
    backward = time_ms(partial(torch.autograd.grad, result, leaves, grad, retain_graph=True))
    del result
    return {"backward": backward, "both": time_ms(lambda: torch.autograd.grad(call(), leaves, grad))}


def entry(case: Case, times: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: row["backward"] for name, row in times.items() if "backward" in row}
    failed = {name: row["not_available"] for name, row in times.items() if "backward" not in row}
    found["both"] = {name: row["both"] for name, row in times.items() if "both" in row}
    if "attention_ext" in found:
        found["tflops"] = 2.5 * case.flop / found["attention_ext"] / 1e9
    return found | ({"not_available": failed} if failed else {})
