"""Dropout's random bits: sixteen a weight, at the rate that p is rounded to, independent, and the same in every kernel."""

from __future__ import annotations

import pytest
import reference
import torch
from helpers import normal, qkv, sdpa_backward, sdpa_forward
from kernels import Kernel, needs_the_card, params
from torch import Tensor

from attention_ext.attention.reference import dropped_steps, keep_mask, random_bits

RATES = (0.1, 0.5, 1e-4, 0.999, 0.25, 2.0**-16, 1.0 - 2.0**-16)


def check_rates(bits: Tensor) -> None:
    n = bits.numel()
    for p in RATES:
        share = reference.rounded_dropout_p(p)
        assert abs(share - p) <= 2.0**-17
        dropped = (bits < dropped_steps(p)).sum().item()
        assert abs(dropped - n * share) < 5 * (n * share * (1 - share)) ** 0.5, p


def check_no_correlation(a: Tensor, b: Tensor, what: str) -> None:
    assert abs((a * b).sum(dtype=torch.float64).item()) < 5 * a.numel() ** 0.5, what


def signs_of(bits: Tensor) -> Tensor:
    """Mean 0, variance 1."""
    return (bits.float() - 32767.5) / 18918.6


def test_rates_and_independence() -> None:
    """2^24 weights: at the rates, and no correlation with others of the set of eight, of the next sets, rows, heads and seeds."""
    bits = random_bits(-(2**40) - 77, 4, range(2048), 2048)
    assert bits.numel() == 2**24 and bits.min() == 0 and bits.max() == 65535
    check_rates(bits)
    signs = signs_of(bits)
    for lag in (1, 2, 4, 7, 8, 9, 16, 64):
        check_no_correlation(signs[..., lag:], signs[..., :-lag], f"keys {lag} apart")
        check_no_correlation(signs[:, lag:], signs[:, :-lag], f"rows {lag} apart")
        check_no_correlation(signs[:, lag:, lag:], signs[:, :-lag, :-lag], f"a diagonal {lag} apart")
    for other in range(1, 4):
        check_no_correlation(signs[other], signs[0], f"heads {other} apart")
    check_no_correlation(signs[0].triu(1), signs[0].mT, "transposed")
    next_seed = signs_of(random_bits(-(2**40) - 76, 1, range(2048), 2048))
    check_no_correlation(next_seed, signs[:1], "seeds next to each other")


def test_each_of_the_bits_is_even() -> None:
    bits = random_bits(3, 1, range(1024), 1024)
    for bit in range(16):
        assert abs((bits >> bit & 1).double().mean().item() - 0.5) < 5 * 0.5 / 1024


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3, -(2**63), 2**63 - 1])
def test_both_references_agree(seed: int) -> None:
    """Rows and keys that begin and end within a set."""
    for p in (0.3, 1.0, 0.0, 1e-9, 1.0 - 1e-9):
        for rows in (range(5, 50), range(16, 17), range(31, 33), range(0)):
            whole = reference.dropout_keep_mask(seed, p, 3, 50, 77)
            assert torch.equal(keep_mask(seed, p, 3, rows, 77), whole[:, rows.start : rows.stop])


def test_p_is_rounded(device: str) -> None:
    """To multiples of 2^-16: nothing is dropped below half a step, all at 1 alone; what stays is scaled by the true rate."""
    q, k, v = qkv((2,), (3,), L=40, S=64, E=16, device=device)
    seed = torch.tensor([11], device=device)
    plain, _ = sdpa_forward(q, k, v, None, None, 0.0, False)
    for p in (2.0**-18, 1e-30):
        assert torch.equal(sdpa_forward(q, k, v, None, seed, p, False)[0], plain)
    assert (sdpa_forward(q, k, v, None, seed, 1.0, False)[0] == 0).all()
    eye = torch.eye(64, device=device).expand(2, 3, 64, 64)
    weights, _ = sdpa_forward(q, k, eye, None, None, 0.0, False)
    for p in (0.3, 1e-4, 1.0 - 2.0**-10, 1.0 - 1e-9, 1.0 - 2.0**-53):
        out, _ = sdpa_forward(q, k, eye, None, seed, p, False)
        keep = reference.dropout_keep_mask(11, p, 6, 40, 64).view(out.shape).to(device)
        assert torch.equal(out != 0, keep)
        share = reference.rounded_dropout_p(p)
        assert share < 1.0
        torch.testing.assert_close(out, weights * keep / (1.0 - share), rtol=1e-5, atol=1e-9)


