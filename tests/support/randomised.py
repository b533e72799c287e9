"""Checks random problems: `python tests/support/randomised.py --device cuda --examples 2000`, or `--case "Case(seed=7, ...)"`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import kernels
import torch
from kernels import Kernel
from random_cases import Case, Layout, draw_case
from random_check import check
from random_inputs import NAN

SHARE = 50  # examples that make a process worth its start


def _poison(device: str) -> None:
    """Memory that the next results are made in holds NaN."""
    if device == "cuda":
        held = [torch.full((1 << bits,), NAN, device="cuda") for bits in (*range(7, 22), 24) for _ in range(3)]
        del held


def kernels_of(device: str) -> list[Kernel]:
    return [k for k in kernels.KERNELS if k.device == device and k.runs_here()]


def _examples(device: str, seeds: range, forced: list[Kernel]) -> Iterator[dict | None]:
    """A failure, or None, for each seed in turn. An error of the card is the last one, since no later call survives it."""
    for done, seed in enumerate(seeds):
        if done % 64 == 0:
            _poison(device)
        case = draw_case(random.Random(seed), forced)
        failure = None
        try:
            check(case, device)
        except Exception as error:  # whatever it is, it belongs to this case
            failure = {"seed": seed, "case": repr(case), "error": f"{type(error).__name__}: {error}"[:500]}
        yield failure
        if failure is not None and "CUDA error" in failure["error"]:
            return


def _examples_of_workers(device: str, seeds: range, workers: int, forced: list[Kernel]) -> Iterator[dict | None]:
    """The same from so many processes of this script, each with a share of the seeds, in the order in which they come."""
    found: queue.SimpleQueue[tuple[dict | None] | None] = queue.SimpleQueue()  # None: a worker has ended
    bounds = [len(seeds) * i // workers for i in range(workers + 1)]

    def follow(share: range) -> None:
        try:
            command = [sys.executable, os.path.abspath(__file__), "--worker", "--device", device]
            command += ["--first-seed", str(share.start), "--examples", str(len(share))]
            done, failure = 0, None
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                for line in process.stdout:
                    done, failure = done + 1, json.loads(line)
                    found.put((failure,))
            if done < len(share) and (failure is None or "CUDA error" not in failure["error"]):
                seed, error = share[done], f"its process ended with {process.returncode}"
                found.put(({"seed": seed, "case": repr(draw_case(random.Random(seed), forced)), "error": error},))
        finally:
            found.put(None)

    for begin, end in itertools.pairwise(bounds):
        threading.Thread(target=follow, args=(seeds[begin:end],), daemon=True).start()
    while workers:
        item = found.get()
        if item is None:
            workers -= 1
        else:
            yield item[0]


def run_examples(device: str, count: int, first_seed: int = 0, workers: int = 1, progress: bool = False) -> dict:
    """Checks the cases of the seeds first_seed to first_seed + count - 1: count that ran, failures, seconds.

    A failure is {"seed", "case", "error"}. An error of the card ends its process, and what that had left does not run.
    progress: a line on stderr for every 100 examples. One thread: these sizes are too small for more, and other processes may be
    about.
    """
    failures, began, done, threads = [], time.perf_counter(), 0, torch.get_num_threads()
    forced, seeds = kernels_of(device), range(first_seed, first_seed + count)
    try:
        torch.set_num_threads(1)
        for failure in _examples(device, seeds, forced) if workers == 1 else _examples_of_workers(device, seeds, workers, forced):
            done += 1
            if failure is not None:
                failures.append(failure)
            if progress and (done % 100 == 0 or done == count):
                seconds = time.perf_counter() - began
                print(f"{done} of {count} examples, {len(failures)} failed, {seconds:.1f} s", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
    failures.sort(key=lambda failure: failure["seed"])
    names = [kernel.name for kernel in forced]
    seconds = round(time.perf_counter() - began, 1)
    return {
        "device": device, "count": done, "first_seed": first_seed, "kernels": names, "workers": workers, "failures": failures,
        "seconds": seconds,
    }  # fmt: skip


def _work(device: str, seeds: range) -> int:
    """A worker: a line of JSON for each example, null or a failure."""
    torch.set_num_threads(1)
    for failure in _examples(device, seeds, kernels_of(device)):
        print(json.dumps(failure), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--workers", type=int, help=f"processes; 1 on the CPU and up to 8 on a GPU by default, one for every {SHARE} examples"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--case", help="check this one, given as its repr")
    args = parser.parse_args()
    if args.case:
        check(eval(args.case, {"Case": Case, "Layout": Layout}), args.device)
        print("passed")
        return 0
    if args.worker:
        return _work(args.device, range(args.first_seed, args.first_seed + args.examples))
    most = 8 if args.device == "cuda" else 1
    workers = max(1, min(args.workers or min(most, args.examples // SHARE), args.examples))
    outcome = run_examples(args.device, args.examples, args.first_seed, workers, progress=True)
    if args.json:
        print(json.dumps(outcome, indent=1))
    else:
        for failure in outcome["failures"]:
            print(f"seed {failure['seed']}: {failure['error']}\n  {failure['case']}")
        passed = outcome["count"] - len(outcome["failures"])
        print(f"{passed} of {outcome['count']} examples passed on {args.device} in {outcome['seconds']} s")
    return 1 if outcome["failures"] or outcome["count"] < args.examples else 0


if __name__ == "__main__":
    raise SystemExit(main())
