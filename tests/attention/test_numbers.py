"""Numbers: scores and sums in float32 or better, any scale, non-finite values stay where they belong."""

from __future__ import annotations

import error_rule
import pytest
import reference
import torch
from helpers import FLOATS, HALVES, close, compare, leaves, normal, qkv, run, sdpa, tf32

SCALES = [-0.7, -3.0, 0.0, -0.0, 1e-46, 1e-30, 0.01, 1.0, 3.0]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_logits_beyond_65504(device: str, dtype: torch.dtype, causal: bool) -> None:
    q = torch.full((1, 1, 4, 64), 210.0, dtype=dtype, device=device)
    k = q.clone()
    k[..., 0, :] = 200.0
    v = normal(1, 1, 4, 64, dtype=dtype, device=device)
    out, _ = compare(q, k, v, causal=causal)
    if not causal:
        close(out, v[..., 1:, :].double().mean(-2, True).expand(1, 1, 4, 64), torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_scores(device: str, dtype: torch.dtype, sign: float) -> None:
    q, k, v = qkv(L=33, E=64, dtype=dtype, device=device)
    compare(q * 100, k * 100 * sign, v)
    compare(q * 1e10, k * sign, v, backward=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_any_scale(device: str, scale: float, causal: bool) -> None:
    q, k, v = qkv(heads=(2,), L=6, E=8, device=device)
    compare(q, k, v, causal=causal, scale=scale)
    if not causal:
        mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
        compare(q, k, v, mask, scale=scale)
        compare(q, k, v, torch.zeros(6, 6, device=device).masked_fill(~mask, -INF), scale=scale)


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-30, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_any_scale_other_dtypes(device: str, dtype: torch.dtype, scale: float, causal: bool) -> None:
    q, k, v = qkv(heads=(4, 2), L=6, S=9, E=8, dtype=dtype, device=device)
    compare(q, k, v, causal=causal, scale=scale, gqa=True)


@pytest.mark.parametrize("scale", [0.0, -0.0])
def test_scale_zero_is_the_mean_of_the_visible_values(device: str, scale: float) -> None:
    q, k, v = qkv(L=5, device=device)
    visible = torch.stack([v[:, :, : i + 1].double().mean(-2) for i in range(5)], 2)
    close(sdpa(q, k, v, None, 0.0, True, scale=scale), visible, 2e-7)
    close(sdpa(q, k, v, scale=scale), v.double().mean(-2, True).expand(2, 3, 5, 16), 2e-7)


@pytest.mark.parametrize("scale", [NAN, INF, -INF])
def test_non_finite_scale_is_not_silent(device: str, scale: float) -> None:
    q, k, v = qkv(L=3, device=device)
    try:
        out = sdpa(q, k, v, scale=scale)
    except RuntimeError as error:
        assert "scale" in str(error)
    else:
        want, _ = reference.attention(q, k, v, scale=scale)
        assert torch.equal(out.isnan().cpu(), want.isnan())


@pytest.mark.parametrize("E", [1, 7, 16, 100])
def test_default_scale_is_that_of_the_true_head_dim(device: str, E: int) -> None:
    q, k, v = qkv(E=E, device=device)
    torch.testing.assert_close(sdpa(q, k, v), sdpa(q, k, v, scale=E**-0.5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_bytes_past_the_last_key_never_count(device: str, dtype: torch.dtype, causal: bool, poison: None) -> None:
    q = normal(1, 2, 37, 16, dtype=dtype, device=device)
    behind_k = torch.full((1, 2, 64, 24), NAN, dtype=dtype, device=device)
    behind_v = torch.full((1, 2, 64, 24), INF, dtype=dtype, device=device)
    k, v = behind_k[..., :37, :16], behind_v[..., :37, :16]
    k.copy_(normal(1, 2, 37, 16)), v.copy_(normal(1, 2, 37, 16))
    compare(q, k, v, causal=causal)
    compare(q, k, v, torch.rand(37, 37, device=device) < 0.8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinity_in_a_visible_value_stays_in_its_column(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=5, S=37, dtype=dtype, device=device)
    v[:, :, 11, 3] = INF
    out = sdpa(q, k, v)
    assert (out[..., 3] == INF).all()
    others = [c for c in range(16) if c != 3]
    close(out[..., others], reference.attention(q, k, v[..., others])[0], 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_in_a_query_stays_in_its_row(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=9, S=37, dtype=dtype, device=device)
    want = sdpa(q, k, v)
    q[:, :, 4, 2] = NAN
    out = sdpa(q, k, v)
    rows = [i for i in range(9) if i != 4]
    assert out[:, :, 4].isnan().all() and torch.equal(out[:, :, rows], want[:, :, rows])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_in_a_visible_key_is_not_hidden(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=9, S=37, dtype=dtype, device=device)
    k[:, :, 36, 0] = NAN
    assert sdpa(q, k, v).isnan().all()


def test_float64_is_computed_in_float64(device: str) -> None:
    q, k, v = qkv(L=65, S=130, E=64, dtype=torch.float64, device=device)
    grad = normal(2, 3, 65, 64, dtype=torch.float64)
    for causal in (False, True):
        doubles = leaves(*(t.cpu() for t in (q, k, v)))
        want, _ = reference.attention(*doubles, None, causal)
        want_grads = torch.autograd.grad(want, doubles, grad)
        out, grads = run(sdpa, leaves(q, k, v), grad, is_causal=causal)
        for a, b in zip((out, *grads), (want, *want_grads), strict=True):
            close(a, b, 1e-13)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("L", "S", "E"), [(20, 20, 16), (70, 130, 64), (33, 300, 96)])
def test_error_is_at_most_twice_that_of_pytorch(device: str, dtype: torch.dtype, causal: bool, L: int, S: int, E: int) -> None:
    compare(*qkv((1,), (2,), L=L, S=S, E=E, dtype=dtype, device=device), causal=causal)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_error_is_at_most_twice_that_of_the_plain_formula(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv((1,), (2,), L=20, dtype=dtype, device=device)
    want, _ = reference.attention(q, k, v)
    error_rule.check_error("out", sdpa(q, k, v), want, torch.softmax(q @ k.mT / 4, -1) @ v)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_far_from_zero(device: str, dtype: torch.dtype) -> None:
    """The weights of a row sum to 1, so an offset of V comes back as it is."""
    q, k, v = qkv(L=33, S=257, dtype=dtype, device=device)
    compare(q, k, torch.full_like(v, 1000.0), backward=False)
    compare(q, k, v + 1000.0, backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("E", [64, 512])
def test_tf32_only_where_the_user_allows_it(allowed: bool, E: int) -> None:
    q, k, v = qkv((1,), (2,), L=130, S=257, E=E, device="cuda")
    with tf32(allowed):
        compare(q, k, v)
        if not allowed:
            close(sdpa(q, k, v), reference.attention(q, k, v)[0], 1e-5)
