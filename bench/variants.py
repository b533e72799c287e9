#!/usr/bin/env python3
"""What an option costs next to the same call without it, by this package's own kernels: JSON on stdout, progress on stderr.

    python bench/variants.py [--limit SECONDS]

B 4, H 16, L = S = 2048, bfloat16, E from 64 to 1024. Forward: causal, a bool mask (1, 1, L, S) that shows each row 1200 keys, a
bias (1, H, L, S), each next to the plain call. Backward alone: the gradient of that bias next to none of it, and four key heads
next to sixteen, both causal. A row has the milliseconds of both and their ratio, or for the bias's gradient their difference, with
the limit on it. The calls go by sdpa_forward: sdpa may run a plain call by a back end of PyTorch's and a masked one by ours.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cases import Case
from common import DEVICE, attempt, in_turns, log, own_kernels
from torch import Tensor

__all__ = ["LIMITS", "OPTIONS", "measure"]

HEAD_DIMS = (64, 128, 256, 512, 768, 1024)
LENGTH, HEADS, BAND = 2048, 16, 1200
LIMIT = 20.0  # seconds
OPTIONS = ("causal", "bool mask", "bias", "bias gradient", "grouped backward")
LIMITS: dict[str, Callable[[int], float | None]] = {  # by head dim: of the ratio; of "bias gradient" milliseconds more
    "causal": lambda E: 0.65 if E > 512 else None,
    "bool mask": lambda E: 1.2 if E > 256 else 1.4,
    "bias": lambda E: 1.5 if E > 256 else 1.8,
    "bias gradient": lambda E: 1.5,
    "grouped backward": lambda E: 1.15,
}


def band() -> Tensor:
    """(1, 1, L, S): row i sees keys i - BAND / 2 to i + BAND / 2 - 1, as far as they are there."""
    keys = torch.arange(LENGTH, device=DEVICE)
    ahead = keys - keys[:, None] + BAND // 2
    return ((ahead >= 0) & (ahead < BAND))[None, None]


def bias() -> Tensor:
    generator = torch.Generator(str(DEVICE)).manual_seed(1)
    return torch.randn(1, HEADS, LENGTH, LENGTH, device=DEVICE, dtype=torch.bfloat16, generator=generator)


def call_of(E: int, key_heads: int = HEADS, causal: bool = False) -> Case:
    return Case("", 4, HEADS, key_heads, LENGTH, LENGTH, E, torch.bfloat16, causal)


def forward(case: Case, mask: Tensor | None = None) -> Callable[[], Any]:
    return torch.no_grad()(own_kernels(case, *case.inputs(str(DEVICE)), mask=mask))


def backward(case: Case, mask: Tensor | None = None) -> Callable[[], Any]:
    """Of query, key, value, and of a mask that requires grad."""
    leaves = [t.requires_grad_() for t in case.inputs(str(DEVICE))]
    out = own_kernels(case, *leaves, mask=mask)()
    wanted = leaves if mask is None or not mask.requires_grad else [*leaves, mask]
    return partial(torch.autograd.grad, out, wanted, torch.randn_like(out), retain_graph=True)


def pair(option: str, E: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The call with the option and the one without."""
    if option == "bias gradient":
        return backward(call_of(E), bias().requires_grad_()), backward(call_of(E), bias())
    if option == "grouped backward":
        return backward(call_of(E, key_heads=4, causal=True)), backward(call_of(E, causal=True))
    mask = {"bool mask": band, "bias": bias}.get(option, lambda: None)()
    return forward(call_of(E, causal=option == "causal"), mask), forward(call_of(E))


def measure(option: str, E: int) -> dict[str, Any]:
    """ms with the option and without, what it costs, and the limit on that where there is one."""
    calls = dict(zip(("ms", "ms_without"), pair(option, E), strict=True))
    for call in calls.values():
        call()
    times = in_turns(calls)
    kind, cost = "ratio", times["ms"] / times["ms_without"]
    if option == "bias gradient":
        kind, cost = "ms_more", times["ms"] - times["ms_without"]
    limit = LIMITS[option](E)
    return times | {kind: cost, "limit": limit, "within": limit is None or cost <= limit}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which the rest is left out")
    args = parser.parse_args()
    begin, rows = time.monotonic(), []
    chosen = [(option, E) for option in OPTIONS for E in HEAD_DIMS]
    for option, E in chosen:
        if time.monotonic() - begin > args.limit:
            break
        rows.append({"option": option, "E": E} | attempt(lambda option=option, E=E: measure(option, E)))
        log(f"{option:18} {rows[-1]}")
    found = {"rows": rows, "left_out": len(chosen) - len(rows), "seconds": time.monotonic() - begin}
    json.dump({"variants": found}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
