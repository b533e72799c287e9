"""Runs a call on the route that router.py has found, and knows the shortest way to run the next call like it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .._checks import surely
from .._dispatch import Kernel
from .._torch_private import chosen_by_torch, math_attention, torch_sdpa
from . import torch_cuda
from .autograd import attend, record_again
from .call import AttentionCall
from .choice import BACK_ENDS
from .layout import empty_results, heads_inside_rows, in_order_of
from .recall import Arguments, Run

__all__ = ["execute", "shortest"]

_OUT = Kernel(torch.ops.attention_ext._sdpa_out.default)


def _rows_apart(tensor: Tensor) -> Tensor:
    """A copy where the rows of a matrix overlap (stride 0, sliding windows): PyTorch's fused CPU operators then read garbage."""
    apart = not surely(tensor.stride(-1) == 1) or not surely(tensor.stride(-2) < tensor.size(-1))
    return tensor if apart else tensor.contiguous()


def _torch_sdpa(target: str, call: AttentionCall) -> Tensor:
    """PyTorch's operator, or its MATH back end. They broadcast some operands and not others: those of no rows, the mask next to
    them."""
    call = call.expanded()
    query, key, value, mask = call.differentiable
    if target == "torch":
        call = AttentionCall(_rows_apart(query), _rows_apart(key), _rows_apart(value), *call[3:])
        return in_order_of(query, call.through(torch_sdpa))
    if mask is not None and mask.dtype == torch.bool:  # beneath the public operator a mask is always added
        call = call._replace(attn_mask=torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf))
    return in_order_of(query, call.through(math_attention)[0])


def execute(target: str, call: AttentionCall) -> Tensor:
    """The result of a call that check_attention has passed."""
    if target == "kernel":
        return attend(call)[0]
    if target in BACK_ENDS:
        return in_order_of(call.query, torch_cuda.run(target, call))
    return _torch_sdpa(target, call)


def _taken_by_torch(target: str, call: AttentionCall) -> bool:
    """Whether PyTorch's operator runs the target by itself, which costs the host less than a back end called by name."""
    if target in ("flash", "efficient") and call.attn_mask is None and call.dropout_p == 0.0 and not call.enable_gqa:
        return chosen_by_torch(*call[:3], None, 0.0, call.is_causal, scale=call.scale) == target
    return target in ("torch", "cudnn")


def shortest(target: str, call: AttentionCall) -> Run:
    """What runs the next call of the same facts (recall.py) as this one, which is checked and has its route."""
    strides, scores = empty_results(call, device="meta")[0].stride(), call.scores

    def by_rows(out: Tensor) -> Tensor:
        return out if out.stride() == strides else out.transpose(-3, -2).contiguous().transpose(-3, -2)

    in_order: Callable[[Tensor], Tensor] = by_rows if heads_inside_rows(call.query) else Tensor.contiguous

    def anyhow(arguments: Arguments) -> Tensor:
        return execute(target, AttentionCall(*arguments[:4], None, *arguments[4:], scores=scores))

    def by_kernel(arguments: Arguments) -> Tensor:
        query, key, value, mask, _, causal, scale, grouped = arguments
        out: Tensor = _OUT.on_cuda(query, key, value, mask, causal, scale, grouped)
        return out

    def by_torch(arguments: Arguments) -> Tensor:
        *positional, scale, grouped = arguments
        return in_order(torch_sdpa(*positional, scale=scale, enable_gqa=grouped))

    def by_torch_with_defaults(arguments: Arguments) -> Tensor:
        query, key, value = arguments[:3]  # it takes a while to read five more arguments
        return in_order(torch_sdpa(query, key, value))

    if target == "kernel" and call.query.is_cuda and call.needs_grad():
        again = record_again(call)
        return lambda arguments: again(*arguments[:4])
    if call.expanded() is not call:
        return anyhow
    if target == "kernel":
        return by_kernel if call.query.is_cuda and call.dropout_p == 0.0 else anyhow
    as_they_are = all(t is _rows_apart(t) for t in call[:3]) if target == "torch" else all(t.dim() == 4 for t in call[:3])
    if not as_they_are or not _taken_by_torch(target, call):
        return anyhow
    return by_torch_with_defaults if call[3:9] == (None, None, 0.0, False, None, False) else by_torch
