"""Gradients of operands that broadcast: summed over their copies in float32, rounded once."""

from __future__ import annotations

import error_rule
import pytest
import torch
from helpers import (
    FLOATS,
    HALVES,
    close,
    compare,
    leaves,
    normal,
    oracle_with_grads,
    qkv,
    sdpa,
    sdpa_backward,
    sdpa_forward,
    sdpa_with_lse,
)
from kernels import needs_the_card, params
from torch import Tensor

SHAPES = {
    "query": ((4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8)),
    "query, long batch": ((1, 2, 5, 8), (33, 2, 7, 8), (33, 2, 7, 8)),
    "key and value": ((33, 2, 5, 8), (2, 7, 8), (1, 1, 7, 16)),
    "key and value of one head": ((2, 24, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "value": ((3, 17, 5, 8), (3, 17, 7, 8), (7, 8)),
    "each another": ((5, 1, 3, 8), (6, 7, 8), (5, 1, 7, 8)),
}


def operands(name: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [normal(*shape, dtype=dtype, device=device) for shape in SHAPES[name]]


def with_lse(*tensors: Tensor | None, **options) -> Tensor:
    return sdpa_with_lse(*tensors, **options)[0]


@pytest.mark.parametrize("op", [sdpa, with_lse], ids=["sdpa", "sdpa_with_lse"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_error_rule(device: str, name: str, dtype: torch.dtype, causal: bool, op) -> None:
    compare(*operands(name, dtype, device), causal=causal, op=op)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_summed_before_rounding(device: str, name: str, dtype: torch.dtype) -> None:
    """The gradient is that of float32 operands of the same values, but for its last rounding and what the kernels round on the way.

    Parts that are rounded one by one leave an error that grows with the root of their number.
    """
    inputs = leaves(*operands(name, dtype, device))
    out, _ = sdpa_with_lse(*inputs)
    grad = normal(*out.shape, dtype=dtype, device=device)
    grads = torch.autograd.grad(out, inputs, grad)
    _, _, want = oracle_with_grads([*inputs, None], grad, False, None, False)
    for mine, right, t in zip(grads, want, inputs, strict=True):
        assert mine.shape == t.shape and mine.dtype == dtype
        largest, _ = error_rule.errors(mine, right)
        assert largest <= 8 * torch.finfo(dtype).eps * max(1.0, error_rule.largest(right))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_grads(device: str, dtype: torch.dtype) -> None:
    """sdpa_backward with wide_grads: the same gradients before they are rounded."""
    q, k, v = qkv(heads=(4, 2), L=130, S=140, E=24, Ev=40, dtype=dtype, device=device)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # the layout of the result is that of the operand
    grad = normal(2, 4, 130, 40, dtype=dtype, device=device)
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, True, enable_gqa=True)
    tensors = (grad, None, q, k, v, None, out, lse, None, 0.0, True)
    narrow, wide = (sdpa_backward(*tensors, enable_gqa=True, wide_grads=wide)[:3] for wide in (False, True))
    for small, large, t in zip(narrow, wide, (q, k, v), strict=True):
        assert large.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and small.dtype == dtype
        assert large.stride() == small.stride() and large.shape == t.shape
        assert torch.equal(large.to(dtype), small)
        if dtype in HALVES:
            assert not torch.equal(large, small.float())


@pytest.mark.parametrize("kernel", params())
def test_by_name(kernel) -> None:
    """A forward by name has the gradient of the plan's choice, also where operands broadcast."""
    needs_the_card(kernel)
    dtype = torch.float16 if torch.float16 in kernel.dtypes else torch.float32
    inputs = leaves(*(normal(*shape, dtype=dtype, device=kernel.device) for shape in ((1, 2, 5, 64), (9, 2, 7, 64), (9, 2, 7, 64))))
    grad = normal(9, 2, 5, 64, dtype=dtype, device=kernel.device)
    named, _ = sdpa_forward(*inputs, None, None, 0.0, False, kernel_name=kernel.name)
    auto, _ = sdpa_forward(*inputs, None, None, 0.0, False)
    for got, want in zip(torch.autograd.grad(named, inputs, grad), torch.autograd.grad(auto, inputs, grad), strict=True):
        close(got, want)


def test_compiled(device: str) -> None:
    inputs = leaves(*operands("query", torch.float16, device))
    call = torch.compile(with_lse, backend="aot_eager", fullgraph=True)
    grad = normal(4, 4, 3, 8, dtype=torch.float16, device=device)
    compiled, eager = (torch.autograd.grad(f(*inputs), inputs, grad) for f in (call, with_lse))
    for got, want in zip(compiled, eager, strict=True):
        assert torch.equal(got, want)
