"""Device time over bench/shapes.py, ours beside PyTorch's default, as JSON: `python bench/record_shapes.py class512 class1024`.

Ours is sdpa; up to head dim 256, where it may run PyTorch's back ends, it is sdpa_forward: this package's own kernels.

A call is captured into a CUDA graph as often as fits a millisecond, 20 times at most, so that what the host does for it does not
count, and little of what the beginning of a graph takes; the graph is replayed: ms is the median over two turns of five replays
each. Errors are those of the captured call on 16 rows of each of four heads. The shapes run in a process of their own, and after
one that costs it its device the next process goes on behind it.
"""

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import MOST_BACK_END, Case
from choice import choice_summary, planned
from common import Sample, error_rule, first_line, log, within_rule
from shapes import SHAPES
from torch import Tensor

import attention_ext

DEVICE, OPS = "cuda", torch.ops.attention_ext


def own(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> Tensor:
    return OPS.sdpa_forward(q, k, v, attn_mask, None, 0.0, is_causal, enable_gqa=enable_gqa)[0]


OPERATORS = {"ours": OPS.sdpa, "own": own, "torch": F.scaled_dot_product_attention}
LEAST_MS, MOST_CALLS, REPLAYS, TURNS = 1.0, 20, 5, 2
MOST_PROCESSES = 6
NAMED = ("name", "ratio", "ms", "torch_ms", "kernel")  # of the slowest shape
SLOWER = 1 / 1.05  # ratio below which ours counts as slower


def operators(shape: Case) -> dict[str, Callable[..., Tensor]]:
    """Of ours and of PyTorch's."""
    return {"ours": OPERATORS["own" if shape.E <= MOST_BACK_END else "ours"], "torch": OPERATORS["torch"]}


class Captured:
    """A call, `count` times in one CUDA graph."""

    def __init__(self, call: Callable[[], Any]) -> None:
        call()
        self.capture(call, 1)
        self.capture(call, max(1, min(MOST_CALLS, math.ceil(LEAST_MS / max(statistics.median(self.times()), 1e-3)))))

    def capture(self, call: Callable[[], Any], count: int) -> None:
        """On the current stream, if that is not the default one, which cannot be captured."""
        self.count, self.graph = count, torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self.graph, stream=None if here == torch.cuda.default_stream() else here):
                for _ in range(count):
                    self.out = call()
        except Exception:
            with contextlib.suppress(Exception):  # a capture that failed leaves its stream behind
                torch.cuda.set_stream(here)
            raise
        self.graph.replay()
        torch.cuda.synchronize()

    def times(self) -> list[float]:
        """Milliseconds a call, one figure for each replay; the replays are queued without waiting in between."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / self.count for before, after in pairwise(events)]


def kernel_times(shape: Case, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, known: dict[str, float]) -> dict[str, float]:
    """ms of each kernel that takes the shape, asked for by name; `known` stays as it is."""
    times = {}
    for name in OPS.kernels("forward"):
        call = partial(OPS.sdpa_forward, q, k, v, mask, None, 0.0, shape.causal, enable_gqa=shape.Hk != shape.Hq, kernel_name=name)
        try:
            times[name] = known.get(name) or statistics.median(Captured(lambda call=call: call()[0]).times())
        except RuntimeError as error:
            if "attention_ext: kernel_name:" not in str(error):
                log(f"{shape.name} by {name}: {first_line(error)}")
    return times


def measure(shape: Case) -> dict[str, Any]:
    """ms, torch_ms, ratio, kernel, kernels (ms of each that takes the shape), errors; in place of a figure "ours_failed" or
    "torch_failed" says why there is none."""
    row: dict[str, Any] = {"name": shape.name}
    q, k, v = shape.inputs(DEVICE)
    options = shape.options(DEVICE)
    sample = Sample(shape, q, k, v, options["attn_mask"], rows=16)
    if shape.E <= MOST_BACK_END:
        row["kernel"] = OPS.sdpa_plan(q, k, v, options["attn_mask"], 0.0, shape.causal, enable_gqa=options["enable_gqa"])[0]
    else:
        row["kernel"] = attention_ext.explain(q, k, v, **options).kernel
    captured: dict[str, Captured] = {}
    times: dict[str, list[float]] = {}
    errors: dict[str, dict[str, float]] = {}
    for who, operator in operators(shape).items():
        try:
            captured[who] = Captured(lambda operator=operator: operator(q, k, v, **options))
            times[who] = captured[who].times()
            errors[who] = sample.errors(captured[who].out)
        except Exception as error:
            row[f"{who}_failed"] = first_line(error)
    if len(errors) == 2:  # the other turns, if both ran
        for _ in range(1, TURNS):
            for who, call in captured.items():
                times[who] += call.times()
    if "torch" in errors:
        row |= {"torch_ms": statistics.median(times["torch"]), "torch_errors": errors["torch"]}
        if not all(map(math.isfinite, errors["torch"].values())):
            row["torch_failed"] = "its result is not finite"
    if "ours" in errors:
        row |= {"ms": statistics.median(times["ours"]), "calls": captured["ours"].count, "errors": errors["ours"]}
        row["kernels"] = kernel_times(shape, q, k, v, options["attn_mask"], {row["kernel"]: row["ms"]})
        row["finite"] = all(map(math.isfinite, errors["ours"].values()))
        if "torch" in errors and "torch_failed" not in row:
            row["ratio"] = row["torch_ms"] / row["ms"]
            row["within_rule"] = within_rule(errors["ours"], errors["torch"], sample.top, shape.dtype)
        elif row["finite"]:  # nothing to compare with
            row["within_rule"] = errors["ours"]["relative_frobenius_error"] < error_rule.WRONG
    return row


def measure_gradients(shape: Case) -> dict[str, Any]:
    """The same of the backward alone: ms, torch_ms, ratio, finite; in place of a figure why there is none."""
    card = torch.cuda.get_device_properties(DEVICE)
    plan = planned(shape, 10 * card.major + card.minor, card.multi_processor_count, table="backward")
    row: dict[str, Any] = {"name": shape.name, "kernel": plan.kernel}
    leaves = [t.requires_grad_() for t in shape.inputs(DEVICE)]
    options = shape.options(DEVICE)
    grad = torch.randn(shape.B, shape.Hq, shape.L, shape.Ev, device=DEVICE, dtype=shape.dtype)
    for who, operator in operators(shape).items():
        try:
            out = operator(*leaves, **options)
            call = Captured(lambda out=out: torch.autograd.grad(out, leaves, grad, retain_graph=True))
            row["ms" if who == "ours" else "torch_ms"] = statistics.median(call.times())
            if who == "ours":
                row["finite"] = all(bool(t.isfinite().all()) for t in call.out)
        except Exception as error:
            row[f"{who}_failed"] = first_line(error)
    return row | ({"ratio": row["torch_ms"] / row["ms"]} if {"ms", "torch_ms"} <= row.keys() else {})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest ratio, how many are slower by more than 5 %, how good the choice of a kernel is, and what must not be: ours
    failing, NaN, the error rule broken."""
    compared = [row for row in rows if "ratio" in row]
    slowest = min(compared, key=lambda row: row["ratio"], default=None)
    return {
        "shapes": len(rows),
        "compared": len(compared),
        "slowest": {name: slowest[name] for name in NAMED if name in slowest} if slowest else None,
        "slower_by_more_than_5_percent": sum(row["ratio"] < SLOWER for row in compared),
        "geometric_mean_ratio": statistics.geometric_mean(row["ratio"] for row in compared) if compared else None,
        "choice": choice_summary(rows),
        "torch_failed": sum("torch_failed" in row for row in rows),
        "ours_failed": sum("ours_failed" in row for row in rows),
        "not_finite": sum(not row.get("finite", True) for row in rows),
        "errors_compared": sum("within_rule" in row for row in rows),
        "outside_rule": sum(not row.get("within_rule", True) for row in rows),
    }


