"""Errors of the forward and the backward over dtypes and head dims, ours beside PyTorch's, and whether the error rule holds."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases import MOST_BACK_END, Case
from common import DEVICE, error_rule, log, own_kernels
from torch import Tensor

__all__ = ["error_table"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 80, 128, 256, 512, 1024)
LENGTH = 2048
WHATS = ("out", "grad_query", "grad_key", "grad_value")


def _results(call: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    out = call(*leaves)
    return dict(zip(WHATS, (out.detach(), *torch.autograd.grad(out, leaves, grad)), strict=True))


def _float64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = (q @ k.mT) * q.size(-1) ** -0.5
    weights = torch.exp(x - x.amax(-1, keepdim=True).detach())
    return (weights @ v) / weights.sum(-1, keepdim=True)


def rows(dtype: torch.dtype, E: int) -> list[dict[str, Any]]:
    """Of (1, 4, LENGTH, LENGTH, E): what sdpa gives; half types by own kernels as well where sdpa may run PyTorch's, and their
    output by the pipeline, which is not what runs on Hopper.
    """
    case = Case("", 1, 4, 4, LENGTH, LENGTH, E, dtype)
    generator = torch.Generator(str(DEVICE)).manual_seed(E)
    *leaves, grad = (torch.randn(1, 4, LENGTH, E, device=DEVICE, dtype=dtype, generator=generator) for _ in range(4))
    ours: dict[str, Tensor] = {}
    if dtype != torch.float32:
        ours["out by pipeline"] = own_kernels(case, *leaves, kernel_name="pipeline")()
    for leaf in leaves:
        leaf.requires_grad_()
    if dtype != torch.float32 and E <= MOST_BACK_END:
        own = _results(lambda *qkv: own_kernels(case, *qkv)(), leaves, grad)
        ours |= {f"{what} by own kernels": result for what, result in own.items()}
    ours |= _results(torch.ops.attention_ext.sdpa, leaves, grad)
    theirs = _results(F.scaled_dot_product_attention, leaves, grad)
    wants = _results(_float64, [leaf.detach().double().requires_grad_() for leaf in leaves], grad.double())
    found = []
    for name, result in ours.items():
        what = name.partition(" ")[0]
        want = wants[what].cpu()
        errors, base = (error_rule.errors(own, want) for own in (result, theirs[what]))
        top = error_rule.largest(want)
        row = {"dtype": str(dtype), "E": E, "what": name, "ours": errors, "torch": base, "ulp": error_rule.ulp(dtype, top)}
        found.append(row | {"within_rule": error_rule.within(errors, base, top, dtype)})
    return found


def error_table() -> list[dict[str, Any]]:
    table = [row for dtype in DTYPES for E in HEAD_DIMS for row in rows(dtype, E)]
    log(f"error rule: {sum(row['within_rule'] for row in table)} of {len(table)} within")
    return table
