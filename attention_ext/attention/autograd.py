"""The gradient of attention: autograd.Functions over the operators sdpa_forward and sdpa_backward."""

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._dispatch import call_kernel, redispatch
from .._log import log_call, log_wanted
from .._torch_private import keyset_of
from .._transforms import wraps
from .call import AttentionCall
from .limits import backward_kernel_name

__all__ = ["Attention", "AttentionGrad", "attend", "log_backward"]

_FORWARD, _BACKWARD = torch.ops.attention_ext.sdpa_forward.default, torch.ops.attention_ext.sdpa_backward.default

_NO_GRADS = (None,) * (len(AttentionCall._fields) - 4)  # of what follows the mask


class Attention(torch.autograd.Function):
    """sdpa_forward with a gradient, of the fields of an AttentionCall. Leading dims broadcast here, so that the parts of a
    broadcast operand's gradient are summed before they are rounded to a half type.

    Without a setup_context, for which apply would read the signature of forward at each call.
    """

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        call = AttentionCall(*fields)
        whole = call.expanded()
        out, lse = call_kernel(_FORWARD, *whole[:7], **whole.options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*call.tensors, out, lse)
        ctx.rest = call.rest
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        given = AttentionCall.of(tensors, ctx.rest)
        if grad_out is None and grad_lse is None:
            return (*(None,) * 4, *_NO_GRADS)
        call, needs = given.expanded(), ctx.needs_input_grad
        summed = call.query.dtype.itemsize == 2 and call is not given
        kernel_name = backward_kernel_name(call.kernel_name)
        options = call.options | ({} if kernel_name == call.kernel_name else {"kernel_name": kernel_name})
        options |= {name: True for name, wanted in (("mask_grad", needs[3]), ("wide_grads", summed)) if wanted}
        backward: Any = _BACKWARD
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):  # spare the host what only a second derivative needs
            backward = partial(call_kernel, backward)
        grad_out = torch.zeros_like(out) if grad_out is None else _with_rows(grad_out)
        arguments = (grad_out, grad_lse, *call[:4], out, lse, *call[4:7])
        log_backward(*arguments, **options)
        grads = backward(*arguments, **options)
        if call is not given:
            grads = [*(_sum_to(grad, t) for grad, t in zip(grads, given[:3], strict=False)), grads[3]]
        return (*[grad if need else None for grad, need in zip(grads, needs, strict=False)], *_NO_GRADS)


class AttentionGrad(torch.autograd.Function):
    """sdpa_backward where its results could be differentiated again."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *arguments: Any) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = call_kernel(_BACKWARD, *arguments, **options)
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "attention_ext: double backward through sdpa is not supported; use torch.nn.functional.scaled_dot_product_attention "
            "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )


def _sum_to(grad: Tensor, operand: Tensor) -> Tensor:
    """The gradient of an operand from that of its expanded view."""
    if grad.shape != operand.shape:
        grad = grad.sum_to_size(operand.shape)
    return grad.to(operand.dtype)


def _with_rows(grad_out: Tensor) -> Tensor:
    """A copy of the gradient of a sum, one number that all strides of 0 repeat: kernels that load whole rows then take it."""
    return grad_out.contiguous() if grad_out.is_cuda and grad_out.dtype.itemsize == 2 and grad_out.stride(-1) == 0 else grad_out


def log_backward(*arguments: Any, **options: Any) -> None:
    """The log of a call of sdpa_backward."""
    if not log_wanted():
        return
    query = arguments[2]
    if query.is_cuda and not wraps(query):  # the code that chooses for the call itself
        kernel, reason = call_kernel(torch.ops.attention_ext.sdpa_backward_plan.default, *arguments, **options)
    else:
        asked = options.get("kernel_name", "auto") != "auto"
        kernel = "sdpa_backward" if query.is_cuda else "reference"
        reason = "kernel_name asked for it" if asked else f"that is the plan for {query.device.type} tensors"
    log_call("sdpa_backward", query, kernel, reason)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call without a seed through this package's kernels; draws the seed of dropout on the device."""
    if call.dropout_p > 0.0:
        # Like the query, so that next to DTensors it is a replicated one, the same on all ranks as every random DTensor is.
        seed = torch.randint_like(call.query.new_empty(1, dtype=torch.int64), -(2**63), 2**63 - 1)
        call = call._replace(seed=seed)
    if call.needs_grad() or torch.compiler.is_compiling():
        out, lse = Attention.apply(*call)
    else:  # the same without what a gradient costs the host
        call = call.expanded()
        out, lse = redispatch(_FORWARD, keyset_of(call.differentiable), *call[:7], **call.options)
    return out, lse
