"""Where a call of sdpa or sdpa_with_lse goes: to this package's kernels, or to PyTorch's operators where that is the plan.

Only static properties decide (device, dtype, rank, head dim, flags, scale), never B, L or S: a branch on those would recompile
under torch.compile and break torch.export with dynamic shapes. What depends on lengths is decided inside sdpa_forward.
"""

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._autograd import attend, expand_leading
from ._bias import plain_mask, plain_result
from ._checks import check_attention, surely
from ._composed import attention_with_lse
from ._dispatch import call_kernel
from ._log import log_call, log_wanted
from ._transforms import forward_mode, why_composed, wraps

__all__ = ["Route", "kernel_plan", "log_kernel", "route", "route_with_lse", "sdpa", "sdpa_with_lse"]

_TORCH_SDPA = torch._C._nn.scaled_dot_product_attention  # not F's at the time of a call: sdpa may have been put in its place
_KERNELS = ("cuda",)  # device types that sdpa_forward serves in place of PyTorch's operator
_SMALLEST_FLOAT = 2.0**-149  # of float32
_MAX_RANK = 10  # of what the kernels take: eight leading dims, rows, columns


class Route(NamedTuple):
    """target: "torch" (PyTorch's operator), "torch_math" (its MATH back end or the same composition with the log-sum-exp) or
    "kernel" (sdpa_forward)."""

    target: str
    reason: str


def _distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor; there are none before torch.distributed.tensor has been imported."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def route(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Route:
    """Decides for inputs that check_attention has passed."""
    if forward_mode(query, key, value, attn_mask):
        return Route("torch_math", "forward-mode AD is open, which only PyTorch's MATH back end supports")
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    if any(transform.key() == torch._C._functorch.TransformType.Vmap for transform in transforms):
        return Route("torch_math", "a torch.func transform is active under vmap, which PyTorch's fused operators only loop over")
    if query.device.type in _KERNELS and not transforms:
        if max(query.dim(), key.dim(), value.dim()) > _MAX_RANK:
            return Route("torch_math", f"the kernels take operands of rank {_MAX_RANK} at most")
        return Route("kernel", f"sdpa_forward takes {query.device.type} tensors")
    if query.device.type == "cpu" and _distributed(query):
        return Route("kernel", "PyTorch's fused operator for CPU tensors has no gradient for a DTensor")
    if scale is not None and math.isnan(scale):
        return Route("torch_math", "PyTorch's fused operators hide a scale that is NaN")
    if is_causal and scale is not None and scale < _SMALLEST_FLOAT:
        return Route("torch_math", "PyTorch's fused operators give NaN for is_causal with a scale that is not positive in float32")
    width = query.size(-1)
    if isinstance(width, int) and width == 0:
        return Route("torch_math", "PyTorch's fused operators do not give the mean of the values for a head dim of 0")
    heads = query.size(-3) if query.dim() >= 3 else 1
    if isinstance(heads, int) and heads == 0:
        return Route("torch_math", "PyTorch's fused operators divide by the number of heads, in 2.10 also by 0")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return Route("torch_math", "PyTorch's fused operators want a mask of the query's dtype")
    if attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        return Route("torch_math", "PyTorch's fused operators have no gradient for the mask")
    why = "a torch.func transform is active" if transforms else f"that is the plan for {query.device.type} tensors"
    return Route("torch", why)


