"""Attention and its log-sum-exp as a composition of ATen operators, which every transform of PyTorch can differentiate and map.

For what the kernels do not take: torch.func transforms, forward-mode AD, other devices. It holds the whole score matrix.
"""

import math

import torch
from torch import Tensor

__all__ = ["attention_with_lse"]


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of inputs that check_attention has passed."""
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v = (t.to(acc) for t in (query, key, value))
    if enable_gqa:
        k, v = (t.repeat_interleave(q.size(-3) // t.size(-3), -3) for t in (k, v))
    width = q.size(-1)
    scores = q @ k.mT * (scale if scale is not None else 1.0 / math.sqrt(width) if width else 1.0)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask.to(acc)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0.0)  # before the softmax: 0 * NaN in its derivative is NaN
    weights = torch.softmax(scores, -1).masked_fill(dead, 0.0)
    top = scores.detach().amax(-1, keepdim=True) if scores.size(-1) else scores.new_zeros(())
    lse = torch.logsumexp(scores - top, -1, keepdim=True) + top  # exp(score - lse) keeps the sum's share of a large lse
    lse = lse.masked_fill(dead, -math.inf).squeeze(-1)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    out = weights @ v
    return out.to(query.dtype), lse.expand(out.shape[:-1])
