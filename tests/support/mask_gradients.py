"""Gradients of scores in float64, of which the gradient of a mask is a sum."""

from __future__ import annotations

import reference
import torch
from torch import Tensor


def score_gradients(tensors: tuple[Tensor, ...], mask: Tensor, key_lengths: Tensor | None = None) -> Tensor:
    """(B, H, L, S), of query, key, value and the gradient of the output on the GPU; heads of the query may be groups."""
    query, key, value, grad = tensors
    S = key.size(2)
    scores_mask = mask.double().expand(*query.shape[:3], S).contiguous()
    if key_lengths is not None:
        hidden = torch.arange(S, device="cuda") >= key_lengths[:, None, None, None]
        scores_mask = scores_mask.masked_fill(hidden, float("-inf"))
    scores_mask.requires_grad_()
    out, _ = reference.attention(query, key, value, scores_mask, gqa=True, device="cuda")
    return torch.autograd.grad(out, scores_mask, grad.double())[0]
