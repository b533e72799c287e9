"""Runs checks on two ranks: processes on one host, by gloo on the CPU and by NCCL on GPUs."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

RANKS = 2
SECONDS = 300  # all checks together; what takes longer hangs


def run_rank(rank: int, device: str, folder: str, module: str) -> None:
    """Writes a line [name, traceback or ""] for each of the module's CHECKS to FOLDER/RANK."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}  # as torchrun does
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", RANKS)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS))
    with Path(folder, str(rank)).open("w") as lines:
        for name, function in importlib.import_module(module).CHECKS.items():
            torch.manual_seed(20260101)  # the same tensors on all ranks
            try:
                function(device)
                outcome = ""
            except (Exception, pytest.fail.Exception):
                outcome = traceback.format_exc()
            print(json.dumps([name, outcome]), file=lines, flush=True)
    dist.destroy_process_group()


def outcomes(device: str, folder: Path, module: str) -> dict[str, list[str]]:
    """For each check of the module of this name what went wrong on rank 0 and on rank 1, "" where nothing did."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, device, str(folder), module), daemon=True) for rank in range(RANKS)]
    deadline = time.monotonic() + SECONDS
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    found: dict[str, list[str]] = {name: [] for name in importlib.import_module(module).CHECKS}
    for rank, process in enumerate(ranks):
        lines = Path(folder, str(rank))
        ran = dict(map(json.loads, lines.read_text().splitlines())) if lines.exists() else {}
        missing = "not finished in time" if process in late else f"not reached, exit code {process.exitcode}"
        for name, of_ranks in found.items():
            of_ranks.append(ran.get(name, missing))
    return found