def route_with_lse(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Route:
    """The same for sdpa_with_lse, which PyTorch has no public operator for: sdpa_forward wherever it can."""
    if reason := why_composed(query, key, value, attn_mask):
        return Route("torch_math", reason)
    if query.device.type not in ("cpu", "cuda", "meta"):
        return Route("torch_math", f"there is no kernel for {query.device.type} tensors")
    if query.device.type in _KERNELS and max(query.dim(), key.dim(), value.dim()) > _MAX_RANK:
        return Route("torch_math", f"the kernels take operands of rank {_MAX_RANK} at most")
    return Route("kernel", f"sdpa_forward takes {query.device.type} tensors")


def _rows_apart(tensor: Tensor) -> Tensor:
    """A copy where the rows of a matrix overlap (stride 0, sliding windows): PyTorch's fused CPU operators then read garbage."""
    apart = not surely(tensor.stride(-1) == 1) or not surely(tensor.stride(-2) < tensor.size(-1))
    return tensor if apart else tensor.contiguous()


def _in_order_of(query: Tensor, out: Tensor) -> Tensor:
    """A result of PyTorch's operators as _reference.like_order lays one out; mostly it lies so already."""
    if query.dim() >= 3 and surely(query.stride(-3) < query.stride(-2)):
        return out.transpose(-3, -2).contiguous().transpose(-3, -2)
    return out.contiguous()


def kernel_plan(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool, scores: list[int], kernel_name: str = "auto", key_lengths: Tensor | None = None,
) -> tuple[str, str, int, bool]:  # fmt: skip
    """(kernel, reason, workspace, preferred) of a call of sdpa_forward: on CUDA from the code that chooses for the call itself."""
    if not query.is_cuda:
        return "reference", f"that is the plan for {query.device.type} tensors", 0, False
    if wraps(query):  # a DTensor, or one without data
        return "sdpa_forward", f"a kernel is chosen for what a {type(query).__name__} holds, not for itself", 0, False
    query, key, value = expand_leading(query, key, value, scores, enable_gqa)
    plan: tuple[str, str, int, bool] = call_kernel(
        torch.ops.attention_ext.sdpa_plan.default, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
        enable_gqa=enable_gqa, kernel_name=kernel_name, key_lengths=key_lengths,
    )  # fmt: skip
    return plan


def log_kernel(operator: str, query: Tensor, *rest: Any) -> None:
    """The log of a call of sdpa_forward; rest: the other arguments of kernel_plan."""
    if log_wanted():
        kernel, reason, *_ = kernel_plan(query, *rest)
        log_call(operator, query, kernel, reason)


def _torch_sdpa(
    target: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """PyTorch's operator, or its MATH back end."""
    if target == "torch":
        operands = (_rows_apart(query), _rows_apart(key), _rows_apart(value))
        out = _TORCH_SDPA(*operands, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return _in_order_of(query, out)
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # beneath the public operator a mask is always added
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    out = torch.ops.aten._scaled_dot_product_attention_math.default(
        query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return _in_order_of(query, out)


def sdpa(
    keyset: Any,
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
    given = attn_mask
    attn_mask, is_causal = plain_mask(attn_mask, query, key, is_causal)
    scores = check_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    target, reason = route(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    rest = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if target == "kernel":
        log_kernel("sdpa", query, key, value, *rest, scores)
        out = attend(keyset, query, key, value, *rest, scores)[0]
    else:  # PyTorch's operators broadcast some operands and not others: those of no rows, the mask next to them
        log_call("sdpa", query, target, reason)
        query, key, value = expand_leading(query, key, value, scores, enable_gqa)
        out = _torch_sdpa(target, query, key, value, *rest)
    return out if attn_mask is given else plain_result(out)


def sdpa_with_lse(
    keyset: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """The body of torch.ops.attention_ext.sdpa_with_lse."""
    given = attn_mask
    attn_mask, is_causal = plain_mask(attn_mask, query, key, is_causal)
    scores = check_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    target, reason = route_with_lse(query, key, value, attn_mask)
    rest = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if target == "kernel":
        log_kernel("sdpa_with_lse", query, key, value, *rest, scores)
        out, lse = attend(keyset, query, key, value, *rest, scores)
    else:
        log_call("sdpa_with_lse", query, target, reason)
        out, lse = attention_with_lse(query, key, value, *rest)
        out = _in_order_of(query, out)
    return (out, lse) if attn_mask is given else (plain_result(out), plain_result(lse))
