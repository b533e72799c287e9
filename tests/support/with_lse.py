"""Problems for the tests of sdpa_with_lse."""

from __future__ import annotations

import reference
import torch
from helpers import normal, qkv
from torch import Tensor

NEG_INF = float("-inf")
KINDS = ["plain", "causal", "negative scale", "scale 0", "bool", "float", "float32", "grouped", "value heads", "rank 2", "BLHE"]


def problem(kind: str, dtype: torch.dtype, device: str, L: int = 9, S: int = 13) -> tuple[list[Tensor | None], dict]:
    """[query, key, value, attn_mask], options; with a mask, row 2 is dead."""
    batch, heads = ((), ()) if kind == "rank 2" else ((2,), {"grouped": (4, 2), "value heads": (6, 2, 3)}.get(kind, (3,)))
    q, k, v = qkv(batch, heads, L=L, S=S, E=8, Ev=12, dtype=dtype, device=device)
    if kind == "BLHE":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    keep = torch.rand(L, S) < 0.6
    keep[:, 0], keep[2] = True, False
    mask = {
        "bool": lambda: keep,
        "grouped": lambda: keep[None].expand(4, L, S),
        "float": lambda: normal(3, L, S, dtype=dtype).masked_fill(~keep, NEG_INF),
        "float32": lambda: normal(1, L, S).masked_fill(~keep, NEG_INF),
    }.get(kind, lambda: None)()
    options = {"enable_gqa": True} if kind in ("grouped", "value heads") else {}
    options |= {"is_causal": True} if kind in ("causal", "negative scale", "scale 0", "value heads") else {}
    options |= {"scale": {"negative scale": -0.7, "scale 0": 0.0}[kind]} if "scale" in kind else {}
    return [q, k, v, None if mask is None else mask.to(device)], options


def oracle(inputs: list[Tensor | None], options: dict) -> tuple[Tensor, Tensor]:
    return reference.attention(*inputs, options.get("is_causal", False), options.get("scale"), options.get("enable_gqa", False))


def finite(lse: Tensor) -> Tensor:
    """Dead rows as 0, so that a sum over rows has a finite gradient."""
    return lse.masked_fill(lse == NEG_INF, 0.0)


def both_grads(op, inputs: list[Tensor | None], grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    out, lse = op(*inputs)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    total = (out * grad.to(out)).sum() + (finite(lse) * grad_lse.to(lse)).sum()
    return out.detach(), lse.detach(), list(torch.autograd.grad(total, wanted))
