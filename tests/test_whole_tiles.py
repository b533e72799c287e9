"""Tiles of scores that are whole and of which nothing is hidden: kernels take a shorter way to their exponentials.

It has to hold for scales of any sign, scores of any size and what is not finite.
"""

import pytest
import reference
import torch
from helpers import HALVES, check_lse, close, qkv, sdpa_forward
from kernels import Kernel, with_contract_dims

L, S = 264, 520  # two tiles of 128 rows, two of 256 keys, and a rest of each
HALF_KERNELS = with_contract_dims(HALVES, at_most=1)


def needs_the_card(kernel: Kernel) -> None:
    if not kernel.runs_here():
        pytest.skip(f"{kernel.name} needs compute capability {kernel.capability}")


# in units of 1 / sqrt(E), so the standard deviation of the logits
@pytest.mark.parametrize("deviation", [1.0, 32.0, -2.8, 0.0, -700.0])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), HALF_KERNELS)
def test_any_scale(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, deviation: float) -> None:
    needs_the_card(kernel)

    def trial() -> None:
        q, k, v = qkv((1,), (2,), L, S, E, Ev, dtype, kernel.device)
        scale = deviation * E**-0.5
        out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, scale=scale, kernel_name=kernel.name)
        (want, want_lse), (own, _) = (
            reference.attention(q, k, v, None, False, scale, dtype=of, device=kernel.device) for of in (torch.float64, dtype)
        )
        reference.check_error("out", out, want, own)
        check_lse(lse, want_lse.cpu(), dtype)

    reference.settle(trial)


@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), HALF_KERNELS)
def test_rows_of_all_sizes(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int) -> None:
    """Deviations of the logits from 0.01 to 1000: rows beside each other take either way."""
    needs_the_card(kernel)

    def trial() -> None:
        q, k, v = qkv((1,), (2,), L, S, E, Ev, dtype, kernel.device)
        factors = torch.logspace(-2, 3, L, device=kernel.device)[torch.randperm(L, device=kernel.device)]
        q = (q * factors[:, None]).to(dtype)
        out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, kernel_name=kernel.name)
        (want, want_lse), (own, _) = (reference.attention(q, k, v, dtype=of, device=kernel.device) for of in (torch.float64, dtype))
        reference.check_error("out", out, want, own)
        check_lse(lse, want_lse.cpu(), dtype)

    reference.settle(trial)


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), HALF_KERNELS)
def test_what_is_not_finite_stays_in_its_row(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, what: float) -> None:
    """An infinite query has scores of both infinities, and so a row of NaN as well."""
    needs_the_card(kernel)
    q, k, v = qkv((1,), (2,), L, S, E, Ev, dtype, kernel.device)
    want, want_lse = sdpa_forward(q, k, v, None, None, 0.0, False, kernel_name=kernel.name)
    q[..., (5, 130, 263), 0] = what
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, kernel_name=kernel.name)
    row = torch.arange(L, device=kernel.device)
    bad = (row == 5) | (row == 130) | (row == 263)
    assert out[..., bad, :].isnan().all() and lse[..., bad].isnan().all()
    close(out[..., ~bad, :], want[..., ~bad, :], reference.ulp(dtype, float(want.abs().max())))
    torch.testing.assert_close(lse[..., ~bad], want_lse[..., ~bad], rtol=1e-6, atol=1e-6)
