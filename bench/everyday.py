#!/usr/bin/env python3
"""Everyday calls, forward and backward, ours beside PyTorch's default: JSON on stdout, progress on stderr.

    python bench/everyday.py [--only TEXT] [--limit SECONDS]

The grid: B 4, H 16, L = S = 2048 in bfloat16 over head dims from 32 to 1024: plain, causal, under a band (bool), with a bias for
each head, a bias that requires grad, four key heads, 77 keys. float32: plain, causal, with a bias that requires grad. Some of it in
float16; values of another width; fewer queries than keys; one query (decoding); a batch of one. A row has the milliseconds of the
forward alone, of the backward alone (autograd.grad) and of both, and ratios: PyTorch's time over ours, above 1 ours is faster. It
names what ran, and what of the contract PyTorch's default breaks in such a call; bench/broken.py measures how far.

Calls are queued without waiting and taken in turns; where the device needs less than about 50 us the host's time is what counts.
Calls that are not begun within the limit are left out and counted.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import broken
import torch
import torch.nn.functional as F
from cases import BOOL_MASKS, Case
from choice import planned
from common import DEVICE, attempt, first_line, in_turns, log

import attention_ext
from attention_ext._torch_private import chosen_by_torch

__all__ = ["EVERYDAY", "WAYS", "Everyday", "measure", "summary"]

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256, 320, 512, 768, 1024)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WAYS = ("forward", "backward", "both")
SLOWER = 0.95  # ratio below which ours counts as slower
LIMIT = 110.0  # seconds


@dataclass(frozen=True)
class Everyday:
    """A call and which directions of it are timed; biasgrad: the mask requires grad."""

    case: Case
    backward: bool = True
    biasgrad: bool = False

    @property
    def name(self) -> str:
        """dtype, kind, head dim."""
        return self.case.name


def _grid() -> Iterator[Everyday]:
    def case(kind: str, E: int, dtype: torch.dtype = BF16, **other: Any) -> Case:
        label = str(dtype).removeprefix("torch.")
        return Case(f"{label} {kind} {E}", **({"B": 4, "Hq": 16, "Hk": 16, "L": 2048, "S": 2048, "E": E, "dtype": dtype} | other))

    for E in HEAD_DIMS:
        yield Everyday(case("plain", E))
        yield Everyday(case("causal", E, causal=True))
        yield Everyday(case("band", E, mask="band"))
        yield Everyday(case("bias", E, mask="headbias"), backward=False)
        yield Everyday(case("biasgrad", E, mask="headbias"), biasgrad=True)
        yield Everyday(case("grouped causal", E, Hk=4, causal=True))
        yield Everyday(case("cross", E, S=77))
        yield Everyday(case("plain", E, FP32))
        yield Everyday(case("causal", E, FP32, causal=True), backward=False)
        yield Everyday(case("biasgrad", E, FP32, mask="headbias"), biasgrad=True)
    for E in (64, 128, 256, 512):
        yield Everyday(case("plain", E, FP16))
        yield Everyday(case("causal", E, FP16, causal=True))
        yield Everyday(case("pad", E, FP16, mask="pad"))
        yield Everyday(case("odd length", E, L=1999, S=1999))
        yield Everyday(case("few queries", E, L=256, S=4096))
        yield Everyday(case("few queries causal", E, L=256, S=4096, causal=True))
        yield Everyday(case("batch of one", E, B=1, L=1024, S=1024))
        yield Everyday(case("one query", E, B=16, Hq=32, Hk=8, L=1, S=4096), backward=False)
        yield Everyday(case("one query, batch of one", E, B=1, Hq=32, Hk=8, L=1, S=4096), backward=False)
        yield Everyday(case("short", E, B=32, L=128, S=128))
    for E, Ev in ((192, 128), (128, 64), (64, 128), (576, 512)):
        yield Everyday(case(f"values of {Ev}", E, Ev=Ev))
        yield Everyday(case(f"causal, values of {Ev}", E, Ev=Ev, causal=True))


EVERYDAY = list(_grid())
OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "ours": torch.ops.attention_ext.sdpa,
    "torch": F.scaled_dot_product_attention,
}


def directions(call: Everyday, operator: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """What is timed of a call, by direction."""
    leaves = list(call.case.inputs(str(DEVICE)))
    options = call.case.options(str(DEVICE))

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return operator(*leaves, **options)

    out: dict[str, Callable[[], Any]] = {"forward": forward}
    if call.backward:
        wanted = [*leaves, *([options["attn_mask"]] if call.biasgrad else [])]
        for tensor in wanted:
            tensor.requires_grad_()
        result = operator(*leaves, **options)
        grad = torch.randn_like(result)
        out["backward"] = lambda: torch.autograd.grad(result, wanted, grad, retain_graph=True)
        out["both"] = lambda: torch.autograd.grad(operator(*leaves, **options), wanted, grad)
    return out


def backward_kernel(call: Everyday) -> str:
    """That of this package for contiguous operands."""
    card = torch.cuda.get_device_properties(DEVICE)
    capability, sms = 10 * card.major + card.minor, card.multi_processor_count
    return planned(call.case, capability, sms, table="backward", mask_grad=call.biasgrad).kernel


def runs(call: Everyday) -> dict[str, dict[str, str]]:
    """What runs a call, by direction: "kernels" of ours, "torch" the back ends that PyTorch's default takes."""
    q, k, v = call.case.inputs(str(DEVICE))
    options = call.case.options(str(DEVICE))
    arguments = (q, k, v, options["attn_mask"], 0.0, call.case.causal)
    found: dict[str, dict[str, str]] = {"kernels": {}, "torch": {}}
    for way in ("forward", "both") if call.backward else ("forward",):
        for tensor in (q, k, v):
            tensor.requires_grad_(way == "both")
        if call.biasgrad:
            options["attn_mask"].requires_grad_(way == "both")
        found["kernels"][way] = attention_ext.explain(q, k, v, **options).kernel
        found["torch"][way] = chosen_by_torch(*arguments, enable_gqa=options["enable_gqa"])
    if call.backward:
        found["torch"]["backward"], ours = found["torch"]["both"], found["kernels"]["both"]
        found["kernels"]["backward"] = ours if ours.startswith("torch") else backward_kernel(call)
    return found


