#!/usr/bin/env python3
"""Other libraries' attention beside ours, in one process and by turns: rows of a record, forward and backward.

    python bench/peers.py --into RECORD.json [--only ffpa fa4] [--cases NAME...]

FFPA (ffpa-attn, its CuTe-DSL back end) above head dim 256 and FlashAttention-4 (flash-attn-4) up to there, on the cases of
bench/cases.py that the record has. Both compile at run time and have to be importable, which is the caller's affair. RECORD is what
scripts/gpu_check wrote on this kind of card with this csrc tree and torch; any other is refused.

A case has a process of its own, so what goes wrong in a peer costs its own row. The processes compile side by side; they are timed
one after the other when all have compiled or READY is over, with the card to themselves. A peer's operands lie in its own layout,
(B, L, H, E), so that it copies none. Ours is sdpa, up to head dim 256 this package's own kernels, timed between two passes of the
peer's.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import backward
import torch
from cases import CASES, MOST_BACK_END, Case
from common import DEVICE, Sample, attempt, first_line, log, own_kernels, time_ms
from torch import Tensor

import attention_ext

__all__ = ["PEERS", "Worker", "measure"]

READY, TIMED, BUDGET = 240.0, 60.0, 420.0  # seconds: until a process has compiled, for its times, after which none is timed
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Sides = dict[str, tuple[Call, list[Tensor]]]


def plain(case: Case) -> bool:
    """Half precision without a mask. Both peers align a causal mask with the last query and key, PyTorch with the first."""
    return case.dtype != torch.float32 and case.mask is None and not (case.causal and case.L != case.S)


def ffpa(case: Case) -> Call:
    os.environ["FFPA_FORCE_NO_SDPA_FALLBACK"] = "1"  # a case that its kernels do not take fails and is not PyTorch's
    from ffpa_attn import CuTeDSLBackend, ffpa_attn_func

    options = {"is_causal": case.causal, "enable_gqa": case.Hk != case.Hq, "backend": CuTeDSLBackend()}
    return lambda q, k, v: ffpa_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **options).transpose(1, 2)


def fa4(case: Case) -> Call:
    from flash_attn.cute import flash_attn_func

    return lambda q, k, v: flash_attn_func(q, k, v, causal=case.causal)[0]  # with the logarithms of the sums


@dataclass(frozen=True)
class Peer:
    """module: what has to be importable; call: the function for a case, of operands (B, L, H, E)."""

    distribution: str
    module: str
    takes: Callable[[Case], bool]
    call: Callable[[Case], Call]


PEERS = {
    "ffpa": Peer("ffpa-attn", "ffpa_attn", lambda case: plain(case) and 384 <= case.E == case.Ev <= 512, ffpa),
    # Its decoding splits keys only if asked how often.
    "fa4": Peer("flash-attn-4", "flash_attn", lambda case: plain(case) and max(case.E, case.Ev) <= 256 and case.L > 1, fa4),
}


def sides(peer: Peer, case: Case) -> Sides:
    """The function and its leaves, of each side: the same numbers, each in its own layout."""

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.E <= MOST_BACK_END:
            return own_kernels(case, q, k, v)()
        return torch.ops.attention_ext.sdpa(q, k, v, is_causal=case.causal, enable_gqa=case.Hk != case.Hq)

    own = case.inputs(str(DEVICE))
    theirs = [t.transpose(1, 2).contiguous().requires_grad_() for t in own]
    return {"theirs": (peer.call(case), theirs), "ours": (ours, [t.requires_grad_() for t in own])}


def forward_row(case: Case, both: Sides) -> Callable[[], dict[str, Any]]:
    """After a first call, which compiles, what takes the times."""
    calls = {who: partial(call, *(t.detach() for t in leaves)) for who, (call, leaves) in both.items()}
    begin = time.monotonic()
    with torch.no_grad():
        errors = Sample(case, *(t.detach() for t in both["ours"][1])).errors(calls["theirs"]().transpose(1, 2))
    seconds = time.monotonic() - begin

    @torch.no_grad()
    def timed() -> dict[str, Any]:
        theirs, own, again = (time_ms(calls[who], case.cold_l2) for who in ("theirs", "ours", "theirs"))
        times = {"ms": theirs, "ms_second_pass": again, "ours_ms_in_between": own, "first_call_s": seconds}
        return times | {"tflops": case.flop / theirs / 1e9} | errors

    return timed


def backward_row(case: Case, both: Sides) -> Callable[[], dict[str, Any]]:
    """The same of the backward, and how far its gradients are from ours, relative to their norm."""
    calls = {who: partial(call, *leaves) for who, (call, leaves) in both.items()}
    begin = time.monotonic()
    out = calls["theirs"]()
    grad = torch.randn_like(out)
    theirs = torch.autograd.grad(out, both["theirs"][1], grad)
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    ours = torch.autograd.grad(calls["ours"](), both["ours"][1], grad.transpose(1, 2))
    pairs = [(their.transpose(1, 2).float(), own.float()) for their, own in zip(theirs, ours, strict=True)]
    difference = max(float((their - own).norm() / own.norm()) for their, own in pairs)

    def timed() -> dict[str, Any]:
        theirs, own, again = (backward.both_ways(calls[who], both[who][1]) for who in ("theirs", "ours", "theirs"))
        times = theirs | {"backward_second_pass": again["backward"]} | {f"ours_{way}": ms for way, ms in own.items()}
        return times | {"first_call_s": seconds, "difference_to_ours": difference}

    return timed


WAYS = {"forward": forward_row, "backward": backward_row}


def worker(name: str, case: Case, ways: list[str], answers: IO[str]) -> int:
    """A line when all has compiled, and after a line of stdin the rows, by direction."""
    rows: dict[str, dict[str, Any]] = {}
    timed: dict[str, Callable[[], dict[str, Any]]] = {}
    peer, both = PEERS[name], None
    for way in ways:
        try:
            both = both or sides(peer, case)
            timed[way] = WAYS[way](case, both)
        except Exception as error:
            rows[way] = {"not_available": first_line(error)}
    torch.cuda.empty_cache()
    print(json.dumps({"version": importlib.metadata.version(peer.distribution)}), file=answers, flush=True)
    sys.stdin.readline()
    rows |= {way: attempt(row) for way, row in timed.items()}
    print(json.dumps(rows), file=answers, flush=True)
    return 0


class Worker:
    """A process for a peer and a case."""

    def __init__(self, peer: str, case: str, ways: list[str]) -> None:
        self.peer, self.case, self.ways = peer, case, ways
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  compilers print much; the last line says why it ended
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", peer, case, *ways]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, bufsize=1
        )

    def answer(self, seconds: float) -> dict[str, Any]:
        """Its next line; {} if it ends, or does not come in time and is ended."""
        assert self.process.stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        return json.loads(line) if line.endswith("\n") else {}

    def rows(self) -> dict[str, dict[str, Any]]:
        """By direction, the times of a process that is ready."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            return self.answer(TIMED) or self.lost("its times")
        except BrokenPipeError:
            return self.lost("its times")

    def lost(self, what: str) -> dict[str, dict[str, Any]]:
        self.process.kill()
        code = self.process.wait()
        self.errors.seek(0)
        said = (self.errors.read().strip().splitlines() or [""])[-1]
        return {way: {"not_available": f"{what}: the process ended with {code}. {said}"[:300]} for way in self.ways}


