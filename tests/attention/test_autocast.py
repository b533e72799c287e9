"""Autocast: the same dtypes as F.scaled_dot_product_attention in the same region, eager and compiled; and the setting for TF32."""

from __future__ import annotations

import itertools

import error_rule
import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import FLOATS, HALVES, leaves, normal, qkv, run, sdpa, sdpa_with_lse
from torch import Tensor

LOWER = (torch.float32, *HALVES)


@pytest.mark.parametrize("region", HALVES, ids=str)
@pytest.mark.parametrize("dtypes", [*itertools.product(LOWER, repeat=3), (torch.float64,) * 3], ids=str)
def test_output_dtype(device: str, region: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> None:
    inputs = leaves(*(t.to(d) for t, d in zip(qkv(L=6, E=8, device=device), dtypes, strict=True)))
    with torch.autocast(device, dtype=region):
        out, own = sdpa(*inputs), F.scaled_dot_product_attention(*inputs)
    assert out.dtype == own.dtype
    torch.testing.assert_close(out, own, rtol=0.0, atol=4 * torch.finfo(out.dtype).eps)
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert [g.dtype for g in grads] == list(dtypes) and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("region", HALVES, ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.bool, *LOWER], ids=str)
@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_masks(device: str, region: torch.dtype, dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    q, k, v = qkv(L=6, E=8, dtype=dtype, device=device)
    mask = torch.rand(6, 6, device=device) < 0.7 if mask_dtype == torch.bool else normal(6, 6, dtype=mask_dtype, device=device)
    with torch.autocast(device, dtype=region):
        out, own = sdpa(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)
    assert out.dtype == own.dtype
    lowered = [t.to(region) for t in (q, k, v)]
    error_rule.check_error("out", out, reference.attention(*lowered, mask)[0], own)


@pytest.mark.parametrize("region", HALVES, ids=str)
def test_gradient_of_the_mask(device: str, region: torch.dtype) -> None:
    q, k, v, mask = leaves(*qkv(L=6, E=8, device=device), normal(3, 1, 6, device=device))
    with torch.autocast(device, dtype=region):
        out = sdpa(q, k, v, mask)
    out.float().sum().backward()
    assert out.dtype == region and mask.grad.dtype == torch.float32 and mask.grad.shape == mask.shape
    assert q.grad.dtype == torch.float32 and q.grad.any()


def test_other_arguments_pass_through(device: str) -> None:
    q, k, v = qkv(heads=(4, 2), L=6, E=8, device=device)
    options = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    with torch.autocast(device, dtype=torch.bfloat16):
        out = sdpa(q, k, v, **options)
        positional = sdpa(q, k, v, None, 0.0, True, scale=0.3, enable_gqa=True)
        kept = sdpa(q, k, v, dropout_p=1.0, enable_gqa=True)
    want = sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options)
    assert torch.equal(out, want) and torch.equal(positional, want) and (kept == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_disabled_region_inside(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=6, E=8, dtype=dtype, device=device)
    with torch.autocast(device, dtype=torch.bfloat16), torch.autocast(device, enabled=False):
        out = sdpa(q, k, v)
    assert out.dtype == dtype and torch.equal(out, sdpa(q, k, v))


def test_refusals_inside_a_region(device: str) -> None:
    q, k, v = qkv(L=6, E=8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match=r"^attention_ext: attn_mask: "):
            sdpa(q, k, v, torch.zeros(6, 6, device=device), 0.0, True)
        with pytest.raises(RuntimeError, match=r"^attention_ext: attn_mask: "):
            sdpa(q, k, v, torch.zeros(6, 6, device=device, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"^attention_ext: key: "):
        sdpa(q, k.bfloat16(), v)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled(device: str, inside: bool) -> None:
    """The region around the compiled function, and inside of it; mixed dtypes and a float32 mask."""
    q, k, v = qkv(L=6, E=8, device=device)
    k, mask = k.bfloat16(), normal(6, 6, device=device)

    def plain(*inputs):
        return sdpa(*inputs)

    def within(*inputs):
        with torch.autocast(device, dtype=torch.bfloat16):
            return sdpa(*inputs)

    torch._dynamo.reset()
    if inside:
        got, want = torch.compile(within, fullgraph=True, backend="aot_eager")(q, k, v, mask), within(q, k, v, mask)
    else:
        with torch.autocast(device, dtype=torch.bfloat16):
            got, want = torch.compile(plain, fullgraph=True, backend="aot_eager")(q, k, v, mask), plain(q, k, v, mask)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.0, atol=4 * torch.finfo(torch.bfloat16).eps)


def everything(*inputs: Tensor) -> list[Tensor]:
    """Results and gradients of both routers, eager and compiled."""

    def both(*tensors: Tensor) -> Tensor:
        out, lse = sdpa_with_lse(*tensors)
        return torch.cat([sdpa(*tensors), out, lse.unsqueeze(-1)], -1)

    torch._dynamo.reset()
    results = []
    for op in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        out, grads = run(op, leaves(*inputs), torch.ones(both(*inputs).shape))
        results += [out.detach(), *grads]
    return results


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("scope", ["torch.backends", "torch.backends.cuda.matmul"])
def test_fp32_precision(device: str, scope: str, precision: str) -> None:
    """The setting that replaced allow_tf32, which PyTorch may refuse to read beside it; no result here depends on either."""
    owners = (torch.backends, torch.backends.cuda.matmul)
    inputs = qkv(L=33, S=40, E=64, device=device)
    want, before = everything(*inputs), [owner.fp32_precision for owner in owners]
    try:
        owners[scope == "torch.backends.cuda.matmul"].fp32_precision = precision
        got = everything(*inputs)
    finally:  # both: torch.compile makes the setting of the matmul what the other one came to
        for owner, value in zip(owners, before, strict=True):
            owner.fp32_precision = value
    assert not torch.backends.cuda.matmul.allow_tf32, "and it can be read again"
    for a, b in zip(got, want, strict=True):
        if device == "cuda" or scope == "torch.backends.cuda.matmul":
            assert torch.equal(a, b)
        else:  # a CPU that has TF32 may use it in PyTorch's own operator
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
