"""Masks: True takes part, floats are added, everything broadcasts, a dead row is exactly 0, a masked key never counts."""

from __future__ import annotations

import pytest
import reference
import torch
from helpers import FLOATS, HALVES, close, compare, leaves, normal, qkv, run, sdpa
from torch import Tensor

NEG_INF = float("-inf")
B, H, L, S = 2, 3, 4, 5
SHAPES = [
    (1, S),
    (L, 1),
    (L, S),
    (1, 1),
    (1, 1, S),
    (H, 1, S),
    (1, L, S),
    (H, L, S),
    (B, 1, 1, S),
    (1, H, L, 1),
    (1, 1, L, S),
]
SHAPES += [(B, 1, L, S), (B, H, 1, 1), (B, H, L, S)]


def additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, NEG_INF)


def some_keys(*shape: int, device: str, p: float = 0.6) -> Tensor:
    """A random boolean mask in which every row sees at least its first key."""
    keep = torch.rand(shape) < p
    keep[..., 0] = True
    return keep.to(device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float32", "same"])
def test_dead_row_is_zero_with_zero_gradient(device: str, dtype: torch.dtype, kind: str, poison: None) -> None:
    q, k, v = qkv(L=5, dtype=dtype, device=device)
    keep = torch.ones(2, 1, 5, 5, dtype=torch.bool, device=device)
    keep[1, 0, 2] = False
    mask = keep if kind == "bool" else additive(keep, torch.float32 if kind == "float32" else dtype)
    out, grads = compare(q, k, v, mask)
    assert (out[1, :, 2] == 0).all() and (grads[0][1, :, 2] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "same"])
def test_dead_row_under_dropout(device: str, dtype: torch.dtype, kind: str) -> None:
    q, k, v = leaves(*qkv(L=5, dtype=dtype, device=device))
    keep = torch.ones(2, 1, 5, 5, dtype=torch.bool, device=device)
    keep[1, 0, 2] = False
    mask = keep if kind == "bool" else additive(keep, dtype)
    out, grads = run(sdpa, [q, k, v, mask], torch.ones(out_shape(q, v)), dropout_p=0.3)
    assert (out[1, :, 2] == 0).all() and out.isfinite().all() and out[0].count_nonzero() > 0
    assert all(g.isfinite().all() for g in grads) and (grads[0][1, :, 2] == 0).all()


def out_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*q.shape[:-1], v.size(-1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 1, 7), (2, 1, 1, 1), (2, 3, 5, 7)])
def test_everything_dead(device: str, dtype: torch.dtype, shape: tuple[int, ...], poison: None) -> None:
    q, k, v = leaves(*qkv(L=5, S=7, dtype=dtype, device=device))
    dead = torch.zeros(shape, dtype=torch.bool, device=device)
    for mask in (dead, additive(dead, dtype)):
        out, grads = run(sdpa, [q, k, v, mask], torch.ones(2, 3, 5, 16))
        assert (out == 0).all() and all((g == 0).all() for g in grads)