def entry(part: dict[str, Any], name: str) -> dict[str, Any]:
    """By own kernels where the record has that apart."""
    return part.get(f"{name} own") or part[name]


def measure(record: dict[str, Any], peers: list[str], names: list[str], keep: Callable[[], None]) -> dict[str, Any]:
    """Adds rows to the record, calls `keep` after each case, and returns the versions and the seconds that it took."""
    begin, parts = time.monotonic(), {way: record.get(way, {}) for way in WAYS}
    asked = [(peer, case) for peer in peers for case in CASES if case.name in names and PEERS[peer].takes(case)]
    found: dict[str, Any] = {}
    workers = [
        Worker(peer, case.name, [way for way, part in parts.items() if case.name in part])
        for peer, case in asked
        if case.name in parts["forward"]
    ]
    try:
        with ThreadPoolExecutor(max(1, len(workers))) as pool:
            ready = list(pool.map(lambda worker: worker.answer(READY), workers))
        for worker, compiled in zip(workers, ready, strict=True):
            if not compiled:
                rows = worker.lost("compiling")
            elif time.monotonic() - begin > BUDGET:
                rows = {way: {"not_available": f"not begun after {BUDGET:.0f} s"} for way in worker.ways}
            else:
                rows = worker.rows()
                found[PEERS[worker.peer].distribution.replace("-", "_")] = compiled["version"]
            for way, row in rows.items():
                place = entry(parts[way], worker.case)
                (place["rows"] if way == "forward" else place)[worker.peer] = row
                log(f"{worker.case:12} {worker.peer:6} {way:8} {row}")
            keep()
    finally:
        for worker in workers:
            worker.process.kill()
    return found | {"seconds": time.monotonic() - begin}


def refused(record: dict[str, Any]) -> list[str]:
    """In what the record is of another run than this."""
    here = {"card": torch.cuda.get_device_name(), "csrc_tree": attention_ext._libraries.BUILD.csrc, "torch": torch.__version__}
    return [f"{name} ({record.get(name)}, here {own})" for name, own in here.items() if record.get(name) != own]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="the record, which is changed")
    parser.add_argument("--only", nargs="*", default=list(PEERS), choices=PEERS, help="all by default")
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES], help="of bench/cases.py, all by default")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what compilers print to stdout goes with the rest
        peer, name, *ways = args.worker
        return worker(peer, next(case for case in CASES if case.name == name), ways, answers)
    if args.into is None or not args.into.exists():
        parser.error(f"--into: expected a record, got {args.into}")
    if absent := [peer for peer in args.only if importlib.util.find_spec(PEERS[peer].module) is None]:
        parser.error(f"cannot be imported: {', '.join(PEERS[peer].module for peer in absent)}; --only says which to measure")
    record = json.loads(args.into.read_text())
    if other := refused(record):
        sys.exit(f"--into: {args.into} is of another {', '.join(other)}")

    def keep() -> None:
        args.into.write_text(json.dumps(record, indent=1) + "\n")

    record["peers"] = record.get("peers", {}) | measure(record, args.only, args.cases, keep)
    keep()
    log(f"peers: {record['peers']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
