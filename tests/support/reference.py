"""What the operators must return: attention in float64 on the CPU, and the dropout mask.

Sizes: B batch (any leading dims), Hq query heads, Hk key heads, L queries, S keys, E query/key head dim, Ev value head dim.
Everything is written with differentiable PyTorch functions, so gradients of the oracle come from autograd.
"""

from __future__ import annotations

import math

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
    keep (..., Hq, L, S): the weights that survive dropout; they are divided by 1 - dropout_p, as that is rounded.
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
        share = rounded_dropout_p(dropout_p)
        weights = weights * (keep.to(device=device, dtype=dtype) / (1.0 - share) if share < 1.0 else 0.0)
    out = product(weights, value)
    return out, lse.expand(out.shape[:-1])


def _mul_high_low(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product of two 32-bit numbers; int64 wraps, so all 64 bits are right."""
    product = a * b
    return (product >> 32) & _LOW32, product & _LOW32


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-7 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        high0, low0 = _mul_high_low(0xD2511F53, c0)
        high1, low1 = _mul_high_low(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW32, (k1 + 0xBB67AE85) & _LOW32
    return c0, c1, c2, c3


def rounded_dropout_p(p: float) -> float:
    """The nearest multiple of 2^-16, which is 1 for p = 1 alone."""
    return 1.0 if p == 1.0 else min(math.floor(p * 2**16 + 0.5), 2**16 - 1) / 2**16


def dropout_keep_mask(
    seed: int, p: float, n: int, l: int, s: int, rows: list[int] | None = None, device: str | torch.device = "cpu"
) -> Tensor:
    """(n, l, s) bool: which weights survive. n counts (batch, query head) pairs in the order of a contiguous tensor.
    rows: only these of the l rows.

    Weight (h, i, j) has 16 bits of word 2 * (j // 8 % 2) + i // 8 % 2 of Philox at counter (4 * (j // 16) + j % 8 // 2,
    8 * (i // 16) + i % 8, low half of h, high half of h) under the key (low half, high half) of the seed: the lower ones where j is
    even, else the upper ones. It survives iff they are at least 2^16 times the rounded p.
    """
    h, i, j = (torch.arange(size, dtype=torch.int64, device=device) for size in (n, l, s))
    i = i if rows is None else torch.tensor(rows, device=device)
    h, i, j = h[:, None, None], i[None, :, None], j[None, None, :]
    counter = (4 * (j // 16) + j % 8 // 2, 8 * (i // 16) + i % 8, h & _LOW32, h >> 32)
    words = torch.stack(torch.broadcast_tensors(*philox4x32(counter, (seed & _LOW32, (seed >> 32) & _LOW32))), -1)
    chosen = (2 * (j // 8 % 2) + i // 8 % 2).expand(words.shape[:-1])
    word = words.gather(-1, chosen[..., None]).squeeze(-1)
    return (word >> 16 * (j % 2) & 0xFFFF) >= int(rounded_dropout_p(p) * 2**16)
