"""What the records share: timing on the device, the formula in three calls, errors on sampled rows and the rule for them."""

import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_ext import _measure

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))  # one rule for tests and benches
import error_rule

__all__ = [
    "BACK_ENDS",
    "Sample",
    "at_peak",
    "attempt",
    "by_back_end",
    "error_rule",
    "extra_memory",
    "first_line",
    "in_turns",
    "log",
    "naive",
    "own_kernels",
    "three_calls",
    "time_ms",
    "within_rule",
]

DEVICE = torch.device("cuda")
REST = 0.25  # seconds
TURNS, TURN_MS, MOST_CALLS, MOST_MS = 3, 6.0, 50, 36.0
T = TypeVar("T")
ERRORS = ("max_abs_error", "relative_frobenius_error")
BACK_ENDS = {
    "torch_math": SDPBackend.MATH,
    "torch_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch_flash": SDPBackend.FLASH_ATTENTION,
    "torch_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300] or type(error).__name__


def attempt(row: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return row()
    except Exception as error:
        torch.cuda.empty_cache()
        return {"not_available": first_line(error)}


def time_ms(call: Callable[[], Any], cold_l2: bool = False, most: int = 30, rested: bool = True) -> float:
    """Median of 5 to `most` calls in milliseconds, fewer for slow ones; of `most` calls where that is less than 5.

    rested: the device idles for REST seconds before. At its power limit a card is up to 20 % slower for some 0.1 s after other
    work, which is none of the call's doing.
    cold_l2: before each call, outside of what is timed, a buffer of twice the L2 cache is written. Otherwise the calls follow
    each other, with whatever the one before has left in L2.
    """
    if rested and DEVICE.type == "cuda":
        torch.cuda.synchronize()
        time.sleep(REST)
    timed = _cold_ms if cold_l2 else partial(_measure.time_ms, device=DEVICE)
    if most < 5:
        return timed(call, repeat=most)
    return timed(call, repeat=max(5, min(most, int(300 / max(timed(call, repeat=1), 0.01)))))


def _cold_ms(call: Callable[[], Any], repeat: int) -> float:
    buffer = torch.empty(2 * torch.cuda.get_device_properties(DEVICE).L2_cache_size, dtype=torch.uint8, device=DEVICE)
    events = []
    for _ in range(repeat + 2):
        buffer.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) for start, stop in events[2:])
    return (times[(repeat - 1) // 2] + times[repeat // 2]) / 2


def queued_ms(call: Callable[[], Any], count: int) -> float:
    """Milliseconds a call of `count` on the current stream, queued without waiting in between."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / count


def in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each of several calls, the median of up to TURNS turns, so that all see the same clocks and temperatures.

    In a turn each runs for about TURN_MS, MOST_CALLS times at most and at least once. There are as many turns as let the slowest
    run for MOST_MS, one at least. Each has been called before; once more before its first turn says how often it fits.
    """
    once = {name: max(queued_ms(call, 1), 1e-3) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(1, min(TURNS, int(MOST_MS / max(once.values()))))):
        for name, call in calls.items():
            times[name].append(queued_ms(call, max(1, min(MOST_CALLS, int(TURN_MS / once[name])))))
    return {name: statistics.median(own) for name, own in times.items()}


def three_calls(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a person writes: the whole score matrix in memory, in the operands' dtype."""
    return torch.softmax((q * q.size(-1) ** -0.5) @ k.mT, -1) @ v


def naive(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Tensor], str]:
    """The formula in three calls for any case without a mask, and how it was written; neither K nor V is repeated."""
    if case.Hk == case.Hq and not case.causal:
        return lambda: three_calls(q, k, v), "three calls"
    groups = case.Hq // case.Hk
    rows = q.reshape(case.B, case.Hk, groups * case.L, case.E)
    hidden = torch.ones(case.L, case.S, dtype=torch.bool, device=q.device).triu(1) if case.causal else None

    def call() -> Tensor:
        x = (rows * case.E**-0.5) @ k.mT
        if hidden is not None:
            x.view(case.B, case.Hk, groups, case.L, case.S).masked_fill_(hidden, -math.inf)
        return (torch.softmax(x, -1) @ v).view(case.B, case.Hq, case.L, case.Ev)

    how = ["the heads of a group as rows of one product"] if groups > 1 else []
    how += ["scores hidden in place by a mask made beforehand"] if case.causal else []
    return call, "three calls, " + ", ".join(how)


def own_kernels(case: Case, *operands: Tensor, mask: Tensor | None = None, **options: Any) -> Callable[[], Tensor]:
    """The call by sdpa_forward: by this package's own kernels, as its gradient is, also where sdpa runs PyTorch's back ends."""
    forward = torch.ops.attention_ext.sdpa_forward
    return lambda: forward(*operands, mask, None, 0.0, case.causal, enable_gqa=case.Hk != case.Hq, **options)[0]


def by_back_end(name: str, *operands: Tensor, **options: Any) -> Callable[[], Tensor]:
    """The call by one of PyTorch's back ends, of BACK_ENDS; it fails where that does not take it."""

    def call() -> Tensor:
        with sdpa_kernel(BACK_ENDS[name]):
            return F.scaled_dot_product_attention(*operands, **options)

    return call


def at_peak(call: Callable[[], T]) -> tuple[int, T]:
    """Bytes beyond what is there before that a call takes from torch's allocator at its peak, its result among them; the result."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def extra_memory(call: Callable[[], Tensor]) -> int:
    """The same without the result."""
    taken, out = at_peak(call)
    return taken - out.nbytes


class Sample:
    """Some query rows of some heads of a case, and what they are in float64."""

    def __init__(self, case: Case, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, rows: int = 64) -> None:
        self.rows = torch.linspace(0, case.L - 1, min(case.L, rows)).round().long().to(q.device)
        self.heads = _measure.sample_heads(case.B, case.Hq, max(4, 16 // len(self.rows)))
        self.dtype = case.dtype
        full = None if mask is None else mask.expand(case.B, case.Hq, mask.size(-2), case.S)
        want = []
        for b, h in self.heads:
            g = h * case.Hk // case.Hq
            x = (q[b, h, self.rows].double() @ k[b, g].double().mT) * case.E**-0.5
            if case.causal:
                x = x.masked_fill(torch.arange(case.S, device=q.device) > self.rows[:, None], -math.inf)
            if full is not None:
                part = full[b, h] if full.size(-2) == 1 else full[b, h, self.rows]
                x = x.masked_fill(~part, -math.inf) if part.dtype == torch.bool else x + part.double()
            want.append(torch.softmax(x, -1) @ v[b, g].double())
        self.want = torch.stack(want).cpu()
        self.top = float(self.want.abs().max())

    def errors(self, out: Tensor) -> dict[str, float]:
        got = torch.stack([out[b, h, self.rows] for b, h in self.heads])
        return dict(zip(ERRORS, error_rule.errors(got, self.want), strict=True))


def within_rule(ours: dict[str, float], theirs: dict[str, float], top: float, dtype: torch.dtype) -> bool:
    """The error rule for the errors in two rows."""
    return error_rule.within(*([row[kind] for kind in ERRORS] for row in (ours, theirs)), top, dtype)
