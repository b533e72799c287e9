"""sdpa_forward and sdpa_backward on the CPU: the readable statement of what every kernel computes.

    x = scale * Q K^T + mask        P = softmax(x)        O = dropout(P) V        lse = log(sum(exp(x)))

Rows are worked off in blocks, so that memory is linear in L; half precision is computed in float32. The query heads of one
key head are laid side by side as rows of one product, so that K and V are never repeated.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._checks import accumulator
from .call import AttentionCall
from .layout import empty_grads, empty_results

__all__ = ["Problem", "backward", "forward", "keep_mask", "random_bits", "softmax_parts"]

_M32 = 0xFFFFFFFF


def _philox(seed: int, counter: list[Tensor]) -> list[Tensor]:
    """Philox4x32-7 (Salmon et al., SC 2011): four 32-bit words for each counter of four, in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _M32, (seed >> 32) & _M32
    for _ in range(7):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps beyond 63 bits, which leaves both halves right
        c0, c1, c2, c3 = ((p1 >> 32) & _M32) ^ c1 ^ k0, p1 & _M32, ((p0 >> 32) & _M32) ^ c3 ^ k1, p0 & _M32
        k0, k1 = (k0 + 0x9E3779B9) & _M32, (k1 + 0xBB67AE85) & _M32
    return [c0, c1, c2, c3]


def dropped_steps(dropout_p: float) -> int:
    """How many of 2^16 equal steps of probability are dropped: dropout_p, rounded; all of them for 1 alone."""
    return 2**16 if dropout_p == 1.0 else min(int(dropout_p * 2**16 + 0.5), 2**16 - 1)


