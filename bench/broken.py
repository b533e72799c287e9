"""Where PyTorch's default breaks the contract of attention_ext.sdpa, measured on the card at hand.

Its cuDNN back end lets masked keys into a row without a visible one, and without a causal mask gives gradients that are not finite
where the number of keys is not a multiple of 128 and all scores of a row are far below zero. attention_ext.sdpa never hands it such
a call, so its times next to cuDNN's are those of a right result next to those of a wrong one.
"""

from typing import Any

import torch
import torch.nn.functional as F

from attention_ext._torch_private import chosen_by_torch

__all__ = ["gradients", "masked_rows", "measured"]

DEVICE = "cuda"
SIZES = (2, 4)  # batch and heads
E = 64
DEAD = (3, 70)  # rows whose keys are all masked
SCORE = -120.0


def _normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*SIZES, *shape, E, device=DEVICE, dtype=torch.bfloat16, generator=generator)


def masked_rows(S: int = 256) -> dict[str, Any]:
    """The largest absolute output of rows whose keys are all masked by a bool mask, which should be 0. L = S, bfloat16, E 64."""
    q, k, v = (_normal(S, seed=seed) for seed in range(3))
    mask = torch.ones(1, 1, S, S, device=DEVICE, dtype=torch.bool)
    mask[..., DEAD, :] = False
    out = F.scaled_dot_product_attention(q, k, v, mask)
    return {"back_end": chosen_by_torch(q, k, v, mask, 0.0, False), "S": S, "largest": float(out[..., DEAD, :].abs().max())}


def gradients(S: int) -> dict[str, Any]:
    """How many gradients are not finite where all scores are close to SCORE, without a mask. L = S, bfloat16, E 64."""
    level = (-SCORE * E**-0.5) ** 0.5  # of each of the E products of a score, before the scale of E^-1/2
    q, k = (sign * level + 0.1 * _normal(S, seed=seed) for seed, sign in enumerate((1, -1)))
    leaves = [t.requires_grad_() for t in (q, k, _normal(S, seed=2))]
    grads = torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, _normal(S, seed=3))
    wrong = sum(int((~torch.isfinite(grad)).sum()) for grad in grads)
    back_end = chosen_by_torch(*leaves, None, 0.0, False)
    return {"back_end": back_end, "S": S, "not_finite": wrong, "of": sum(grad.numel() for grad in grads)}


def measured(lengths: list[int]) -> dict[str, Any]:
    """Both; the gradients at these numbers of keys."""
    with torch.no_grad():
        rows = masked_rows()
    return {"masked_rows": rows, "gradients": [gradients(S) for S in lengths]}
