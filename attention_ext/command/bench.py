"""attention-ext bench: times of a call by this package, by PyTorch's operator and each of its back ends, and by three calls."""

import argparse
import json
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import explain, sdpa
from .._libraries import BUILD
from .._torch_private import chosen_by_torch
from . import plot
from .cases import Case, three_calls
from .output import Progress, Table, remark, say, say_json
from .timing import STEPS, free_bytes, in_turns, reason_of, size_text

__all__ = ["measured", "run", "show"]

OURS, TORCH, THREE = "attention_ext", "PyTorch", "three calls"
BACK_ENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
THERE = {"cuda": tuple(BACK_ENDS), "cpu": ("flash", "math")}
_LONG = 2e11  # operations from which on a CPU is busy for seconds

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def _by(back_end: str, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(BACK_ENDS[back_end]):
        return F.scaled_dot_product_attention(q, k, v, **options)


def _forwards(case: Case, device: torch.device) -> dict[str, Forward]:
    """What is timed, by name."""
    own: dict[str, Forward] = {OURS: sdpa, TORCH: F.scaled_dot_product_attention}
    found: dict[str, Forward] = {name: partial(operator, **case.options) for name, operator in own.items()}
    found |= {f"{TORCH} {name}": partial(_by, name, case.options) for name in THERE[device.type]}
    return found | {THREE: three_calls(case)}


def _needs(name: str, case: Case, backward: bool) -> int:
    """Bytes that a row takes beside its operands, about: all scores, two or three times, where it is no fused kernel."""
    whole = name == THREE or name.endswith("math")
    return whole * case.scores * case.dtype.itemsize * (5 if backward else 3)


def _call(forward: Forward, operands: list[Tensor], grad: Tensor | None) -> Callable[[], Any]:
    def both() -> Any:
        return torch.autograd.grad(forward(*operands), operands, grad)

    def alone() -> Tensor:
        with torch.no_grad():
            return forward(*operands)

    return alone if grad is None else both


def _measure(case: Case, device: torch.device, backward: bool, repeat: int | None, step: Callable[[str], None]) -> dict[str, Any]:
    """The entry of a case in the record."""
    entry: dict[str, Any] = case.record | {"backward": backward}
    forwards = _forwards(case, device)
    names = list(forwards)
    try:
        if case.nbytes > free_bytes(device):
            raise MemoryError(f"tried to allocate {case.nbytes} bytes")
        q, k, v = operands = [t.requires_grad_(backward) for t in case.inputs(device)]
        grad = torch.randn(*case.shapes[0][:-1], case.Ev, device=device, dtype=case.dtype) if backward else None
        plan = explain(q, k, v, **case.options)
        chosen = chosen_by_torch(q, k, v, None, 0.0, case.causal, enable_gqa=case.Hq != case.Hk)
    except (RuntimeError, MemoryError) as error:
        for name in names * STEPS:
            step(name)
        return entry | {"rows": {name: {"reason": reason_of(error, [])} for name in names}}
    calls: dict[str, Callable[[], Any] | str] = {}
    for name, forward in forwards.items():
        needed, free = _needs(name, case, backward), free_bytes(device)
        enough = device.type == "cuda" or needed <= free  # a card says no by itself
        calls[name] = _call(forward, operands, grad) if enough else f"needs {size_text(needed)}, {size_text(free)} are free"
    rows = in_turns(calls, device, repeat, step)
    for row in rows.values():
        if "ms" in row:
            row["tflops"] = case.flop(backward) / row["ms"] / 1e9
            if "ms" in rows[TORCH]:
                row["ratio"] = rows[TORCH]["ms"] / row["ms"]
    for name, ran in ((OURS, plan.kernel), (TORCH, chosen)):
        if "ms" in rows[name]:
            rows[name]["ran"] = ran
    return entry | {"preferred": plan.preferred, "rows": rows}


def measured(cases: list[Case], device: torch.device, backward: bool, repeat: int | None) -> dict[str, Any]:
    """The record: what ran where, and an entry for each case."""
    on_card = device.type == "cuda"
    record: dict[str, Any] = {
        "attention_ext": BUILD.version,
        "csrc": BUILD.csrc,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_card else "cpu",
        "processor": ""
        if on_card
        else f"{platform.machine()}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}",
        "cases": [],
    }
    with Progress(len(cases) * STEPS * (2 + len(THERE[device.type]) + 1)) as progress:
        for case in cases:
            if not on_card and case.flop(backward) > _LONG:
                remark(f"{case.name}: {case.flop(backward) / 1e12:.1f} TFLOP a call, for which a CPU takes a while")
            step = partial(progress.step, case.name)
            record["cases"].append(_measure(case, device, backward, repeat, step))
    return record


def _number(value: float | None) -> str:
    """Three or four digits."""
    return "-" if value is None else f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"


def _table(entry: dict[str, Any], on_card: bool) -> Table:
    memory = ["MiB"] if on_card else []
    table = Table("", "ms", "quartiles, ms", "TFLOP/s", "ratio", *memory, "")
    for name, row in entry["rows"].items():
        if "ms" not in row:
            table.add(name, *["-"] * (4 + len(memory)), row["reason"])
            continue
        ratio = row.get("ratio")
        spread = f"{_number(row['low_ms'])} - {_number(row['high_ms'])}"
        extra = [f"{row['extra_bytes'] / 2**20:.0f}"] if on_card else []
        style = "" if name != OURS or not on_card or ratio is None else "good" if ratio >= 1.05 else "bad" if ratio <= 0.95 else ""
        cells = [_number(row["ms"]), spread, _number(row["tflops"]), "-" if ratio is None else f"{ratio:.2f}", *extra]
        table.add(name, *cells, row.get("ran", ""), style=style)
    return table


def show(record: dict[str, Any]) -> None:
    """The record for a person."""
    on_card = record["device"] != "cpu"
    where = record["device"] if on_card else f"the CPU ({record['processor']})"
    say(f"attention_ext {record['attention_ext']}, torch {record['torch']}, on {where}")
    for entry in record["cases"]:
        case = Case.of_record(entry)
        say()
        say(f"{case.name}: {case}{', forward and backward together' * entry['backward']}")
        _table(entry, on_card).print()
    say()
    say("ms: the median call. ratio: the time of PyTorch's operator over a row's own; above 1 the row is faster.")
    if on_card:
        say("MiB: what a call takes from torch's allocator beside its results.")
    else:
        say("On the CPU sdpa is PyTorch's own operator: the two differ by chance alone, and nothing gets faster.")


def _chosen(args: argparse.Namespace) -> dict[str, Any] | None:
    """The record of --from, or a new one; None after a remark where there is none."""
    if args.record is None:
        return measured(args.cases, args.device, args.backward, args.repeat)
    try:
        with open(args.record) as file:
            record: dict[str, Any] = json.load(file)
        for entry in record["cases"]:
            Case.of_record(entry)
    except (OSError, ValueError, KeyError, TypeError) as error:
        remark(f"attention-ext bench: --from: expected a file that bench --json has written, got {args.record} ({error!r})")
        return None
    return record


def run(args: argparse.Namespace) -> int:
    if args.plot and (problem := plot.problem(args.plot)):
        remark(f"attention-ext bench: --plot: {problem}")
        return 2
    record = _chosen(args)
    if record is None:
        return 2
    if args.json:
        say_json(record)
    else:
        show(record)
    if args.plot:
        plot.save(record, args.plot)
        remark(f"wrote {args.plot}")
    return 0
