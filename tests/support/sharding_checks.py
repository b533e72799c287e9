"""The checks for DTensor operands, for tests/support/ranks.py to run."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import sharding_attention  # noqa: F401  its checks
import sharding_linear
import torch
from helpers import qkv, sdpa_forward, sdpa_with_lse
from ranks import RANKS
from sharding_compare import CHECKS as CHECKS
from sharding_compare import check, scatter
from torch.distributed.device_mesh import init_device_mesh

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
