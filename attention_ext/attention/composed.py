"""Attention and its log-sum-exp as a composition of ATen operators, which every transform of PyTorch can differentiate and map.

For what the kernels do not take: torch.func transforms, forward-mode AD, other devices. It holds the whole score matrix.
"""

import math

import torch
from torch import Tensor

from .._checks import accumulator
from .call import AttentionCall

__all__ = ["attention_with_lse"]


def attention_with_lse(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that check_attention has passed."""
    query, mask = call.query, call.attn_mask
    acc = accumulator(query.dtype)
    q, k, v = (t.to(acc) for t in call[:3])
    if call.enable_gqa:
        k, v = (t.repeat_interleave(q.size(-3) // t.size(-3), -3) for t in (k, v))
    scores = q @ k.mT * call.factor
    if call.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(acc)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0.0)  # before the softmax: 0 * NaN in its derivative is NaN
    weights = torch.softmax(scores, -1).masked_fill(dead, 0.0)
    top = scores.detach().amax(-1, keepdim=True) if scores.size(-1) else scores.new_zeros(())
    lse = torch.logsumexp(scores - top, -1, keepdim=True) + top  # exp(score - lse) keeps the sum's share of a large lse
    lse = lse.masked_fill(dead, -math.inf).squeeze(-1)
    if call.dropout_p > 0.0:
        weights = torch.dropout(weights, call.dropout_p, True)
    out = weights @ v
    return out.to(query.dtype), lse.expand(out.shape[:-1])
