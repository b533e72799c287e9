"""The layout of a result, (..., H, L, E): in memory as (..., L, H, E) where the operand it goes with lies so, else contiguous.

csrc/binding/tensors.h has the same rule for the results of the kernels.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._checks import accumulator, surely
from .call import AttentionCall

__all__ = ["empty_grads", "empty_results", "heads_inside_rows", "in_order_of"]


def heads_inside_rows(like: Tensor) -> bool:
    return like.dim() >= 3 and surely(like.stride(-3) < like.stride(-2))


def _empty(like: Tensor, shape: Sequence[int], **options: Any) -> Tensor:
    """An empty result of this shape; options: those of Tensor.new_empty."""
    if len(shape) >= 3 and heads_inside_rows(like):
        *leading, heads, length, width = shape
        return like.new_empty([*leading, length, heads, width], **options).transpose(-3, -2)
    return like.new_empty(shape, **options)


def in_order_of(like: Tensor, out: Tensor) -> Tensor:
    """A result that PyTorch's operators have laid out; mostly it lies so already."""
    return out.transpose(-3, -2).contiguous().transpose(-3, -2) if heads_inside_rows(like) else out.contiguous()


def empty_results(call: AttentionCall, **options: Any) -> tuple[Tensor, Tensor]:
    """The empty output (..., Hq, L, Ev) and log-sum-exp (..., Hq, L) of a call."""
    rows, query = call.scores[:-1], call.query
    out = _empty(query, [*rows, call.value.size(-1)], **options)
    return out, query.new_empty(rows, dtype=accumulator(query.dtype), **options)


def empty_grads(call: AttentionCall, mask_grad: bool, wide_grads: bool, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The empty gradients of query, key, value and, if mask_grad, mask (else of no elements).

    wide_grads: the first three come as they are summed, in float32 (float64 for float64).
    """
    query, key, value, mask = call.differentiable
    dtype = accumulator(query.dtype) if wide_grads else query.dtype
    d_query, d_key, d_value = (_empty(t, t.shape, dtype=dtype, **options) for t in (query, key, value))
    d_mask = _empty(mask, mask.shape, **options) if mask is not None and mask_grad else query.new_empty(0, **options)
    return d_query, d_key, d_value, d_mask
