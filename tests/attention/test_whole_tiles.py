"""Tiles of scores that are whole and of which nothing is hidden: kernels take a shorter way to their exponentials.

It has to hold for scales of any sign, scores of any size and what is not finite.
"""

import error_rule
import pytest
import reference
import torch
from forced import needs
from helpers import HALVES, check_lse, close, qkv, sdpa_forward
from kernels import Kernel, with_contract_dims

L, S = 264, 520  # two tiles of 128 rows, two of 256 keys, and a rest of each
HALF_KERNELS = with_contract_dims(HALVES, at_most=1)


# in units of 1 / sqrt(E), so the standard deviation of the logits
@pytest.mark.parametrize("deviation", [1.0, 32.0, -2.8, 0.0, -700.0])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), HALF_KERNELS)
def test_any_scale(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, deviation: float) -> None:
    def trial() -> None:
        q, k, v = qkv((1,), (2,), L, S, E, Ev, dtype, kernel.device)
        needs(kernel, q, k, v)
        scale = deviation * E**-0.5
        out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, scale=scale, kernel_name=kernel.name)
        (want, want_lse), (own, _) = (
            reference.attention(q, k, v, None, False, scale, dtype=of, device=kernel.device) for of in (torch.float64, dtype)
        )
        error_rule.check_error("out", out, want, own)
        check_lse(lse, want_lse.cpu(), dtype)

    error_rule.settle(trial)


@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), HALF_KERNELS)
def test_rows_of_all_sizes(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int) -> None:
    """Deviations of the logits from 0.01 to 300, so maxima beyond 1024: rows beside each other take either way."""
    q, k, v = qkv((1,), (2,), L, S, E, Ev, dtype, kernel.device)
    needs(kernel, q, k, v)
    factors = torch.logspace(-2, 2.5, L, device=kernel.device)[torch.randperm(L, device=kernel.device)]
    q = (q * factors[:, None]).to(dtype)
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, kernel_name=kernel.name)
    want, want_lse = reference.attention(q, k, v, device=kernel.device)
    assert want_lse.max() > 1024
    # Weights are rounded to half precision, and a score of 1200 is a sum in float: PyTorch's own scores may be halves.
    close(out, want, 4 * torch.finfo(dtype).eps)
    check_lse(lse, want_lse.cpu(), dtype)


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), HALF_KERNELS)
def test_what_is_not_finite_stays_in_its_row(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, what: float) -> None:
    """An infinite query has scores of both infinities, and so a row of NaN as well."""
    q, k, v = qkv((1,), (2,), L, S, E, Ev, dtype, kernel.device)
    needs(kernel, q, k, v)
    want, want_lse = sdpa_forward(q, k, v, None, None, 0.0, False, kernel_name=kernel.name)
    q[..., (5, 130, 263), 0] = what
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, kernel_name=kernel.name)
    row = torch.arange(L, device=kernel.device)
    bad = (row == 5) | (row == 130) | (row == 263)
    assert out[..., bad, :].isnan().all() and lse[..., bad].isnan().all()
    close(out[..., ~bad, :], want[..., ~bad, :], error_rule.ulp(dtype, float(want.abs().max())))
    torch.testing.assert_close(lse[..., ~bad], want_lse[..., ~bad], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), HALF_KERNELS)
def test_scores_beyond_a_billion(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int) -> None:
    """Their unit in the last place is more than any exponent takes: each row is the value of its largest score."""
    q, k, v = qkv((1,), (2,), L, S, E, Ev, dtype, kernel.device)
    needs(kernel, q, k, v)
    q, k = (t * 2.0**12 for t in (q, k))
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, scale=64.0, kernel_name=kernel.name)
    want, want_lse = reference.attention(q, k, v, None, False, 64.0, device=kernel.device)
    assert want_lse.max() > 2e9 and want_lse.isfinite().all()
    close(out, want, torch.finfo(dtype).eps)
    check_lse(lse, want_lse.cpu(), dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), [row for row in HALF_KERNELS if "pipeline" in row.values[0].name])
def test_a_row_does_not_depend_on_its_neighbours(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, causal: bool) -> None:
    """Bit for bit: in whole tiles, in one with rows of NaN and large scores, and as some rows of a short tile."""
    q, k, v = qkv((1,), (2,), L, S, E, Ev, dtype, kernel.device)
    needs(kernel, q, k, v)
    call = {"is_causal": causal, "kernel_name": kernel.name}
    whole = sdpa_forward(q, k, v, None, None, 0.0, **call)
    few = sdpa_forward(q[..., :40, :], k, v, None, None, 0.0, **call)
    other = q.clone()
    other[..., 1::2, :] *= 64
    other[..., 3, 0] = float("nan")
    beside = sdpa_forward(other, k, v, None, None, 0.0, **call)
    for one, short, mixed in zip(whole, few, beside, strict=True):
        assert torch.equal(one[:, :, :40], short) and torch.equal(one[:, :, ::2], mixed[:, :, ::2])


@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), HALF_KERNELS)
def test_scale_near_the_largest_float(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int) -> None:
    """log2(e) times it would be infinite, and of queries of zeros NaN."""
    q, k, v = qkv((1,), (2,), L, S, E, Ev, dtype, kernel.device)
    needs(kernel, q, k, v)
    out, lse = sdpa_forward(q * 0, k, v, None, None, 0.0, False, scale=3e38, kernel_name=kernel.name)
    close(out, v.double().mean(-2, True).expand_as(out), torch.finfo(dtype).eps)
    check_lse(lse, torch.full(lse.shape, float(S)).double().log(), dtype)