def breach(call: Everyday, way: str, back_end: str) -> str:
    """What of the contract this back end of PyTorch's breaks in such a call, as bench/broken.py names it; empty where nothing."""
    if back_end != "cudnn":
        return ""
    if call.case.mask in BOOL_MASKS:
        return "masked_rows"
    plain = call.case.mask is None and not call.case.causal
    return "gradients" if plain and way != "forward" and call.case.S % 128 else ""


def measure(call: Everyday) -> dict[str, Any]:
    """{direction: {"ours": ms, "torch": ms, "ratio"}} and what ran; "ours_failed", "torch_failed" say why there is no figure."""
    row: dict[str, Any] = {}
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for who, operator in OPERATORS.items():
        try:
            calls[who] = directions(call, operator)
            for direction in calls[who].values():
                direction()
            torch.cuda.synchronize()
        except RuntimeError as error:
            row[f"{who}_failed"] = first_line(error)
            calls.pop(who, None)
            torch.cuda.empty_cache()
    for direction in calls.get("ours", {}):
        found: dict[str, Any] = in_turns({who: own[direction] for who, own in calls.items()})
        row[direction] = found | ({"ratio": found["torch"] / found["ours"]} if len(found) == 2 else {})
    ran = runs(call)
    breaks = {way: name for way, back_end in ran["torch"].items() if (name := breach(call, way, back_end))}
    return row | {"kernels": ran["kernels"], "torch_back_ends": ran["torch"], "torch_breaks": breaks}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By direction: how many were compared, how many are below SLOWER, the least ratio, the geometric mean."""
    out: dict[str, Any] = {}
    for direction in WAYS:
        compared = [(row[direction]["ratio"], row["name"]) for row in rows if "ratio" in row.get(direction, {})]
        if compared:
            out[direction] = {
                "compared": len(compared),
                "slower": sum(ratio < SLOWER for ratio, _ in compared),
                "least": min(compared),
                "geometric_mean_ratio": statistics.geometric_mean(ratio for ratio, _ in compared),
            }
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which the rest is left out")
    args = parser.parse_args()
    begin, rows = time.monotonic(), []
    chosen = [call for call in EVERYDAY if args.only in call.name]
    lengths = sorted({192, *(call.case.S for call in chosen if call.case.S % 128)})
    found = {"torch_broken": attempt(lambda: broken.measured(lengths))}
    for call in chosen:
        if time.monotonic() - begin > args.limit:
            break
        dtype, _, kind = call.name.rpartition(" ")[0].partition(" ")
        row = {"name": call.name, "dtype": dtype, "kind": kind, "E": call.case.E, "S": call.case.S}
        measured = attempt(lambda call=call: measure(call))
        rows.append(row | ({"ours_failed": measured["not_available"]} if "not_available" in measured else measured))
        ratios = {way: round(rows[-1][way]["ratio"], 3) for way in WAYS if "ratio" in rows[-1].get(way, {})}
        log(f"{call.name:36} {rows[-1].get('kernels', {}).get('forward', 'failed'):14} {ratios}")
    found |= {"rows": rows, "summary": summary(rows), "slower_below": SLOWER, "left_out": len(chosen) - len(rows)}
    found["seconds"] = time.monotonic() - begin
    json.dump({"everyday": found}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
