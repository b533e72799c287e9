"""FFPA (ffpa-attn, its CuTe-DSL back end, compiled at run time) beside ours in the same process: rows "ffpa" of a record, forward
and backward.

Only where ffpa_attn can be imported, which is the caller's affair; nothing else depends on it. Its kernels are the last thing a
record runs: whatever goes wrong in them costs only their own rows.
"""

import time
from collections.abc import Callable
from typing import Any

import backward
import torch
from cases import Case
from common import Sample, first_line, log, time_ms
from torch import Tensor

__all__ = ["measure", "takes"]

LARGEST, SMALLEST = 512, 384  # head dims of its Hopper kernels that are timed
BUDGET = 240.0  # seconds, compilation included, after which no further case is begun


def takes(case: Case) -> bool:
    half = case.dtype in (torch.float16, torch.bfloat16)
    return half and SMALLEST <= case.E == case.Ev <= LARGEST and case.mask is None and not (case.causal and case.L != case.S)


def measure(cases: dict[str, Case], record: dict[str, Any]) -> dict[str, Any]:
    """Adds "ffpa" to rows of the record's forward, and to its backward, where FFPA takes the case; returns its version, or why it
    could not be imported.
    """
    try:
        import ffpa_attn

        func, backend = ffpa_attn.ffpa_attn_func, ffpa_attn.CuTeDSLBackend()
    except Exception as error:
        log(f"ffpa_attn: {first_line(error)}")
        return {"not_available": first_line(error)}
    begin = time.monotonic()
    chosen = [name for name in record["forward"] if name in cases and takes(cases[name])]
    ways = [(name, record["forward"][name]["rows"], _row) for name in chosen]
    ways += [(name, record["backward"][name], _backward_row) for name in chosen if name in record.get("backward", {})]
    for name, entry, measured in ways:
        if time.monotonic() - begin > BUDGET:
            entry["ffpa"] = {"not_available": f"not begun after {BUDGET:.0f} s"}
        else:
            entry["ffpa"] = measured(cases[name], func, backend)
        log(f"{name:12} {'ffpa':15} {entry['ffpa']}")
    return {"ffpa_attn": str(ffpa_attn.__version__), "back_end": "CuTe-DSL", "seconds": time.monotonic() - begin}


@torch.no_grad()
def _row(case: Case, func: Callable[..., Tensor], backend: Any) -> dict[str, Any]:
    try:
        q, k, v = case.inputs("cuda")
        options = {"is_causal": case.causal, "enable_gqa": case.Hk != case.Hq}

        def call() -> Tensor:
            return func(q, k, v, backend=backend, **options)

        def ours() -> Tensor:
            return torch.ops.attention_ext.sdpa(q, k, v, **options)

        begin = time.monotonic()
        errors = Sample(case, q, k, v).errors(call())  # the first call compiles
        seconds = time.monotonic() - begin
        theirs, own, again = time_ms(call, case.cold_l2), time_ms(ours, case.cold_l2), time_ms(call, case.cold_l2)
        times = {"ms": theirs, "ms_second_pass": again, "ours_ms_in_between": own, "first_call_s": seconds}
        return times | {"tflops": case.flop / theirs / 1e9} | errors
    except Exception as error:
        return {"not_available": first_line(error)}


def _backward_row(case: Case, func: Callable[..., Tensor], backend: Any) -> dict[str, Any]:
    """Milliseconds of the backward and of both directions, ours after FFPA's."""
    try:
        leaves = [t.requires_grad_() for t in case.inputs("cuda")]
        options = {"is_causal": case.causal, "enable_gqa": case.Hk != case.Hq}
        begin = time.monotonic()
        func(*leaves, backend=backend, **options).sum().backward()  # compiles
        seconds = time.monotonic() - begin
        theirs = backward.both_ways(lambda: func(*leaves, backend=backend, **options), leaves)
        ours = backward.both_ways(lambda: torch.ops.attention_ext.sdpa(*leaves, **options), leaves)
        return theirs | {f"ours_{way}": ms for way, ms in ours.items()} | {"first_call_s": seconds}
    except Exception as error:
        return {"not_available": first_line(error)}
