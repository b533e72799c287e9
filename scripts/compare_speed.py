#!/usr/bin/env python3
"""Times of two builds of this package in turns on one card: has a change that was to keep the speed kept it?

    python scripts/compare_speed.py OLD NEW [--turns 5] [--slower 1.02] [--cases NAME...]

OLD and NEW are folders with an installed wheel each. A process for each stays alive, and the two measure call by call in turns, so
that both see the same clocks and temperatures. Calls: bench's cases forward and backward and its lists of shapes, those of
gradients backward, all by own kernels (sdpa_forward); the linear layer's cases; and the host time of eager calls of sdpa in
microseconds. A line for each call whose median is more than --slower times the old one; exits with 1 if there is one. The JSON of
all goes to stdout.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent.parent / "bench"
QUICK_MS = 300.0  # of calls that a figure takes, about


def calls() -> Iterator[tuple[str, Callable[[], Callable[[], Any]], bool]]:
    """(name, what makes the call, whether the host's time counts) of everything that is timed."""
    import linear_cases
    import torch
    from cases import CASES, Case
    from common import own_kernels
    from shapes import SHAPES

    sdpa = torch.ops.attention_ext.sdpa

    def forward(case: Case) -> Callable[[], Any]:
        return own_kernels(case, *case.inputs("cuda"), mask=case.attn_mask("cuda"))

    def backward(case: Case) -> Callable[[], Any]:
        leaves = [t.requires_grad_() for t in case.inputs("cuda")]
        out = own_kernels(case, *leaves, mask=case.attn_mask("cuda"))()
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    def host(case: Case) -> Callable[[], Any]:
        q, k, v = case.inputs("cuda")
        return lambda: sdpa(q, k, v)

    def host_both(case: Case) -> Callable[[], Any]:
        leaves = [t.requires_grad_() for t in case.inputs("cuda")]
        grad = torch.ones_like(leaves[0])
        return lambda: torch.autograd.grad(sdpa(*leaves), leaves, grad)

    for case in CASES:
        yield f"forward {case.name}", lambda case=case: forward(case), False
    for case in CASES:
        if case.flop < 5e12 and not case.cold_l2:
            yield f"backward {case.name}", lambda case=case: backward(case), False
    for name, shapes in SHAPES.items():
        way = backward if name.startswith("gradients") else forward
        for case in shapes:
            yield f"{name}: {case.name}", lambda case=case, way=way: way(case), False
    for layer in linear_cases.LINEAR_CASES:
        for part in linear_cases.PARTS:
            yield (
                f"{layer.name} {part}",
                lambda layer=layer, part=part: (lambda t: lambda: linear_cases._ours(part, t))(layer.tensors("own")),
                False,
            )
    tiny = Case("tiny", 1, 1, 1, 64, 64, 64, torch.float16)
    yield "host, no gradient", lambda: host(tiny), True
    yield "host, forward and backward", lambda: host_both(tiny), True


def device_ms(call: Callable[[], Any]) -> float:
    import torch

    def timed(count: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / count

    call()
    return timed(max(3, min(200, int(QUICK_MS / 10 / max(timed(2), 1e-2)))))


def host_us(call: Callable[[], Any]) -> float:
    import torch

    for _ in range(50):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(200):
        call()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return (end - begin) / 200 * 1e6


def worker() -> int:
    """For each line of stdin, a name: makes that call if it is a new one, and prints its time."""
    sys.path.insert(0, str(BENCH))
    known = {name: (make, host) for name, make, host in calls()}
    print(json.dumps(list(known)), flush=True)
    name, call = "", None
    for line in sys.stdin:
        if line.strip() != name:
            name, call = line.strip(), None  # the old call's tensors are freed first
            call = known[name][0]()
        try:
            print(json.dumps((host_us if known[name][1] else device_ms)(call)), flush=True)
        except RuntimeError as error:
            print(json.dumps(str(error)[:200]), flush=True)
    return 0


def ask(process: "subprocess.Popen[str]", line: str) -> Any:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*", metavar="BUILD", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--slower", type=float, default=1.02)
    parser.add_argument("--cases", nargs="*", help="beginnings of names; all without")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker()
    if len(args.builds) != 2:
        parser.error("expected two folders, OLD and NEW")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            env=os.environ | {"PYTHONPATH": str(build.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for build in args.builds
    ]
    names, _ = (json.loads(process.stdout.readline()) for process in processes if process.stdout is not None)
    chosen = [name for name in names if not args.cases or name.startswith(tuple(args.cases))]
    found: dict[str, dict[str, Any]] = {}
    for name in chosen:
        times: list[list[float]] = [[], []]
        for _ in range(args.turns):
            for own, process in zip(times, processes, strict=True):
                own.append(ask(process, name))
        if any(isinstance(value, str) for own in times for value in own):
            found[name] = {"failed": times}
            continue
        old, new = map(statistics.median, times)
        found[name] = {"old": old, "new": new, "ratio": new / old, "all": times}
    slower = {name: row for name, row in found.items() if "failed" in row or row["ratio"] > args.slower}
    for name, row in slower.items():
        print(name, row.get("failed") or f"{row['old']:.4f} -> {row['new']:.4f}, {row['ratio']:.3f}", file=sys.stderr)
    faster = sum(row.get("ratio", 1.0) < 2 - args.slower for row in found.values())
    print(f"{len(found)} calls, {len(slower)} slower, {faster} faster by more than {args.slower - 1:.0%}", file=sys.stderr)
    json.dump(found, sys.stdout, indent=1)
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
