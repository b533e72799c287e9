"""Attention over disjoint sets of keys, put together from each set's output and log-sum-exp."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import DTYPES, accumulator, check_shape, refuse, shape_of
from .._overrides import handle_torch_function, overridden

__all__ = ["merge_partials"]


def _overridable(outs: Any, lses: Any) -> tuple[Any, ...]:
    """What may have a __torch_function__ of its own: the tensors, or a whole sequence, which may be one proxy of torch.fx."""
    return (*(outs if isinstance(outs, (list, tuple)) else (outs,)), *(lses if isinstance(lses, (list, tuple)) else (lses,)))


def _tensors(name: str, given: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(given, Tensor) or not isinstance(given, Sequence):
        refuse(name, "a sequence of tensors", type(given).__name__)
    if not given:
        refuse(name, "at least one tensor", "none")
    for index, tensor in enumerate(given):
        if not isinstance(tensor, Tensor):
            refuse(f"{name}[{index}]", "a tensor", type(tensor).__name__)
    return list(given)


def _check(outs: list[Tensor], lses: list[Tensor]) -> torch.dtype:
    first = outs[0]
    if len(lses) != len(outs):
        refuse("lses", f"as many tensors as outs, {len(outs)}", len(lses))
    if first.dtype not in DTYPES:
        refuse("outs[0]", "dtype float16, bfloat16, float32 or float64", first.dtype)
    if first.dim() < 2:
        refuse("outs[0]", "rank 2 or more", f"{shape_of(first)} of rank {first.dim()}")
    acc = accumulator(first.dtype)
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_shape(f"outs[{index}]", out, first.shape, first.dtype, first.device)
        check_shape(f"lses[{index}]", lse, first.shape[:-1], acc, first.device)
    return acc


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys from the results of sdpa_with_lse over each of them.

    out = sum_i exp(lse_i - lse) out_i,  lse = log(sum_i exp(lse_i))

    Args:
        outs: one or more tensors (..., L, Ev) of one shape, device and dtype: float16, bfloat16, float32 or float64.
        lses: as many tensors (..., L), float32 (float64 beside float64): the natural log-sum-exp of each row's scores, -inf
            where the row has no visible key in that part. What `out` holds in such a row does not matter, be it NaN.

    Returns:
        out (..., L, Ev) in the dtype of `outs`, summed in float32 (float64 for float64), and lse (..., L). A row that is dead in
        every part gives 0 and -inf, with zero gradients. Both are differentiable with respect to every input, any number of times;
        a part adds nothing to a row, and gets zero gradients from it, where its log-sum-exp is -inf. A log-sum-exp of NaN or +inf
        makes its row NaN.

    Raises:
        RuntimeError: an input that is refused; the message names the argument, what was expected and what came.

    Dropout of the parts is dropout of the whole, since a log-sum-exp is taken before it. The identity is that of the online
    softmax: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; over splits of the keys it is the last
    step of Flash-Decoding (Dao, Haziza, Massa and Sizov 2023).
    """
    overridable = _overridable(outs, lses)
    if overridden(*overridable):
        merged: tuple[Tensor, Tensor] = handle_torch_function(merge_partials, overridable, outs, lses)
        return merged
    outs, lses = _tensors("outs", outs), _tensors("lses", lses)
    acc = _check(outs, lses)
    top = torch.stack([lse.detach() for lse in lses]).amax(0)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = [torch.exp(lse - top) for lse in lses]
    total = torch.stack(weights).sum(0)
    dead = total == 0.0
    total = total.masked_fill(dead, 1.0)  # before the logarithm and the division, whose derivatives at 0 are not finite
    merged_out = outs[0].new_zeros((), dtype=acc)
    for out, lse, weight in zip(outs, lses, weights, strict=True):
        out = out.masked_fill((lse == -math.inf).unsqueeze(-1), 0.0)  # before the product: 0 * NaN is NaN, in its derivative too
        merged_out = torch.addcmul(merged_out, (weight / total).unsqueeze(-1), out)
    return merged_out.to(outs[0].dtype), (total.log() + top).masked_fill(dead, -math.inf)


merge_partials.__module__ = "attention_ext"  # where a traced and stored graph looks for it
