"""Where a call of sdpa goes: to this package's kernels, or to PyTorch's own operator where that is the plan.

Only static properties decide (device, dtype, rank, head dim, flags, scale), never B, L or S: a branch on those would recompile
under torch.compile and break torch.export with dynamic shapes. What depends on lengths is decided inside sdpa_forward.
"""

import logging
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ._autograd import attend
from ._checks import check_attention

__all__ = ["Route", "route", "sdpa"]

_LOG = logging.getLogger("attention_ext")
_KERNELS = ("cuda",)  # device types that sdpa_forward serves in place of PyTorch's operator
_MAX_RANK = 10  # of what the kernels take: eight leading dims, rows, columns


class Route(NamedTuple):
    """target: "torch" (PyTorch's operator), "torch_math" (its MATH back end) or "kernel" (sdpa_forward)."""

    target: str
    reason: str


def route(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Route:
    """Decides for inputs that check_attention has passed."""
    if forward_ad._current_level >= 0:
        return Route("torch_math", "forward-mode AD is open, which only PyTorch's MATH back end supports")
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    if any(transform.key() == torch._C._functorch.TransformType.Vmap for transform in transforms):
        return Route("torch_math", "a torch.func transform is active under vmap, which PyTorch's fused operators only loop over")
    if query.device.type in _KERNELS and not transforms:
        if enable_gqa and key.size(-3) != value.size(-3):
            return Route("torch_math", "key and value have different head counts")
        if max(query.dim(), key.dim(), value.dim()) > _MAX_RANK:
            return Route("torch_math", f"the kernels take operands of rank {_MAX_RANK} at most")
        return Route("kernel", f"sdpa_forward takes {query.device.type} tensors")
    if scale is not None and math.isnan(scale):
        return Route("torch_math", "PyTorch's fused operators hide a scale that is NaN")
    if is_causal and scale is not None and scale <= 0.0:
        return Route("torch_math", "PyTorch's fused operators give NaN for is_causal with a scale that is not positive")
    width = query.size(-1)
    if isinstance(width, int) and width == 0:
        return Route("torch_math", "PyTorch's fused operators do not give the mean of the values for a head dim of 0")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return Route("torch_math", "PyTorch's fused operators want a mask of the query's dtype")
    why = "a torch.func transform is active" if transforms else f"that is the plan for {query.device.type} tensors"
    return Route("torch", why)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The body of torch.ops.attention_ext.sdpa."""
    scores = check_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    target, reason = route(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if _LOG.isEnabledFor(logging.INFO) and not torch.compiler.is_compiling():
        _LOG.info("sdpa on %s %s: %s, because %s", query.device.type, query.dtype, target, reason)
    if target == "torch":
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if target == "torch_math":
        bias = attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # beneath the public operator a mask is always added
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
        out: Tensor = torch.ops.aten._scaled_dot_product_attention_math.default(
            query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, scores)[0]
