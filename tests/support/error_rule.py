"""The error rule, for tests, benches and random problems: at most twice the error of PyTorch's own result, and one rounding.

Both results are in one dtype and are compared with one in float64, whose largest magnitude is t. u: one unit in the last place of
the dtype at t. a, r: the largest absolute difference and the relative Frobenius norm of the difference; a', r': PyTorch's. Then

    a <= 2 a' + u        r <= 2 r' + u / t

The unit is absolute in one inequality and relative in the other, so that a result times a power of two is judged as the result is.

The linear operators in float32 have a narrower one: every error at most LINEAR times PyTorch's without TF32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LINEAR = 1.05
WRONG = 0.05  # a relative error that is no rounding in any dtype


def ulp(dtype: torch.dtype, largest: float) -> float:
    """One unit in the last place of `dtype` at the magnitude `largest`."""
    info = torch.finfo(dtype)
    if largest < info.tiny:
        return info.tiny * info.eps
    return info.eps * 2.0 ** math.floor(math.log2(largest))


def unit(dtype: torch.dtype, largest: float) -> float:
    """u of the rule. In float64 the result to compare with rounds as well and no better one is at hand: 1e-13 of `largest`."""
    return 1e-13 * largest if dtype == torch.float64 else ulp(dtype, largest)


def largest(*tensors: Tensor) -> float:
    return max((float(t.detach().abs().max()) for t in tensors if t.numel()), default=0.0)


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Largest absolute difference and relative Frobenius norm of the difference against the float64 `want`."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if not want.numel():
        return 0.0, 0.0
    difference, norm = got - want, float(want.norm())
    return float(difference.abs().max()), float(difference.norm()) / norm if norm else 0.0


def limits(base: Sequence[float], top: float, unit: float) -> tuple[float, float]:
    """What the two errors may be, given PyTorch's, t and u."""
    absolute, relative = base
    return 2 * absolute + unit, 2 * relative + (unit / top if top else math.inf)


def within(ours: Sequence[float], base: Sequence[float], top: float, dtype: torch.dtype) -> bool:
    """Whether the two errors keep the rule; False for NaN."""
    return all(error <= limit for error, limit in zip(ours, limits(base, top, unit(dtype, top)), strict=True))


class CloseCall(AssertionError):
    """An error is past its limit by less than a factor of two: perhaps no more than bad luck."""


def settle(trial: Callable[[], object]) -> None:
    """Puts a close call to the vote of three draws; everything else fails at once.

    The rule compares the largest of a few rounding errors with the largest of a few others. In float32, of two equally
    good kernels, one is past twice the other's in about one draw of thirty.
    """
    calls: list[str] = []
    for _ in range(3):
        try:
            trial()
        except CloseCall as call:
            calls.append(str(call))
        if not calls:
            return
    assert len(calls) < 2, "\n".join(calls)


def check_error(
    name: str,
    got: Tensor,
    want: Tensor,
    base: Tensor,
    among: float = 0.0,
    dtype: torch.dtype | None = None,
    extra: float = 0.0,
) -> None:
    """`got` keeps the rule beside `base`, PyTorch's own in the same dtype, and `want` in float64.

    among: the largest gradient of the same call. A gradient that vanishes by cancellation (one key, scale 0, a mask that is
    the same for all keys) is the rounding of float32 sums and no more, so it is measured by that.
    dtype: of the call, where the result is of another one (the gradient of a float32 mask beside half operands).
    extra: what any element may be off beside that.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == base.dtype, f"{name}: dtype {got.dtype}, expected {base.dtype}"
    assert torch.isfinite(got).all(), f"{name}: not finite"
    assert torch.isfinite(want).all() and torch.isfinite(base).all(), f"{name}: no finite value to compare with"
    top, dtype = largest(want), dtype or got.dtype
    if vanishes := top < 1e-6 * among:
        extra += unit(dtype, among) + (0.0 if dtype == torch.float64 else 16 * ulp(torch.float32, among))
    else:
        extra += unit(dtype, top)
    ours, theirs = errors(got, want), errors(base, want)
    kinds = zip(("error", "relative error"), ours, theirs, limits(theirs, 0.0 if vanishes else top, extra), strict=True)
    for kind, error, own, limit in kinds:
        text = f"{name}: {kind} {error:.3e}, PyTorch's {own:.3e}, limit {limit:.3e}"
        assert error <= 2 * limit, text
        if error > limit:
            raise CloseCall(text)


def check_gradients(grads: Sequence[Tensor], wants: Sequence[Tensor], bases: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Those of attention's operands, as far as there are some in `wants`, keep the rule among each other."""
    among = largest(*wants)
    for name, got, want, base in zip(("query", "key", "value", "attn_mask"), grads, wants, bases, strict=False):
        check_error(f"gradient of {name}", got, want, base, among, dtype)
