"""Where a call of sdpa or sdpa_with_lse goes: to this package's kernels, or to PyTorch's operators where that is the plan.

Where a call is traced, only what holds for all sizes that the program is for decides, and nothing adds a guard: that would
recompile under torch.compile and break torch.export with dynamic shapes. What else depends on lengths, sdpa_forward decides.
"""

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import Kernel
from .._log import log_call, log_wanted
from .._torch_private import transforms, within_vmap
from .._transforms import forward_mode, why_composed, wraps
from .autograd import attend
from .bias import plain_mask, plain_result
from .call import AttentionCall
from .checks import check_attention
from .choice import BACK_ENDS
from .composed import attention_with_lse
from .layout import in_order_of
from .limits import MAX_BATCH_DIMS
from .recall import Arguments, recall, sample
from .run import execute, shortest
from .torch_cuda import choose, name_of, workspace

__all__ = ["Route", "checked", "described", "log_kernel", "route", "route_with_lse", "sdpa", "sdpa_with_lse"]

_PLAN = Kernel(torch.ops.attention_ext.sdpa_plan.default)
_KERNELS = ("cuda",)  # device types that sdpa_forward serves in place of PyTorch's operator
_SMALLEST_FLOAT = 2.0**-149  # of float32
_MAX_RANK = MAX_BATCH_DIMS + 2


class Route(NamedTuple):
    """target: "torch" (PyTorch's operator), one of BACK_ENDS (on CUDA), "torch_math" (its MATH back end or the same composition
    with the log-sum-exp) or "kernel" (sdpa_forward). reason: of "kernel" for sdpa on CUDA, why no back end."""

    target: str
    reason: str


def _distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor; there are none before torch.distributed.tensor has been imported."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def _of_kernel(call: AttentionCall) -> Route:
    if call.query.device.type in _KERNELS and max(t.dim() for t in call[:3]) > _MAX_RANK:
        return Route("torch_math", f"the kernels take operands of rank {_MAX_RANK} at most")
    return Route("kernel", f"sdpa_forward takes {call.query.device.type} tensors")


def route(call: AttentionCall) -> Route:
    """Decides for a call that check_attention has passed."""
    query, mask, scale = call.query, call.attn_mask, call.scale
    if forward_mode(*call.differentiable):
        return Route("torch_math", "forward-mode AD is open, which only PyTorch's MATH back end supports")
    active = transforms()
    if within_vmap(active):
        return Route("torch_math", "a torch.func transform is active under vmap, which PyTorch's fused operators only loop over")
    if query.device.type in _KERNELS and not active:
        own = _of_kernel(call)
        if own.target != "kernel":
            return own
        back_end, why = choose(call)
        return Route(back_end or "kernel", why)
    if query.device.type == "cpu" and _distributed(query):
        return Route("kernel", "PyTorch's fused operator for CPU tensors has no gradient for a DTensor")
    if scale is not None and math.isnan(scale):
        return Route("torch_math", "PyTorch's fused operators hide a scale that is NaN")
    if call.is_causal and scale is not None and scale < _SMALLEST_FLOAT:
        return Route("torch_math", "PyTorch's fused operators give NaN for is_causal with a scale that is not positive in float32")
    width = query.size(-1)
    if isinstance(width, int) and width == 0:
        return Route("torch_math", "PyTorch's fused operators do not give the mean of the values for a head dim of 0")
    heads = query.size(-3) if query.dim() >= 3 else 1
    if isinstance(heads, int) and heads == 0:
        return Route("torch_math", "PyTorch's fused operators divide by the number of heads, in 2.10 also by 0")
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        return Route("torch_math", "PyTorch's fused operators want a mask of the query's dtype")
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return Route("torch_math", "PyTorch's fused operators have no gradient for the mask")
    why = "a torch.func transform is active" if active else f"that is the plan for {query.device.type} tensors"
    return Route("torch", why)


def route_with_lse(call: AttentionCall) -> Route:
    """The same for sdpa_with_lse, which PyTorch has no public operator for: sdpa_forward wherever it can."""
    if reason := why_composed(*call.differentiable):
        return Route("torch_math", reason)
    if call.query.device.type not in ("cpu", "cuda", "meta"):
        return Route("torch_math", f"there is no kernel for {call.query.device.type} tensors")
    return _of_kernel(call)


def _kernel_plan(call: AttentionCall) -> tuple[str, str, int, bool]:
    """(kernel, reason, workspace, preferred) of a call of sdpa_forward: on CUDA from the code that chooses for the call itself."""
    query = call.query
    if not query.is_cuda:
        return "reference", f"that is the plan for {query.device.type} tensors", 0, False
    if wraps(query):  # a DTensor, or one without data
        return "sdpa_forward", f"a kernel is chosen for what a {type(query).__name__} holds, not for itself", 0, False
    call = call.expanded()
    plan: tuple[str, str, int, bool] = _PLAN(*call.differentiable, call.dropout_p, call.is_causal, **call.options)
    return plan


def described(call: AttentionCall, chosen: Route) -> tuple[str, str, int, bool]:
    """(kernel, reason, workspace, preferred) of a call of sdpa: what its route comes to."""
    if chosen.target in BACK_ENDS:
        return name_of(chosen.target, call), chosen.reason, workspace(chosen.target, call), False
    if chosen.target != "kernel":
        return chosen.target, chosen.reason, 0, False
    kernel, reason, taken, preferred = _kernel_plan(call)
    if call.query.is_cuda:
        reason = f"{reason}; PyTorch's operator does not run: {chosen.reason}"
    return kernel, reason, taken, preferred


def log_kernel(operator: str, call: AttentionCall) -> None:
    """The log of a call that sdpa_forward serves whatever PyTorch's operator is like."""
    if log_wanted():
        kernel, reason, *_ = _kernel_plan(call)
        log_call(operator, call.query, kernel, reason)


def checked(*arguments: Any, **options: Any) -> tuple[AttentionCall, bool]:
    """The call that the arguments of sdpa make, checked, and whether its mask is the one that was given."""
    call = AttentionCall.of_router(*arguments, **options)
    mask, is_causal = plain_mask(call.attn_mask, call.query, call.key, call.is_causal)
    same = mask is call.attn_mask
    return check_attention(call if same else call._replace(attn_mask=mask, is_causal=is_causal)), same


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The body of torch.ops.attention_ext.sdpa."""
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    run = recall(arguments)
    return _sdpa_anew(arguments) if run is None else run(arguments)


def _sdpa_anew(arguments: Arguments) -> Tensor:
    this = sample(arguments)
    *positional, scale, enable_gqa = arguments
    call, mask_is_plain = checked(*positional, scale=scale, enable_gqa=enable_gqa)
    chosen = route(call)
    this.keep(lambda: shortest(chosen.target, call))
    if log_wanted():
        kernel, reason, *_ = described(call, chosen)
        log_call("sdpa", call.query, kernel, reason)
    out = execute(chosen.target, call)
    return out if mask_is_plain else plain_result(out)


def sdpa_with_lse(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The body of torch.ops.attention_ext.sdpa_with_lse."""
    call, mask_is_plain = checked(*arguments, **options)
    target, reason = route_with_lse(call)
    if target == "kernel":
        log_kernel("sdpa_with_lse", call)
        out, lse = attend(call)
    else:
        log_call("sdpa_with_lse", call.query, target, reason)
        out, lse = attention_with_lse(call)
        out = in_order_of(call.query, out)
    return (out, lse) if mask_is_plain else (plain_result(out), plain_result(lse))
