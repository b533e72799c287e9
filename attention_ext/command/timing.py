"""How bench takes its figures: warm-up, then turns in which each call runs a few times, so that all see the same clocks.

A call that cannot run is no crash: its place has the reason, in PyTorch's own words where PyTorch gives one.
"""

import re
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _measure

__all__ = ["OUT_OF_MEMORY", "STEPS", "free_bytes", "in_turns", "reason_of", "size_text"]

Call = Callable[[], Any]
TURNS = 3
STEPS = 1 + TURNS  # of each call: its warm-up and its turns
_BUDGET = 1000.0  # milliseconds that the timed calls of a row take together, about
_FEWEST, _MOST = 3, 30  # timed calls; of one that takes longer than the budget a single one
# PyTorch warns why a back end does not take a call, under a heading for each.
_HEADINGS = {"efficient": "Memory efficient kernel", "flash": "Flash attention kernel", "cudnn": "CuDNN attention kernel"}
_NOT_USED = "kernel not used because"
OUT_OF_MEMORY = "out of memory"
_ASKED = re.compile(r"[Tt]ried to allocate (\d[\d.]*) ?(\w+)")


def size_text(count: float) -> str:
    """Bytes for a person."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def free_bytes(device: torch.device) -> int:
    """What can be had without the system's killing the process; a large number where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            found = re.search(r"^MemAvailable: +(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else 1 << 62


def reason_of(error: BaseException, said: list[str], back_end: str = "") -> str:
    """A clause for a call that raised; said: what was warned meanwhile."""
    text = (str(error).strip().splitlines() or [""])[0]
    asked = _ASKED.search(text)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or asked:
        amount = "" if not asked else size_text(int(asked[1])) if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"
        return f"{OUT_OF_MEMORY}, asked for {amount}" if amount else OUT_OF_MEMORY
    heading = _HEADINGS.get(back_end)
    under = [i for i, line in enumerate(said) if heading and line.lower().startswith(heading.lower())]
    for line in said[under[0] + 1 :] if under else []:
        if _NOT_USED in line:
            break
        return f"refused: {line.strip().rstrip('.')}"
    return f"refused: {text.rstrip('.')}" if text else type(error).__name__


def _tidy(warning: str) -> str:
    return warning.partition(" (Triggered internally")[0].strip().splitlines()[0] if warning.strip() else ""


def _tried(call: Callable[[], list[float]], name: str, device: torch.device) -> list[float] | str:
    """What a call gives, or why it gives nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return call()
        except (RuntimeError, MemoryError) as error:
            reason = reason_of(error, [_tidy(str(one.message)) for one in caught], name.rpartition(" ")[2])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return reason


def _count(once: float, repeat: int | None) -> int:
    if repeat is not None:
        return repeat
    return 1 if once > _BUDGET else max(_FEWEST, min(_MOST, int(_BUDGET / max(once, 1e-3))))


def extra_bytes(call: Call, device: torch.device) -> int:
    """Beyond its results, what a call takes from torch's allocator on a card at its peak."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = call()
    torch.cuda.synchronize(device)
    results = (out,) if isinstance(out, Tensor) else out
    return torch.cuda.max_memory_allocated(device) - before - sum(result.nbytes for result in results)


def in_turns(
    calls: dict[str, Call | str], device: torch.device, repeat: int | None, step: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Rows by name: {"ms", "low_ms", "high_ms", "calls"}, the median and quartiles, on a card "extra_bytes"; or {"reason"}.

    A call that is a string is a reason already. step: called STEPS times for each call.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    reasons = {name: call for name, call in calls.items() if isinstance(call, str)}
    usable = {name: call for name, call in calls.items() if not isinstance(call, str)}
    counts: dict[str, int] = {}
    rows: dict[str, dict[str, Any]] = {name: {} for name in calls}

    def first(call: Call, row: dict[str, Any]) -> list[float]:
        call()
        if device.type == "cuda":
            row["extra_bytes"] = extra_bytes(call, device)
        return _measure.times_ms(call, device, 1, warm_up=0)

    for name in calls:
        if name in usable:
            once = _tried(partial(first, usable[name], rows[name]), name, device)
            if isinstance(once, str):
                reasons[name] = once
            else:
                counts[name] = _count(once[0], repeat)
        step(name)
    for turn in range(TURNS):
        for name in calls:
            count = 0 if name in reasons else (counts[name] + turn) // TURNS  # which add up to all
            if count:
                found = _tried(partial(_measure.times_ms, usable[name], device, count, warm_up=1), name, device)
                if isinstance(found, str):
                    reasons[name] = found
                else:
                    times[name] += found
            step(name)
    for name, row in rows.items():
        if name in reasons:
            rows[name] = {"reason": reasons[name]}
            continue
        own = times[name]
        low, middle, high = statistics.quantiles(own, n=4, method="inclusive") if len(own) > 1 else own * 3
        row |= {"ms": middle, "low_ms": low, "high_ms": high, "calls": len(own)}
    return rows