def test_dead_query_rows_column_mask(device: str) -> None:
    q, k, v = qkv(L=L, S=S, device=device)
    keep = torch.tensor([True, False, True, False], device=device)[:, None]
    out, _ = compare(q, k, v, keep)
    assert (out[:, :, 1::2] == 0).all() and (out[:, :, ::2] != 0).any(-1).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_true_takes_part(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=L, S=S, E=8, dtype=dtype, device=device)
    only = torch.zeros(L, S, dtype=torch.bool, device=device)
    only[:, 3] = True
    for mask in (only, additive(only, dtype)):
        close(sdpa(q, k, v, mask), v[:, :, 3:4].expand(B, H, L, 8), torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_broadcast(device: str, shape: tuple[int, ...], kind: str) -> None:
    q, k, v = qkv(L=L, S=S, E=8, device=device)
    mask = some_keys(*shape, device=device) if kind == "bool" else normal(*shape, device=device).requires_grad_()
    _, grads = compare(q, k, v, mask)
    assert kind == "bool" or grads[3].shape == shape


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(1, S), (L, 1), (H, 1, S), (B, 1, L, S), (B, H, L, S)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float32", "same"])
def test_broadcast_half(device: str, dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    q, k, v = qkv(L=L, S=S, E=8, dtype=dtype, device=device)
    mask_dtype = torch.float32 if kind == "float32" else dtype
    mask = some_keys(*shape, device=device) if kind == "bool" else normal(*shape, dtype=mask_dtype, device=device)
    compare(q, k, v, mask)


@pytest.mark.parametrize(
    ("batch", "heads", "shape"),
    [
        ((), (), (L, S)),
        ((), (), (1, S)),
        ((), (H,), (L, S)),
        ((), (H,), (H, 1, S)),
        ((2, 2), (H,), (1, 1, S)),
        ((2, 2), (H,), (2, 1, H, L, S)),
        ((2, 2), (H,), (2, 2, 1, 1, S)),
        ((2, 1, 2), (H,), (2, 1, 1, 1, L, S)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_ranks(device: str, batch: tuple[int, ...], heads: tuple[int, ...], shape: tuple[int, ...], kind: str) -> None:
    q, k, v = qkv(batch, heads, L=L, S=S, E=8, device=device)
    mask = some_keys(*shape, device=device) if kind == "bool" else normal(*shape, device=device).requires_grad_()
    compare(q, k, v, mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(4, L, S), (1, 4, 1, S), (2, 4, L, S), (2, 1, L, 1), (1, S)], ids=str)
def test_heads_of_the_mask_are_query_heads(device: str, kind: str, shape: tuple[int, ...]) -> None:
    q, k, v = qkv(heads=(4, 2), L=L, S=S, E=8, device=device)
    mask = some_keys(*shape, device=device) if kind == "bool" else normal(*shape, device=device).requires_grad_()
    compare(q, k, v, mask, gqa=True)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_strided_mask(device: str, kind: str) -> None:
    q, k, v = qkv(L=7, S=9, device=device)
    wide = some_keys(2, 3, 9, 21, device=device, p=0.7) if kind == "bool" else normal(2, 3, 9, 21, device=device)
    views = [
        wide[:, :, :7, 3:12],
        wide[:, :, 1:8, ::2][..., 1:10],
        wide.mT[:, :, 2:9, :9],
        wide.transpose(0, 1)[:2, :2, :7, :9],
    ]
    views += [
        wide[:1, :1, :1, :9].expand(2, 3, 7, 9),
        wide[0, 0, :7, :1].expand(2, 3, 7, 9),
        wide[:, :1, :7, :9].expand(2, 3, 7, 9),
    ]
    for view in views:
        mask = view if view.shape == (2, 3, 7, 9) else view[:, :1]
        want, _ = compare(q, k, v, mask.contiguous())
        got, _ = compare(q, k, v, mask)
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bytes_around_the_mask_never_count(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=5, S=7, dtype=dtype, device=device)
    buffer = torch.full((2, 3, 8, 16), float("nan"), dtype=dtype, device=device)
    buffer[:, :, 1:6, 3:10] = normal(2, 3, 5, 7, dtype=dtype, device=device)
    compare(q, k, v, buffer[:, :, 1:6, 3:10])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_masked_key_never_counts(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=5, S=37, dtype=dtype, device=device)
    keep = some_keys(5, 37, device=device)
    keep[:, [9, 20, 36]] = False
    k2, v2 = k.clone(), v.clone()
    k2[..., [9, 20, 36], :], v2[..., [9, 20, 36], :] = 900.0, -900.0
    for mask in (keep, additive(keep, dtype)):
        grad = normal(2, 3, 5, 16)
        out, grads = run(sdpa, [*leaves(q, k, v), mask], grad)
        out2, grads2 = run(sdpa, [*leaves(q, k2, v2), mask], grad)
        assert torch.equal(out, out2) and torch.equal(grads[0], grads2[0])
        assert all((g[..., [9, 20, 36], :] == 0).all() for g in (*grads[1:], *grads2[1:]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_row_of_lowest_finite_numbers(device: str, dtype: torch.dtype) -> None:
    """Not dead: all keys lie equally low, so the row is the mean of V wherever the scores drown in the mask."""
    q, k, v = qkv(L=6, S=9, dtype=dtype, device=device)
    for mask_dtype in {dtype, torch.float32}:
        mask = normal(6, 9, dtype=mask_dtype, device=device)
        mask[2] = torch.finfo(mask_dtype).min
        out, _ = compare(q, k, v, mask)
        if mask_dtype != torch.float16:  # -65504 leaves the scores standing
            close(out[:, :, 2], v.double().mean(-2), 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lowest_finite_numbers_hide_a_key(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=6, S=9, dtype=dtype, device=device)
    keep = some_keys(6, 9, device=device)
    mask = torch.zeros(6, 9, dtype=dtype, device=device).masked_fill(~keep, torch.finfo(dtype).min)
    out, _ = compare(q, k, v, mask)
    close(out, sdpa(q, k, v, keep), 2 * torch.finfo(dtype).eps)


def test_positive_infinity_gives_nan(device: str) -> None:
    q, k, v = qkv(L=4, S=5, device=device)
    mask = torch.zeros(4, 5, device=device)
    mask[1, 2] = float("inf")
    out = sdpa(q, k, v, mask)
    assert out[:, :, 1].isnan().all() and out[:, :, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_float32_mask_beside_half_query_is_not_rounded_first(device: str, dtype: torch.dtype) -> None:
    """1 + 2^-20 and 1 are one number in half precision; scaled up they must still tell two keys apart."""
    q = torch.zeros(1, 1, 2, 16, dtype=dtype, device=device)
    v = torch.eye(16, dtype=dtype, device=device)[None, None, :2]
    mask = torch.tensor([[4096.0, 4097.5]], device=device).expand(2, 2)
    want, _ = reference.attention(q, q, v, mask)
    close(sdpa(q, q, v, mask), want, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_causal_float32_mask_beside_half_query(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(batch=(1,), heads=(2,), L=8, dtype=dtype, device=device)
    mask = torch.full((8, 8), NEG_INF, device=device).triu(1)
    out, _ = compare(q, k, v, mask)
    want, _ = compare(q, k, v, causal=True)
    close(out, want, 2 * torch.finfo(dtype).eps)


def test_the_mask_is_left_alone(device: str) -> None:
    q, k, v = qkv(L=4, S=5, device=device)
    for mask in (some_keys(4, 5, device=device), normal(4, 5, device=device)):
        before, version = mask.clone(), mask._version
        sdpa(q, k, v, mask)
        assert torch.equal(before, mask) and mask._version == version
