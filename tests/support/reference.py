"""What the operators must return: attention in float64 on the CPU, the dropout mask, and the error rule.

Sizes: B batch (any leading dims), Hq query heads, Hk key heads, L queries, S keys, E query/key head dim, Ev value head dim.
Everything is written with differentiable PyTorch functions, so gradients of the oracle come from autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

NEG_INF = float("-inf")
_LOW32 = 0xFFFFFFFF


def default_scale(head_dim: int) -> float:
    """1/sqrt(E), and 1 for E = 0, where every score is zero anyway."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def _grouped_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """(..., Hq, L, X) and (..., Hk, X, Y) -> (..., Hq, L, Y)."""
    heads, groups = rows.size(-3), matrix.size(-3)
    together = rows.unflatten(-3, (groups, heads // groups)).flatten(-3, -2) @ matrix
    return together.unflatten(-2, (heads // groups, rows.size(-2))).flatten(-4, -3)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    gqa: bool = False,
    *,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    side_by_side: bool = False,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T + bias) V, and the natural log-sum-exp of the rows.

    query (..., Hq, L, E), key (..., Hk, S, E), value (..., Hk, S, Ev), mask broadcastable to (..., Hq, L, S):
    boolean (True takes part) or additive. Returns out (..., Hq, L, Ev) and lse (..., Hq, L).
    A row without a visible key gives out = 0, lse = -inf and zero gradients.
    keep (..., Hq, L, S): the weights that survive dropout; they are divided by 1 - dropout_p.
    side_by_side: with gqa, the query heads of one key head as rows of one product, so that gradients of keys and values are sums
    over all of them at once, rounded as a kernel's that repeats nothing, in place of keys and values repeated.
    """
    query, key, value = (t.to(device=device, dtype=dtype) for t in (query, key, value))
    if gqa and not side_by_side:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    product = _grouped_product if gqa and side_by_side else torch.matmul
    scores = product(query, key.mT) * (default_scale(query.size(-1)) if scale is None else scale)
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=device)
    if causal:
        hidden = torch.ones_like(hidden).triu(1)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask.to(device)
    elif mask is not None:
        scores = scores + mask.to(device=device, dtype=dtype)
    scores = scores.masked_fill(hidden, NEG_INF)
    dead = (scores == NEG_INF).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(dead, 0.0)
    # Less the maximum, so that its derivative, exp(score - lse), keeps the sum's share of a large log-sum-exp.
    top = scores.detach().amax(-1, keepdim=True) if scores.size(-1) else scores.detach().sum(-1, keepdim=True)
    lse = (torch.logsumexp(scores - top, -1) + top.squeeze(-1)).masked_fill(dead.squeeze(-1), NEG_INF)
    if keep is not None:
        weights = weights * (keep.to(device=device, dtype=dtype) / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)
    out = product(weights, value)
    return out, lse.expand(out.shape[:-1])


def _mul_high_low(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product of two 32-bit numbers; int64 wraps, so all 64 bits are right."""
    product = a * b
    return (product >> 32) & _LOW32, product & _LOW32


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _mul_high_low(0xD2511F53, c0)
        high1, low1 = _mul_high_low(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW32, (k1 + 0xBB67AE85) & _LOW32
    return c0, c1, c2, c3


def dropout_keep_mask(
    seed: int, p: float, n: int, l: int, s: int, rows: list[int] | None = None, device: str | torch.device = "cpu"
) -> Tensor:
    """(n, l, s) bool: which weights survive. n counts (batch, query head) pairs in the order of a contiguous tensor.
    rows: only these of the l rows.

    Weight (h, i, j) reads word j % 4 of Philox at counter (j // 4, i, low half of h, high half of h) under the key
    (low half, high half) of the seed, and survives iff that word >= int(p * 2^32).
    """
    h, i, j = (torch.arange(size, dtype=torch.int64, device=device) for size in (n, l, (s + 3) // 4))
    i = i if rows is None else torch.tensor(rows, device=device)
    h, i, j = h[:, None, None], i[None, :, None], j[None, None, :]
    words = philox4x32((j, i, h & _LOW32, h >> 32), (seed & _LOW32, (seed >> 32) & _LOW32))
    return torch.stack(words, -1).flatten(-2)[..., :s] >= int(p * 2**32)


def ulp(dtype: torch.dtype, largest: float) -> float:
    """One unit in the last place of `dtype` at the magnitude `largest`."""
    info = torch.finfo(dtype)
    if largest < info.tiny:
        return info.tiny * info.eps
    return info.eps * 2.0 ** math.floor(math.log2(largest))


def largest(*tensors: Tensor) -> float:
    return max((float(t.detach().abs().max()) for t in tensors if t.numel()), default=0.0)


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Largest absolute difference and relative Frobenius norm against the float64 `want`."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if not want.numel():
        return 0.0, 0.0
    difference, norm = got - want, float(want.norm())
    return float(difference.abs().max()), float(difference.norm()) / norm if norm else 0.0


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
    """The error of `got` is at most twice that of `base` (PyTorch's own, same dtype) plus one ulp at the largest value.

    among: the largest gradient of the same call. A gradient that vanishes by cancellation (one key, scale 0, a mask that is
    the same for all keys) is the rounding of float32 sums and no more, so it is measured by that.
    dtype: of the call, where the result is of another one (the gradient of a float32 mask beside half operands).
    extra: what any element may be off beside that.
    In float64 the oracle rounds as well and no better one is at hand, so there the unit is 1e-13 of the largest value.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == base.dtype, f"{name}: dtype {got.dtype}, expected {base.dtype}"
    assert torch.isfinite(got).all(), f"{name}: not finite"
    assert torch.isfinite(want).all() and torch.isfinite(base).all(), f"{name}: no finite value to compare with"
    top, dtype = largest(want), dtype or got.dtype
    vanishes = top < 1e-6 * among
    size = among if vanishes else top
    unit = 1e-13 * size if dtype == torch.float64 else ulp(dtype, size)
    (absolute, relative), (base_absolute, base_relative) = errors(got, want), errors(base, want)
    limit = 2 * base_absolute + unit + extra
    if vanishes and dtype != torch.float64:
        limit += 16 * ulp(torch.float32, among)
    text = f"{name}: error {absolute:.3e}, PyTorch's {base_absolute:.3e}, limit {limit:.3e}"
    assert absolute <= 2 * limit, text
    if absolute > limit:
        raise CloseCall(text)
    if top and not vanishes:
        limit = 2 * base_relative + (unit + extra) / top
        text = f"{name}: relative error {relative:.3e}, PyTorch's {base_relative:.3e}, limit {limit:.3e}"
        assert relative <= 2 * limit, text
        if relative > limit:
            raise CloseCall(text)
