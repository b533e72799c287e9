"""is_causal is top-left: query i sees keys 0..i, whatever L and S are."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, HALVES, compare, leaves, normal, qkv, run, sdpa

LENGTHS = [(1, 1), (1, 8), (3, 8), (8, 3), (64, 65), (65, 64), (130, 7), (7, 130), (129, 129)]


@pytest.mark.parametrize(("L", "S"), LENGTHS)
def test_lengths_differ(device: str, L: int, S: int, poison: None) -> None:
    q, k, v = qkv((1,), (2,), L=L, S=S, device=device)
    out, grads = compare(q, k, v, causal=True)
    torch.testing.assert_close(out[:, :, :1], v[:, :, :1], rtol=0.0, atol=0.0)
    assert grads[0][:, :, 0].abs().max() < 1e-5  # one visible key: its weight is 1 whatever the query
    assert (grads[1][:, :, L:] == 0).all() and (grads[2][:, :, L:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize(("L", "S"), [(3, 8), (8, 3), (65, 64), (7, 130)])
def test_lengths_differ_other_dtypes(device: str, dtype: torch.dtype, L: int, S: int, poison: None) -> None:
    q, k, v = qkv((1,), (2,), L=L, S=S, dtype=dtype, device=device)
    out, _ = compare(q, k, v, causal=True)
    assert torch.equal(out[:, :, :1], v[:, :, :1])


@pytest.mark.parametrize(("batch", "heads"), [((), ()), ((), (3,)), ((2,), (3,)), ((2, 2), (3,)), ((2, 1, 2), (3,))])
@pytest.mark.parametrize(("L", "S"), [(9, 9), (5, 9), (9, 5)])
def test_ranks(device: str, batch: tuple[int, ...], heads: tuple[int, ...], L: int, S: int) -> None:
    q, k, v = qkv(batch, heads, L=L, S=S, E=8, device=device)
    compare(q, k, v, causal=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_later_keys_never_count(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=70, dtype=dtype, device=device)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 40:], v2[:, :, 40:] = 900.0, -900.0
    grad = normal(2, 3, 70, 16)
    grad[:, :, 40:] = 0.0
    out, grads = run(sdpa, leaves(q, k, v), grad, is_causal=True)
    out2, grads2 = run(sdpa, leaves(q, k2, v2), grad, is_causal=True)
    assert torch.equal(out[:, :, :40], out2[:, :, :40]) and not torch.equal(out, out2)
    assert torch.equal(grads[0][:, :, :40], grads2[0][:, :, :40])
    assert all((g[:, :, 40:] == 0).all() for g in (*grads[1:], *grads2[1:]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_as_lower_triangular_mask(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=19, S=23, dtype=dtype, device=device)
    tril = torch.ones(19, 23, dtype=torch.bool, device=device).tril()
    grad = normal(2, 3, 19, 16)
    out, grads = run(sdpa, leaves(q, k, v), grad, is_causal=True)
    masked, masked_grads = run(sdpa, [*leaves(q, k, v), tril], grad)
    for a, b in zip((out, *grads), (masked, *masked_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=8 * torch.finfo(dtype).eps * float(b.abs().max()))


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 2, 3)], ids=str)
@pytest.mark.parametrize(("L", "S"), [(9, 14), (14, 9)])
def test_grouped_heads(device: str, heads: tuple[int, ...], L: int, S: int) -> None:
    q, k, v = qkv(heads=heads, L=L, S=S, device=device)
    compare(q, k, v, causal=True, gqa=True)


@pytest.mark.parametrize(("E", "Ev"), [(5, 9), (64, 33), (130, 64)])
def test_head_dims(device: str, E: int, Ev: int, poison: None) -> None:
    q, k, v = qkv(L=33, S=40, E=E, Ev=Ev, device=device)
    compare(q, k, v, causal=True)


def test_layout_of_a_projection(device: str) -> None:
    packed = normal(2, 37, 3, 4, 16, device=device)
    q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
    compare(q, k, v, causal=True)
    grad = normal(2, 4, 37, 16)
    out, grads = run(sdpa, leaves(q, k, v), grad, is_causal=True)
    dense, dense_grads = run(sdpa, leaves(*(t.contiguous() for t in (q, k, v))), grad, is_causal=True)
    for a, b in zip((out, *grads), (dense, *dense_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
