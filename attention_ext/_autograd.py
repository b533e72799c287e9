"""The gradient of attention: one autograd.Function over the operators sdpa_forward and sdpa_backward."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._dispatch import call_kernel, redispatch
from ._limits import backward_kernel_name
from ._log import log_call

__all__ = ["Attention", "attend", "expand_leading", "log_backward"]

_WORKSPACE_BYTES = 134217728


class Attention(torch.autograd.Function):
    """sdpa_forward with a gradient. Leading dims of query, key and value broadcast here, so that the parts of a broadcast operand's
    gradient are summed before they are rounded to a half type."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        seed: Tensor | None,
        scores: list[int],
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        allow_tf32: bool,
        deterministic: bool,
        workspace_bytes: int,
        kernel_name: str,
        key_lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        query, key, value = expand_leading(query, key, value, scores, enable_gqa)
        out, lse = call_kernel(
            torch.ops.attention_ext.sdpa_forward.default, query, key, value, attn_mask, seed, dropout_p, is_causal, scale=scale,
            enable_gqa=enable_gqa, allow_tf32=allow_tf32, workspace_bytes=workspace_bytes, kernel_name=kernel_name,
            key_lengths=key_lengths,
        )  # fmt: skip
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, attn_mask, seed, *ctx.options, key_lengths = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, attn_mask, *output, seed, key_lengths)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, attn_mask, out, lse, seed, key_lengths = ctx.saved_tensors
        scores, dropout_p, is_causal, scale, enable_gqa, allow_tf32, deterministic, workspace_bytes, kernel_name = ctx.options
        if grad_out is None and grad_lse is None:
            return (None,) * 15
        own = (query, key, value)
        full = expand_leading(*own, scores, enable_gqa)
        summed = query.dtype.itemsize == 2 and any(t is not f for t, f in zip(own, full, strict=True))
        name = backward_kernel_name(kernel_name)
        log_backward(query, name)
        backward: Any = torch.ops.attention_ext.sdpa_backward.default
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):  # spare the host what only a second derivative needs
            backward = partial(call_kernel, backward)
        grads = backward(
            torch.zeros_like(out) if grad_out is None else grad_out, grad_lse, *full, attn_mask, out, lse, seed, dropout_p,
            is_causal, scale=scale, enable_gqa=enable_gqa, allow_tf32=allow_tf32, deterministic=deterministic,
            mask_grad=ctx.needs_input_grad[3], wide_grads=summed, workspace_bytes=workspace_bytes, kernel_name=name,
            key_lengths=key_lengths,
        )  # fmt: skip
        grads = [*(_sum_to(grad, t) for grad, t in zip(grads, own, strict=False)), grads[3]]
        wanted = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
        return (*wanted, *(None,) * 11)


def _sum_to(grad: Tensor, operand: Tensor) -> Tensor:
    """The gradient of an operand from that of its expanded view."""
    if grad.shape != operand.shape:
        grad = grad.sum_to_size(operand.shape)
    return grad.to(operand.dtype)


def log_backward(query: Tensor, kernel_name: str) -> None:
    reason = "it is the only kernel with a gradient" if kernel_name == "auto" else "kernel_name asked for it"
    log_call("sdpa_backward", query, "pipeline" if query.is_cuda else "reference", reason)


def expand_leading(query: Tensor, key: Tensor, value: Tensor, scores: list[int], enable_gqa: bool) -> tuple[Tensor, ...]:
    """Views of the operands with the leading dims of the scores (..., Hq, L, S); grouped heads stay as they are."""
    tail = 3 if enable_gqa else 2
    leading = scores[: len(scores) - tail]
    return tuple(t if list(t.shape[:-tail]) == leading else t.expand(*leading, *t.shape[-tail:]) for t in (query, key, value))


def attend(
    keyset: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    scores: list[int],
) -> tuple[Tensor, Tensor]:
    """(out, lse) through this package's kernels; draws the seed of dropout on the device and reads PyTorch's flags. The keyset is
    that of the router.

    allow_tf32 is False whatever PyTorch's setting is: no kernel rounds to TF32, and some releases raise where the setting is read.
    """
    seed = None
    if dropout_p > 0.0:
        # Like the query, so that beside DTensors it is a replicated one, the same on all ranks as every random DTensor is.
        seed = torch.randint_like(query.new_empty(1, dtype=torch.int64), -(2**63), 2**63 - 1)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, attn_mask))
    if not wanted and not torch.compiler.is_compiling():  # the same without what a gradient costs the host
        query, key, value = expand_leading(query, key, value, scores, enable_gqa)
        out, lse = redispatch(
            torch.ops.attention_ext.sdpa_forward.default, keyset, query, key, value, attn_mask, seed, dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return out, lse
    out, lse = Attention.apply(
        query, key, value, attn_mask, seed, scores, dropout_p, is_causal, scale, enable_gqa,
        False, torch.are_deterministic_algorithms_enabled(), _WORKSPACE_BYTES, "auto", None,
    )  # fmt: skip
    return out, lse
