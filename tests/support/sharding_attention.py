"""Attention and its stages on DTensors: what each way to shard gives, and what is put together first."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import close, leaves, normal, qkv, sdpa, sdpa_backward, sdpa_forward, sdpa_with_lse
from ranks import RANKS
from sharding_compare import CHECKS, check, compare, same, scatter
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attention_ext

OPS = torch.ops.attention_ext


class Case(NamedTuple):
    """A way to shard attention: placements of query, key, value and mask, of (out, lse) and of the gradients; sizes as in qkv."""

    given: str
    made: str
    grads: str
    batch: tuple[int, ...] = (2,)
    heads: tuple[int, ...] = (4,)
    mask: tuple[int, ...] | None = None
    mesh: tuple[int, ...] = (RANKS,)
    dtype: torch.dtype = torch.float32
    bool_mask: bool = False
    is_causal: bool = False

    @property
    def enable_gqa(self) -> bool:
        return len(self.heads) > 1

    def inputs(self, device: str) -> tuple[DeviceMesh, list[Tensor | None]]:
        operands = list(qkv(self.batch, self.heads, L=6, S=7, E=8, Ev=5, dtype=self.dtype, device=device))
        mask = None if self.mask is None else normal(*self.mask, device=device)
        operands.append(mask > -1.0 if mask is not None and self.bool_mask else mask)
        return init_device_mesh(device, self.mesh), operands


CASES = {
    "replicated": Case("R R R", "R R", "R R R"),
    "batch": Case("0 0 0", "0 0", "0 0 0", is_causal=True),
    "second_batch_dim": Case("1 1 1", "1 1", "1 1 1", batch=(3, 2)),
    "heads": Case("1 1 1", "1 1", "1 1 1", is_causal=True),
    "three_heads": Case("1 1 1", "1 1", "1 1 1", heads=(3,)),
    "bfloat16": Case("1 1 1", "1 1", "1 1 1", dtype=torch.bfloat16),
    "grouped_heads": Case("1 1 1", "1 1", "1 1 1", heads=(8, 4, 2)),
    "one_key_head": Case("1 R R", "1 1", "1 P P", heads=(4, 1)),
    "rows": Case("2 R R", "2 2", "2 P P"),
    "rows_of_rank_2": Case("0 R R", "0 0", "0 P P", batch=(), heads=()),
    "mask_of_batch": Case("0 0 0 0", "0 0", "0 0 0 0", mask=(2, 4, 6, 7)),
    "mask_of_heads": Case("1 1 1 0", "1 1", "1 1 1 0", mask=(4, 1, 7)),
    "mask_of_rows": Case("2 R R 0", "2 2", "2 P P 0", mask=(6, 7)),
    "mask_for_all": Case("1 1 1 R", "1 1", "1 1 1 P", mask=(6, 7)),
    "mask_for_all_heads": Case("1 1 1 R", "1 1", "1 1 1 P", mask=(2, 1, 6, 7), heads=(4, 2)),
    "bool_mask": Case("0 0 0 R", "0 0", "0 0 0", mask=(6, 7), bool_mask=True),
    "mesh_1_2": Case("01 01 01 0R", "01 01", "01 01 01 0P", mask=(2, 1, 6, 7), mesh=(1, RANKS)),
    "mesh_2_1": Case("01 0R 0R R1", "01 01", "01 0P 0P P1", mask=(1, 4, 6, 7), heads=(4, 1), mesh=(RANKS, 1)),
}


def attention(case: Case, device: str) -> None:
    mesh, operands = case.inputs(device)
    gqa, causal = case.enable_gqa, case.is_causal
    compare(mesh, sdpa_forward, [*leaves(*operands), None, 0.0, causal], case.given, case.made, case.grads, enable_gqa=gqa)
    compare(mesh, sdpa_with_lse, [*leaves(*operands), 0.0, causal], case.given, case.made, case.grads, enable_gqa=gqa)
    compare(mesh, sdpa, [*leaves(*operands), 0.0, causal], case.given, case.made.split()[0], case.grads, enable_gqa=gqa)
    out, lse = sdpa_forward(*operands, None, 0.0, causal, enable_gqa=gqa)
    grad, grad_lse = normal(*out.shape, dtype=out.dtype, device=device), normal(*lse.shape, device=device)
    of_rows = case.made.split()[0]
    has_mask_grad = operands[3] is not None and not case.bool_mask
    for mask_grad in (False, True) if has_mask_grad else (False,):  # the same operands, other results
        fourth = "" if mask_grad else "R" * len(case.mesh)
        made = f"{case.grads if mask_grad else ' '.join(case.grads.split()[:3])} {fourth}"
        for of_lse in (None, grad_lse):
            given = " ".join([of_rows] * (1 if of_lse is None else 2) + [case.given, of_rows, of_rows])
            arguments = [grad, of_lse, *operands, out, lse, None, 0.0, causal]
            compare(mesh, sdpa_backward, arguments, given, made, enable_gqa=gqa, mask_grad=mask_grad)


def stages(case: Case, device: str) -> None:
    mesh, (query, key, value, mask) = case.inputs(device)
    gqa, causal, dtype = case.enable_gqa, case.is_causal, str(case.dtype).removeprefix("torch.")
    of_query, of_key, of_value, *of_mask = case.given.split()
    of_rows = case.made.split()[0]
    compare(mesh, OPS.qk_scores, [query, key, mask, causal], " ".join([of_query, of_key, *of_mask]), of_rows, enable_gqa=gqa)
    scores = OPS.qk_scores(query, key, mask, causal, enable_gqa=gqa)
    for name in ("float16", dtype):  # the same operands, other results
        compare(mesh, OPS.row_softmax, [scores], of_rows, f"{of_rows} {of_rows} {of_rows}", dtype=name)
    weights, row_sum, _ = OPS.row_softmax(scores, dtype=dtype)
    compare(mesh, OPS.scores_values, [weights, row_sum, value], f"{of_rows} {of_rows} {of_value}", of_rows, enable_gqa=gqa)


for _name, _case in CASES.items():
    CHECKS[f"attention_{_name}"] = partial(attention, _case)
    CHECKS[f"stages_{_name}"] = partial(stages, _case)


@check
def attention_that_cannot_be_sharded_so(device: str) -> None:
    """Shards that would be wrong by themselves are put together: the answer is right, and not in rows under is_causal."""
    mesh, operands = Case("", "", "").inputs(device)
    compare(mesh, sdpa_forward, [*leaves(*operands), None, 0.0, False], "2 R R", "2 2", "2 P P")
    compare(mesh, sdpa_forward, [*leaves(*operands), None, 0.0, True], "2 R R")  # the same operands
    compare(mesh, OPS.qk_scores, [*operands[:2], None, True], "2 R")
    compare(mesh, sdpa_forward, [*leaves(*operands), None, 0.0, False], "R 2 2")
    for heads in ((6, 3), (6, 6, 3)):
        operands = Case("", "", "", heads=heads).inputs(device)[1]
        compare(mesh, sdpa_forward, [*leaves(*operands), None, 0.0, False], "1 1 1", enable_gqa=True)


@check
def leading_dims_that_broadcast(device: str) -> None:
    mesh, (query, key, value, _) = Case("", "", "").inputs(device)
    key, value = key[:1], value[0]
    compare(mesh, sdpa_forward, [*leaves(query, key, value), None, None, 0.0, False], "0 R R", "0 0", "0 P P")
    compare(mesh, OPS.qk_scores, [query, key], "0 R", "0")
    weights, row_sum, _ = OPS.row_softmax(OPS.qk_scores(query, key))
    compare(mesh, OPS.scores_values, [weights, row_sum, value], "0 0 R", "0")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (4, 8)).transpose(1, 2) for project in (self.query, self.key, self.value))
        return self.out(sdpa(q, k, v, None, 0.0, True).transpose(1, 2).flatten(2))


@check
def tensor_parallel(device: str) -> None:
    """DTensors from projection to projection: one all-reduce a block, that of the last one."""
    plain = Block().to(device)
    plan = {name: ColwiseParallel(use_local_output=False) for name in ("query", "key", "value")} | {"out": RowwiseParallel()}
    sharded = parallelize_module(copy.deepcopy(plain), init_device_mesh(device, (RANKS,)), plan)
    x = normal(2, 6, 32, device=device)
    with CommDebugMode() as counted:
        got = sharded(x)
    assert counted.get_total_counts() == 1, counted.get_comm_counts()
    want = plain(x)
    close(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    for (name, p), of_all in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        same(f"gradient of {name}", p.grad, of_all.grad)


@check
def compiled(device: str) -> None:
    """One graph of forward and backward for all lengths."""
    mesh, operands = Case("", "", "").inputs(device)
    torch._dynamo.reset()
    call = torch.compile(lambda *tensors: sdpa(*tensors, None, 0.0, True), backend="aot_eager", fullgraph=True, dynamic=True)
    for _ in range(2):
        inputs = leaves(*operands[:3])
        sharded = scatter(mesh, inputs, "1 1 1")
        with torch._dynamo.config.patch(error_on_recompile=True):
            out = call(*sharded)
        want = sdpa(*inputs, None, 0.0, True)
        same("out", out, want, "1")
        grads = torch.autograd.grad(out.square().sum(), sharded)
        for name, got, right in zip("qkv", grads, torch.autograd.grad(want.square().sum(), inputs), strict=True):
            same(f"gradient of {name}", got, right, "1")
        operands = [t[..., 1:, :].contiguous() for t in operands[:3]]


@check
def dropout(device: str) -> None:
    """The numbers are those of the whole problem: what is sharded is put together, and every rank drops the same weights."""
    mesh, operands = Case("", "", "").inputs(device)
    seed = torch.tensor([11], device=device)
    for given in ("R R R R", "0 0 0 R", "1 1 1 R"):
        compare(mesh, sdpa_forward, [*leaves(*operands), seed, 0.5, False], given)
    query, key, value, _ = scatter(mesh, leaves(*operands), "1 1 1")
    with pytest.warns(UserWarning, match="numel=1"):  # DTensor's, of a seed that is none
        same_on_all_ranks(sdpa_forward(query, key, value, None, seed, 0.5, False)[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*numel=1")
        with torch.inference_mode():
            same_on_all_ranks(sdpa(query, key, value, None, 0.5))
            same_on_all_ranks(sdpa_with_lse(query, key, value, None, 0.5)[0])
        out = sdpa(query, key, value, None, 0.5)
    same_on_all_ranks(out)
    (grad,) = torch.autograd.grad(out, value, out.detach())
    close((grad * value).sum().full_tensor(), out.square().sum().full_tensor())  # out is linear in value, with the same weights


def same_on_all_ranks(out: DTensor) -> None:
    assert out.placements == (Replicate(),)
    first = out.to_local().clone()
    dist.broadcast(first, 0)
    assert torch.equal(out.to_local(), first), f"rank {dist.get_rank()} drew other numbers than rank 0"


@check
def explain(device: str) -> None:
    mesh, operands = Case("", "", "").inputs(device)
    kernel = attention_ext.explain(*scatter(mesh, operands, "1 1 1")).kernel
    assert kernel == "reference" if device == "cpu" else not kernel.startswith("torch"), kernel


@check
def merge_partials(device: str) -> None:
    mesh, (query, key, value, _) = Case("", "", "").inputs(device)
    query, key, value = scatter(mesh, [query, key, value], "1 1 1")
    parts = [sdpa_with_lse(query, key[..., part, :], value[..., part, :]) for part in (slice(3), slice(3, None))]
    out, lse = attention_ext.merge_partials(*map(list, zip(*parts, strict=True)))
    for what, got, want in zip(("out", "lse"), (out, lse), sdpa_with_lse(query, key, value), strict=True):
        same(what, got, want.full_tensor(), "1")
