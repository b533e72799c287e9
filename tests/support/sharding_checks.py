"""Runs the checks for DTensor operands on two ranks: processes on one host, by gloo on the CPU and by NCCL on GPUs."""

from __future__ import annotations

import json
import multiprocessing
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import sharding_attention  # noqa: F401  its checks
import sharding_linear
import torch
import torch.distributed as dist
from helpers import qkv, sdpa_forward, sdpa_with_lse
from sharding_compare import CHECKS, RANKS, check, scatter
from torch.distributed.device_mesh import init_device_mesh

SECONDS = 300  # all checks together; what takes longer hangs
OPS = torch.ops.attention_ext


@check
def refusals(device: str) -> None:
    """What is refused of plain tensors is refused of DTensors, by the name of the argument, in inference mode too."""
    mesh = init_device_mesh(device, (RANKS,))
    query, key, value = scatter(mesh, qkv(device=device), "1 1 1")
    short, narrow = key[..., :5, :], key[..., :5]  # here: views of what is no inference tensor
    input, weight, bias = scatter(mesh, [t.detach() for t in sharding_linear.linear(device, 6)], "0 R R")
    few = weight[:, :5]
    (scale,) = scatter(mesh, [torch.ones(1, device=device)], "R")
    calls = {
        "key": lambda: sdpa_with_lse(query, narrow, value),
        "value": lambda: sdpa_forward(query, key, short, None, None, 0.0, False),
        "attn_mask": lambda: OPS.qk_scores(query, key, query),
        "seed": lambda: sdpa_forward(query, key, value, None, None, 0.5, False),
        "row_sum": lambda: OPS.scores_values(query, key, value),
        "dtype": lambda: OPS.row_softmax(query, dtype="int8"),
        "weight": lambda: OPS.linear_float32(input, few, bias),
        "running_mean": lambda: OPS.linear_batchnorm_softmax(input, weight, bias, None, None, None, None, scale, False, 1e-5),
    }
    sdpa_forward(query, key, value, None, None, 0.0, False)  # not refused
    for mode in (nullcontext, torch.inference_mode):
        for argument, call in calls.items():
            with mode(), pytest.raises(RuntimeError, match=rf"attention_ext: {argument}: expected .*, got "):
                call()
    with pytest.raises(RuntimeError, match="attention_ext: scores: expected a tensor that does not require grad"):
        OPS.row_softmax(query.requires_grad_())


def run_rank(rank: int, device: str, folder: str) -> None:
    """Writes a line [name, traceback or ""] for each check to FOLDER/RANK."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", RANKS)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS))
    with Path(folder, str(rank)).open("w") as lines:
        for name, function in CHECKS.items():
            torch.manual_seed(20260101)  # the same tensors on all ranks
            try:
                function(device)
                outcome = ""
            except (Exception, pytest.fail.Exception):
                outcome = traceback.format_exc()
            print(json.dumps([name, outcome]), file=lines, flush=True)
    dist.destroy_process_group()


def outcomes(device: str, folder: Path) -> dict[str, list[str]]:
    """For each check what went wrong on rank 0 and on rank 1, "" where nothing did."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, device, str(folder)), daemon=True) for rank in range(RANKS)]
    deadline = time.monotonic() + SECONDS
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    found: dict[str, list[str]] = {name: [] for name in CHECKS}
    for rank, process in enumerate(ranks):
        lines = Path(folder, str(rank))
        ran = dict(map(json.loads, lines.read_text().splitlines())) if lines.exists() else {}
        missing = "not finished in time" if process in late else f"not reached, exit code {process.exitcode}"
        for name, of_ranks in found.items():
            of_ranks.append(ran.get(name, missing))
    return found
