"""The gradient of attention: autograd.Functions over the operators sdpa_forward and sdpa_backward."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._dispatch import Kernel, redispatch
from .._log import log_call, log_wanted
from .._torch_private import apply_without_transforms, keyset_of
from .._transforms import wraps
from .call import AttentionCall
from .limits import backward_kernel_name

__all__ = ["AttentionGrad", "attend", "log_backward", "record", "record_again"]

_FORWARD, _BACKWARD = torch.ops.attention_ext.sdpa_forward.default, torch.ops.attention_ext.sdpa_backward.default
_FORWARD_KERNEL, _BACKWARD_KERNEL = Kernel(_FORWARD), Kernel(_BACKWARD)
_BACKWARD_PLAN = Kernel(torch.ops.attention_ext.sdpa_backward_plan.default)

_NO_GRADS = (None,) * 7


class Passes(NamedTuple):
    """What both passes of a call tell their operators beside tensors. Calls that are alike share one.

    It is made before the forward pass: the backward pass runs in a thread whose caches are cold, where Python takes a few times as
    long.
    """

    flags: tuple[float, bool]  # dropout_p, is_causal
    forward: dict[str, Any]  # of each operator the arguments that it takes by name, but for key_lengths
    backward: dict[str, Any]
    scores: tuple[int, ...] | None  # as in AttentionCall, where operands are to be expanded
    plain: bool  # whether the operands of the forward pass are plain tensors on CUDA

    @classmethod
    def of(cls, call: AttentionCall, plain: bool = False) -> "Passes":
        forward = {name: value for name, value in call.options.items() if name != "key_lengths"}
        backward, expands = dict(forward), call.expanded() is not call
        if (name := backward_kernel_name(call.kernel_name)) != call.kernel_name:
            backward["kernel_name"] = name
        if expands and call.query.dtype.itemsize == 2:  # the parts of a gradient are summed before they are rounded
            backward["wide_grads"] = True
        return cls((call.dropout_p, call.is_causal), forward, backward, call.scores if expands else None, plain)

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.scores is None:
            return query, key, value
        grouped = self.forward.get("enable_gqa", False)
        return AttentionCall(query, key, value, enable_gqa=grouped, scores=self.scores).expanded()[:3]


class Attention(torch.autograd.Function):
    """sdpa_forward with a gradient. Leading dims broadcast here, so that the parts of a broadcast operand's gradient are summed
    before they are rounded to a half type.

    Without a setup_context, for which apply would read the signature of forward at each call.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, lengths: Tensor | None,
        passes: Passes,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        options = passes.forward if lengths is None else {**passes.forward, "key_lengths": lengths}
        arguments = (*passes.operands(query, key, value), mask, seed, *passes.flags)
        out, lse = (_FORWARD_KERNEL.on_cuda if passes.plain else _FORWARD_KERNEL)(*arguments, **options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, mask, seed, lengths, out, lse)
        ctx.passes = passes
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return _NO_GRADS
        query, key, value, mask, seed, lengths, out, lse = ctx.saved_tensors
        passes, needs = ctx.passes, ctx.needs_input_grad
        options = passes.backward
        if needs[3]:
            options = {**options, "mask_grad": True}
        if lengths is not None:
            options = {**options, "key_lengths": lengths}
        grad_out = torch.zeros_like(out) if grad_out is None else _with_rows(grad_out)
        arguments = (grad_out, grad_lse, *passes.operands(query, key, value), mask, out, lse, seed, *passes.flags)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            grads = _BACKWARD(*arguments, **options)
        else:  # spare the host what only a second derivative needs
            log_backward(*arguments, **options)
            grads = _BACKWARD_KERNEL(*arguments, **options)
        d_query, d_key, d_value, d_mask = grads
        if passes.scores is not None:
            d_query, d_key, d_value = _sum_to(d_query, query), _sum_to(d_key, key), _sum_to(d_value, value)
        return (
            d_query if needs[0] else None, d_key if needs[1] else None, d_value if needs[2] else None, d_mask if needs[3] else None,
            None, None, None,
        )  # fmt: skip


class AttentionGrad(torch.autograd.Function):
    """sdpa_backward where its results could be differentiated again."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *arguments: Any) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = _BACKWARD_KERNEL(*arguments, **options)
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
        kernel, reason = _BACKWARD_PLAN(*arguments, **options)
    else:
        asked = options.get("kernel_name", "auto") != "auto"
        kernel = "sdpa_backward" if query.is_cuda else "reference"
        reason = "kernel_name asked for it" if asked else f"that is the plan for {query.device.type} tensors"
    log_call("sdpa_backward", query, kernel, reason)


def _drawn_seed(query: Tensor) -> Tensor:
    """The seed of dropout, on the device. Like the query, so that next to DTensors it is a replicated one, the same on all ranks as
    every random DTensor is."""
    return torch.randint_like(query.new_empty(1, dtype=torch.int64), -(2**63), 2**63 - 1)


def record(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that check_attention has passed, with a gradient."""
    out, lse = Attention.apply(*call.tensors, Passes.of(call))
    return out, lse


def record_again(call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """The result, with a gradient, for other operands like those of this call, which are plain tensors on CUDA."""
    passes, drops = Passes.of(call, plain=True), call.dropout_p > 0.0

    def again(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = _apply(query, key, value, mask, _drawn_seed(query) if drops else None, None, passes)[0]
        return out

    return again


_apply = apply_without_transforms(Attention)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call without a seed through this package's kernels."""
    if call.dropout_p > 0.0:
        call = call._replace(seed=_drawn_seed(call.query))
    if call.needs_grad() or torch.compiler.is_compiling():
        return record(call)
    call = call.expanded()  # the same without what a gradient costs the host
    out, lse = redispatch(_FORWARD, keyset_of(call.differentiable), *call[:7], **call.options)
    return out, lse
