"""FFPA (ffpa-attn, its CuTe-DSL back end, compiled at run time) beside ours in the same process: rows "ffpa" of a record.

Only where ffpa_attn can be imported, which is the caller's affair; nothing else depends on it. Its kernels are the last thing a
record runs: whatever goes wrong in them costs only their own rows.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from cases import Case
from common import Sample, first_line, log, time_ms
from torch import Tensor

__all__ = ["measure", "takes"]

LARGEST, SMALLEST = 512, 384  # head dims of its Hopper kernels that are timed
BUDGET = 150.0  # seconds, compilation included, after which no further case is begun


def takes(case: Case) -> bool:
    half = case.dtype in (torch.float16, torch.bfloat16)
    return half and SMALLEST <= case.E == case.Ev <= LARGEST and case.mask is None and not (case.causal and case.L != case.S)


def measure(cases: dict[str, Case], forward: dict[str, Any]) -> dict[str, Any]:
    """Adds rows["ffpa"] to the entries of `forward` that FFPA takes; returns its version, or why it could not be imported."""
    try:
        import ffpa_attn

        func, backend = ffpa_attn.ffpa_attn_func, ffpa_attn.CuTeDSLBackend()
    except Exception as error:
        log(f"ffpa_attn: {first_line(error)}")
        return {"not_available": first_line(error)}
    begin = time.monotonic()
    with torch.no_grad():
        for name, case in cases.items():
            if not takes(case):
                continue
            if time.monotonic() - begin > BUDGET:
                row: dict[str, Any] = {"not_available": f"not begun after {BUDGET:.0f} s"}
            else:
                row = _row(case, func, backend)
            forward[name]["rows"]["ffpa"] = row
            log(f"{name:12} {'ffpa':15} {row}")
    return {"ffpa_attn": str(ffpa_attn.__version__), "back_end": "CuTe-DSL", "seconds": time.monotonic() - begin}


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