def random_bits(seed: int, batches: int, rows: range, keys: int) -> Tensor:
    """int64 (batches, len(rows), keys): the 16 random bits of each weight.

    A call of Philox makes those of eight weights, queries i and i + 8 by keys j, j + 1, j + 8 and j + 9, j even, of 16 by 16: the
    counter is (j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, n mod 2^32, n div 2^32). Word 2 * (j // 8 % 2) + i // 8 % 2 has a
    query's bits of two adjacent keys, the even one's below. n counts the leading dims and query heads in row-major order.
    """
    first = rows.start // 16 * 16
    n = torch.arange(batches).view(-1, 1, 1)
    of_rows = torch.arange(first // 2, (rows.stop + 15) // 16 * 8).view(1, -1, 1)
    of_keys = torch.arange((keys + 15) // 16 * 4).view(1, 1, -1)
    words = torch.stack(_philox(seed, list(torch.broadcast_tensors(of_keys, of_rows, n & _M32, n >> 32))), -1)
    bits = torch.stack([words & 0xFFFF, words >> 16], -1).unflatten(-2, (2, 2)).unflatten(1, (-1, 8)).unflatten(3, (-1, 4))
    # (batches, 16 queries, of 8, 16 keys, of 4, keys 8 apart, queries 8 apart, adjacent keys) -> queries and keys in their order
    bits = bits.permute(0, 1, 6, 2, 3, 5, 4, 7).flatten(4, 7).flatten(1, 3).flatten(2)
    wanted: Tensor = bits[:, rows.start - first : rows.stop - first, :keys]
    return wanted


def keep_mask(seed: int, dropout_p: float, batches: int, rows: range, keys: int) -> Tensor:
    """bool (batches, len(rows), keys): which weights dropout keeps, by the CUDA kernels' rule: those whose bits are at least
    dropped_steps(dropout_p)."""
    return random_bits(seed, batches, rows, keys) >= dropped_steps(dropout_p)


class Problem:
    """One problem, seen as rows of (Hk, G * rows) beside keys of (Hk, S), in blocks of query rows."""

    def __init__(self, call: AttentionCall) -> None:
        query, key, value, self.mask, seed, self.dropout_p, self.is_causal, *_ = call
        self.acc = accumulator(query.dtype)
        *leading, self.L, self.S = call.scores
        self.leading = leading
        tail = 1 if leading else 0  # rank 2 has no head dim
        batch = leading[: len(leading) - tail]
        self.query = query.expand(*leading, *query.shape[-2:]).to(self.acc)
        with_heads = [t[None] if t.dim() < 2 + tail else t for t in (key, value)]  # rank 2: one head for all
        self.key, self.value = (t.expand(*batch, *t.shape[t.dim() - 2 - tail :]).to(self.acc) for t in with_heads)
        self.seed = int(seed) if seed is not None and self.dropout_p > 0.0 else 0
        self.scale = call.factor
        self.unseen: Tensor | None = None
        if call.key_lengths is not None:  # what lies in unseen keys and values counts for nothing, whatever it is
            unseen = torch.arange(self.S) >= call.key_lengths.view(-1, 1)
            self.unseen = unseen.view(*batch, *(1,) * tail, 1, self.S)
            self.key, self.value = (t.masked_fill(self.unseen.mT, 0.0) for t in (self.key, self.value))
        self.batches = math.prod(leading)
        per_row = max(1, self.batches * self.S) * self.key.element_size()
        self.step = max(1, min(self.L, call.workspace_bytes // per_row))

    def __iter__(self) -> Iterator[range]:
        for start in range(0, self.L, self.step):
            yield range(start, min(start + self.step, self.L))

    def product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """(..., Hq, R, X) @ (..., Hk, X, Y) -> (..., Hq, R, Y)."""
        if rows.shape[:-2] == matrix.shape[:-2]:
            return rows @ matrix
        groups = matrix.shape[:-2]
        height = math.prod(rows.shape[:-1]) // max(1, math.prod(groups))  # G * R; no -1, which a size of 0 leaves undecided
        grouped = rows.reshape(*groups, height, rows.size(-1))
        return (grouped @ matrix).reshape(*rows.shape[:-1], matrix.size(-1))

    def product_over_rows(self, left: Tensor, right: Tensor, like: Tensor) -> Tensor:
        """left^T right, (..., Hq, R, S) and (..., Hq, R, X) -> (..., Hk, S, X), summed over the heads of each group."""
        groups = like.shape[:-2]
        left, right = (t.reshape(*groups, t.size(-2) * math.prod(t.shape[:-2]) // max(1, math.prod(groups)), t.size(-1))
                       for t in (left, right))  # fmt: skip
        return left.mT @ right

    def scores(self, rows: range) -> Tensor:
        """x of these rows, (..., Hq, R, S), -inf where a key is not visible."""
        x = self.product(self.query[..., rows.start : rows.stop, :], self.key.mT) * self.scale
        if self.is_causal:
            i = torch.arange(rows.start, rows.stop).view(-1, 1)
            x = x.masked_fill(torch.arange(self.S) > i, -math.inf)
        if self.mask is not None:
            mask = self.mask if self.mask.size(-2) == 1 else self.mask[..., rows.start : rows.stop, :]
            x = x.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else x + mask.to(self.acc)
        return x if self.unseen is None else x.masked_fill(self.unseen, -math.inf)

    def kept(self, rows: range) -> Tensor | None:
        """What dropout multiplies the weights of these rows by: 0 or 1 / (1 - p), with p as it is rounded."""
        dropped = dropped_steps(self.dropout_p)
        if dropped == 0:
            return None
        keep = keep_mask(self.seed, self.dropout_p, self.batches, rows, self.S).view(*self.leading, len(rows), self.S)
        return keep.to(self.acc) * (2**16 / (2**16 - dropped) if dropped < 2**16 else 0.0)


def softmax_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x - the row's maximum), its sum over the last dim and the log-sum-exp; 0, 0 and -inf in rows of -inf."""
    top = x.amax(-1, keepdim=True) if x.size(-1) else x.new_full((*x.shape[:-1], 1), -math.inf)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(x - top)
    total = weights.sum(-1)
    return weights, total, total.log() + top.squeeze(-1)


def _softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    weights, total, lse = softmax_parts(x)
    return weights / total.masked_fill(total == 0.0, 1.0).unsqueeze(-1), lse


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out (..., Hq, L, Ev) in the query's dtype and lse (..., Hq, L)."""
    out, lse = empty_results(call)
    blocks = Problem(call)
    for rows in blocks:
        weights, row_lse = _softmax(blocks.scores(rows))
        kept = blocks.kept(rows)
        weights = weights if kept is None else weights * kept
        out[..., rows.start : rows.stop, :] = blocks.product(weights, blocks.value)
        lse[..., rows.start : rows.stop] = row_lse
    return out, lse


def backward(
    call: AttentionCall, grad_out: Tensor, grad_lse: Tensor | None, mask_grad: bool, wide_grads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and (if mask_grad) mask, with P recomputed block by block."""
    _, key, value, mask = call.differentiable
    grads = empty_grads(call, mask_grad, wide_grads)
    blocks = Problem(call)
    acc = blocks.acc
    d_key, d_value = (torch.zeros_like(t, dtype=acc, memory_format=torch.contiguous_format) for t in (key, value))
    d_mask = torch.zeros(grads[3].shape, dtype=acc)
    for rows in blocks:
        part = slice(rows.start, rows.stop)
        g = grad_out[..., part, :].to(acc)
        weights = _softmax(blocks.scores(rows))[0]  # not exp(x - lse): a large lse has lost the sum's share of it
        kept = blocks.kept(rows)
        d_weights = blocks.product(g, blocks.value.mT)
        d_weights = d_weights if kept is None else d_weights * kept
        delta = (weights * d_weights).sum(-1, keepdim=True)  # a row of softmax' * d_weights; not from out, which was rounded
        if grad_lse is not None:
            delta = delta - grad_lse[..., part, None]
        d_scores = (weights * (d_weights - delta)).masked_fill(weights == 0.0, 0.0)  # whatever the gradients of a dead row are
        grads[0][..., part, :] = blocks.product(d_scores, blocks.key) * blocks.scale
        d_key += blocks.product_over_rows(d_scores, blocks.query[..., part, :], key) * blocks.scale
        d_value += blocks.product_over_rows(weights if kept is None else weights * kept, g, value)
        if mask is not None and mask_grad:
            target = d_mask if mask.size(-2) == 1 else d_mask[..., part, :]
            target += d_scores.sum_to_size(target.shape)
    return grads[0], grads[1].copy_(d_key), grads[2].copy_(d_value), grads[3].copy_(d_mask)