def backwards(kernel: Kernel, dtype: torch.dtype, E: int) -> list[str]:
    """Names of the backward kernels for what a forward kernel has computed."""
    if kernel.device == "cpu":
        return ["reference"]
    hopper = torch.cuda.get_device_capability() == (9, 0)
    fast = {torch.float32: ["sm90_split_half"], torch.float64: []}.get(dtype, ["sm90_pipeline", *["sm90_256"] * (E <= 256)])
    return ["pipeline", *(fast if hopper else [])]


def check_what_is_kept(kernel: Kernel, dtype: torch.dtype, L: int, S: int, E: int, heads: tuple[int, ...]) -> None:
    """V = I shows what the forward keeps, and so does the gradient of V where that of the output is I: E columns at a time."""
    seed, p, device, gqa = 123456789, 0.4, kernel.device, len(heads) > 1
    q, k, _ = qkv((2,), heads, L=L, S=S, E=E, dtype=dtype, device=device)
    q, drawn = q * 0.1, torch.tensor([seed], device=device)
    want = reference.dropout_keep_mask(seed, p, 2 * heads[0], L, S).view(2, heads[0], L, S)
    for begin in range(0, S, E):
        count = min(E, S - begin)
        v = torch.zeros(2, heads[-1], S, E, dtype=dtype, device=device)
        v[..., begin : begin + count, :count] = torch.eye(count, dtype=dtype, device=device)
        out, lse = sdpa_forward(q, k, v, None, drawn, p, False, enable_gqa=gqa, kernel_name=kernel.name)
        assert torch.equal((out != 0).cpu()[..., :count], want[..., begin : begin + count]), kernel.name
    for begin in range(0, 0 if gqa else L, E):  # of grouped heads gradients are sums
        count = min(E, L - begin)
        grad = torch.zeros(2, heads[0], L, E, dtype=dtype, device=device)
        grad[..., begin : begin + count, :count] = torch.eye(count, dtype=dtype, device=device)
        for name in backwards(kernel, dtype, E):
            of_v = sdpa_backward(grad, None, q, k, v, None, out, lse, drawn, p, False, kernel_name=name)[2]
            assert torch.equal((of_v != 0).cpu()[..., :count].mT, want[..., begin : begin + count, :]), name


@pytest.mark.parametrize("heads", [(3,), (4, 2)], ids=str)
@pytest.mark.parametrize(("L", "S"), [(33, 70), (150, 300), (200, 129)])
@pytest.mark.parametrize("kernel", params())
def test_forward_and_backward_of_every_kernel_draw_the_same(kernel: Kernel, L: int, S: int, heads: tuple[int, ...]) -> None:
    """Forced by name, in each of its dtypes and of a few head dims; sizes that are no multiples of 16, over several tiles."""
    needs_the_card(kernel)
    tiled = kernel.device == "cuda"  # the reference on the CPU has one path for all
    for dtype in kernel.dtypes if tiled else kernel.dtypes[-1:]:
        for E in (64, 128, 192, 256, 512) if tiled else (64,):
            if kernel.takes_sizes(dtype, E, E):
                check_what_is_kept(kernel, dtype, L, S, E, heads)


@pytest.mark.parametrize("kernel", params())
@pytest.mark.parametrize("workspace", [1, 1 << 16, 1 << 18])
def test_slices_draw_the_same(kernel: Kernel, workspace: int) -> None:
    """Slices may begin at any row, in the forward and the backward."""
    needs_the_card(kernel)
    dtype = kernel.dtypes[-1]
    E = next(E for E in (64, 512, 1024) if kernel.takes_sizes(dtype, E, E))
    q, k, v = qkv((1,), (2,), L=70, S=90, E=E, dtype=dtype, device=kernel.device)
    seed, grad = torch.tensor([5], device=kernel.device), normal(1, 2, 70, E, dtype=dtype, device=kernel.device)
    for name in backwards(kernel, dtype, E):
        results = []
        for bytes_ in (workspace, 134217728):
            out, lse = sdpa_forward(q, k, v, None, seed, 0.5, False, kernel_name=kernel.name, workspace_bytes=bytes_)
            rest = {"kernel_name": name, "workspace_bytes": bytes_}
            results.append((out, *sdpa_backward(grad, None, q, k, v, None, out, lse, seed, 0.5, False, **rest)[:3]))
        for small, large in zip(*results, strict=True):
            assert (small - large).abs().max() <= 0.02 * large.abs().max(), name