def worker(name: str, start: int) -> int:
    """Prints a line of JSON for each shape from `start` on; ends early, with 3, when the device is lost."""
    of_gradients = name.startswith("gradients")
    # A backward runs on the stream of its forward, and only a stream other than the default one can be captured.
    own_stream = torch.cuda.stream(torch.cuda.Stream()) if of_gradients else contextlib.nullcontext()
    with torch.set_grad_enabled(of_gradients), own_stream:
        for shape in SHAPES[name][start:]:
            print(json.dumps((measure_gradients if of_gradients else measure)(shape)), flush=True)
            try:
                torch.cuda.synchronize()
            except Exception:
                return 3
    return 0


def run(name: str) -> list[dict[str, Any]]:
    """The rows of one list, through as many processes as that takes."""
    rows: list[dict[str, Any]] = []
    shapes = SHAPES[name]
    for _ in range(MOST_PROCESSES):
        before = len(rows)
        command = [sys.executable, str(Path(__file__).resolve()), name, "--worker", str(before)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0 or len(rows) == len(shapes):
            break
        if done.returncode != 3:  # it broke down within a shape
            rows.append({"name": shapes[len(rows)].name, "ours_failed": f"the process ended with {done.returncode}"})
    return rows + [{"name": shape.name, "ours_failed": "not run"} for shape in shapes[len(rows) :]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.lists) - set(SHAPES):
        parser.error(f"no list is called {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    if args.worker is not None:
        return worker(args.lists[0], args.worker)
    rows = {name: run(name) for name in args.lists}
    summaries = {name: summary(values) for name, values in rows.items()}
    for name, values in rows.items():
        for row in values:
            if "ours_failed" in row or not row.get("finite", True) or row.get("ratio", 1.0) < SLOWER:
                log(f"{name}: {json.dumps(row)}")
        log(f"{name}: {json.dumps(summaries[name])}")
    json.dump({"shapes": rows, "shapes_summary": summaries}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
