"""FlopCounterMode counts for our operators what it counts for PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import normal, qkv
from paths import ROOT
from processes import python_after_torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import attention_ext
from attention_ext import linear_batchnorm_softmax, linear_float32, sdpa, sdpa_with_lse

OURS = torch.ops.attention_ext


def counts(function: Callable[..., Any], *inputs: Tensor | None, backward: bool = True) -> dict[str, dict[Any, int]]:
    """By module and operator, for a forward pass and, with inputs that require grad, a backward pass."""
    leaves = [None if t is None else t.detach().requires_grad_(backward) for t in inputs]
    with FlopCounterMode(display=False) as mode:
        out = function(*leaves)
        if backward:
            out = out if isinstance(out, Tensor) else out[0]
            torch.autograd.backward(out, torch.ones_like(out))
    return mode.get_flop_counts()


def total(function: Callable[..., Any], *inputs: Tensor | None, backward: bool = True) -> int:
    return sum(counts(function, *inputs, backward=backward).get("Global", {}).values())


PROBLEMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "wide values": ({"Ev": 24}, {}),
    "grouped": ({"heads": (6, 2)}, {"enable_gqa": True}),
    "one row": ({"L": 1}, {}),
    "no key": ({"S": 0}, {}),
}
problems = pytest.mark.parametrize("problem", PROBLEMS)


def by_pytorch(q: Tensor, k: Tensor, v: Tensor) -> dict[Any, int]:
    """PyTorch's formulas, in which a fused operator has as many key heads as query heads (2.11 takes no others)."""
    k, v = (t.repeat_interleave(q.size(-3) // t.size(-3), -3) for t in (k, v))
    grad = (*q.shape[:-1], v.size(-1))
    return {
        OURS.sdpa_forward: sdpa_flop_count(q.shape, k.shape, v.shape),
        OURS.sdpa_backward: sdpa_backward_flop_count(grad, q.shape, k.shape, v.shape),
    }


@problems
def test_sdpa_with_lse(device: str, problem: str) -> None:
    shape, options = PROBLEMS[problem]
    inputs = qkv(**{"L": 5, "S": 7, **shape}, device=device)
    want = by_pytorch(*inputs)
    call = lambda *t: sdpa_with_lse(*t, **options)  # noqa: E731
    assert counts(call, *inputs) == {"Global": want}
    assert total(call, *inputs, backward=False) == want[OURS.sdpa_forward]
    with torch.inference_mode():
        assert total(call, *inputs, backward=False) == want[OURS.sdpa_forward]


@problems
@pytest.mark.gpu
def test_sdpa_on_cuda(problem: str) -> None:
    shape, options = PROBLEMS[problem]
    inputs = qkv(**{"L": 5, "S": 7, **shape}, dtype=torch.float16, device="cuda")
    assert counts(lambda *t: sdpa(*t, **options), *inputs) == {"Global": by_pytorch(*inputs)}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_as_flash_attention(causal: bool) -> None:
    inputs = qkv(L=64, S=64, E=64, dtype=torch.float16, device="cuda")
    for backward in (True, False):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            want = total(lambda *t: F.scaled_dot_product_attention(*t, is_causal=causal), *inputs, backward=backward)
        assert want > 0
        for op in (sdpa, sdpa_with_lse):
            assert total(lambda *t, op=op: op(*t, is_causal=causal), *inputs, backward=backward) == want


def test_leading_dims_that_broadcast(device: str) -> None:
    q, k, v = normal(2, 4, 5, 8, device=device), normal(4, 7, 8, device=device), normal(2, 1, 7, 3, device=device)
    want = by_pytorch(q, k.expand(2, 4, 7, 8), v.expand(2, 4, 7, 3))
    assert counts(sdpa_with_lse, q, k, v) == {"Global": want}
    assert total(sdpa_with_lse, q[0, 0], k[0], v[0, 0], backward=False) == want[OURS.sdpa_forward] / 8
    assert counts(torch.vmap(sdpa_with_lse), *qkv(L=5, S=7, device=device)) == counts(sdpa_with_lse, *qkv(L=5, S=7, device=device))


@pytest.mark.parametrize("make", [nullcontext, lambda: torch.device("meta"), FakeTensorMode], ids=["cpu", "meta", "fake"])
def test_where_sdpa_is_pytorchs_own(make: Callable[[], Any]) -> None:
    """It counts what that counts, which for the fused operator of the CPU is nothing; our other operators count as everywhere."""
    with make():
        inputs = [torch.ones(2, 3, n, 8) for n in (5, 7, 7)]
        assert counts(sdpa, *inputs) == counts(F.scaled_dot_product_attention, *inputs)
        assert counts(sdpa_with_lse, *inputs) == {"Global": by_pytorch(*inputs)}
        x, w = torch.ones(6, 8), torch.ones(4, 8)
        assert total(linear_float32, x, w) == total(F.linear, x, w) == 3 * 2 * 6 * 8 * 4


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(6,), (2, 3), (), (0,)], ids=str)
def test_linear_float32(device: str, rows: tuple[int, ...], bias: bool) -> None:
    inputs = normal(*rows, 8, device=device), normal(4, 8, device=device), normal(4, device=device) if bias else None
    once = 2 * torch.Size(rows).numel() * 8 * 4
    assert total(linear_float32, *inputs, backward=False) == total(F.linear, *inputs, backward=False) == once
    assert counts(linear_float32, *inputs) == {"Global": {OURS.linear_float32: 3 * once}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_linear_batchnorm_softmax(device: str, training: bool, dtype: torch.dtype) -> None:
    inputs = [normal(*shape, dtype=dtype, device=device) for shape in ((6, 8), (4, 8), (4,))]
    statistics = {"running_mean": torch.zeros(4, device=device), "running_var": torch.ones(4, device=device), "training": training}
    statistics = {name: t.to(dtype) if isinstance(t, Tensor) else t for name, t in statistics.items()}
    call = lambda *t: linear_batchnorm_softmax(*t, scale=2.0, **statistics)  # noqa: E731
    product = 2 * 6 * 8 * 4
    assert counts(call, *inputs, backward=False) == {"Global": {OURS.linear_batchnorm_softmax: product}}
    assert total(call, *inputs) == 3 * product


def test_stages(device: str) -> None:
    q, k, v = qkv(heads=(6, 2), L=5, S=7, Ev=24, device=device)

    def stages(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights, row_sum, _ = OURS.row_softmax(OURS.qk_scores(q, k, is_causal=True, enable_gqa=True))
        return OURS.scores_values(weights, row_sum, v, enable_gqa=True)

    of_each = {OURS.qk_scores: 2 * 2 * 6 * 5 * 7 * 16, OURS.row_softmax: 0, OURS.scores_values: 2 * 2 * 6 * 5 * 7 * 24}
    assert counts(stages, q, k, v, backward=False) == {"Global": of_each}
    forward = {OURS.sdpa_forward: sum(of_each.values())}
    assert counts(lambda *t: sdpa_with_lse(*t, enable_gqa=True), q, k, v, backward=False) == {"Global": forward}


def test_by_module(device: str) -> None:
    fused = attention_ext.nn.LinearBatchNormSoftmax(nn.Linear(8, 4), nn.BatchNorm1d(4), 2.0)
    model = nn.Sequential(nn.Linear(8, 8), fused).to(device)
    found = counts(lambda x: model(x).sum(), normal(6, 8, device=device))
    assert set(found) == {"Global", "Sequential", "Sequential.0", "Sequential.1"}
    assert found["Sequential.1"] == {OURS.linear_batchnorm_softmax: 2 * 6 * 8 * 4, OURS.linear_float32: 2 * 2 * 6 * 8 * 4}


FIRST = {
    "the package": "import attention_ext; assert 'torch.utils.flop_counter' not in sys.modules",
    "the counter": "import torch.utils.flop_counter, attention_ext",
}


@pytest.mark.parametrize("first", FIRST)
def test_whichever_is_imported_first(first: str) -> None:
    code = f"""
import importlib, sys, torch
{FIRST[first]}
from torch.utils import flop_counter
with flop_counter.FlopCounterMode(display=False) as mode:
    attention_ext.linear_float32(torch.ones(6, 8), torch.ones(4, 8))
assert type(flop_counter.__loader__) is type(flop_counter.__spec__.loader) is type(torch.utils.__loader__)
print(mode.get_total_flops())
"""
    assert python_after_torch(code, cwd=ROOT) == str(2 * 6 * 8 * 4)
