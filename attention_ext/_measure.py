"""How a figure is taken: synchronised timing, and errors against float64."""

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["errors", "float64_attention", "row_errors", "sample_heads", "time_ms", "times_ms"]


def times_ms(
    call: Callable[[], object], device: torch.device, repeat: int, progress: Callable[[int], None] | None = None, warm_up: int = 2
) -> list[float]:
    """The times of `repeat` calls in milliseconds, after `warm_up` others.

    On CUDA between events on the current stream. The calls are queued without waiting in between, as a model's are, so
    that what the host does for a call overlaps with the device's work on the one before.
    """
    times: list[float] = []
    events = []
    for i in range(warm_up + repeat):
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        else:
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
        if progress is not None:
            progress(i + 1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        times = [start.elapsed_time(stop) for start, stop in events]
    return times[warm_up:]


def time_ms(call: Callable[[], object], device: torch.device, repeat: int, progress: Callable[[int], None] | None = None) -> float:
    """The median of times_ms."""
    return float(statistics.median(times_ms(call, device, repeat, progress)))


def sample_heads(batch: int, heads: int, count: int = 4) -> list[tuple[int, int]]:
    """Up to `count` (batch, head) pairs spread over a problem, the first and the last among them."""
    total = batch * heads
    count = min(count, total)
    picks = sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)})
    return [divmod(pick, heads) for pick in picks]


def float64_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """softmax(scale * Q K^T) V of one head, (L, E), (S, E), (S, Ev), in float64 on the CPU."""
    q, k, v = (t.detach().cpu().double() for t in (query, key, value))
    x = (q @ k.mT) * (scale if scale is not None else q.size(-1) ** -0.5)
    if is_causal:
        x = x.masked_fill(torch.ones(x.shape, dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(x, -1) @ v


def errors(out: Tensor, reference: Tensor) -> tuple[float, float]:
    """(largest absolute difference, relative Frobenius norm of the difference) against a float64 reference."""
    difference = out.detach().cpu().double() - reference
    return float(difference.abs().max()), float(difference.norm() / reference.norm())


def row_errors(out: Tensor, reference: Tensor) -> tuple[float, float]:
    """Relative Frobenius norm of the difference to a float64 reference (rows, columns), and that of the row where it is largest."""
    difference = out.detach().to(reference) - reference
    rows = difference.norm(dim=-1) / reference.norm(dim=-1)
    return float(difference.norm() / reference.norm()), float(rows.max())
