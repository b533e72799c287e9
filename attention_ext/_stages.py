"""The pipeline's stages as operators of their own, for tests, timing and teaching: their CPU path, fake kernels and checks.

    qk_scores       scale * Q K^T + mask, -inf where a key is not visible
    row_softmax     exp(scores - row maximum), its row sums before rounding, the log-sum-exp: softmax = weights / row_sum
    scores_values   weights @ value / row_sum

None of them has a gradient; an input that requires grad is refused.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ._checks import check_attention, check_dense, check_heads, check_operand, check_shape, message, refuse, shape_of, surely
from ._dispatch import redispatch, register_kernel_calls
from ._libraries import check_cuda_library
from ._limits import check_limits, contiguous
from ._reference import Problem, below_autocast

__all__ = ["register"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_scores(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> list[int]:  # fmt: skip
    shape = check_attention(query, key, key, attn_mask, 0.0, is_causal, enable_gqa)
    if query.device.type == "cuda":
        inputs = {"query": (query, 2), "key": (key, 2), "attn_mask": (attn_mask, 2)}
        check_limits(inputs, lambda: [(contiguous(shape), 2)], shape[:-2], enable_gqa)
    return shape


def _scores_fake(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    shape = _check_scores(query, key, attn_mask, is_causal, enable_gqa=enable_gqa)
    return query.new_empty(shape, dtype=_accumulator(query.dtype))


def _scores_cpu(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    shape = _check_scores(query, key, attn_mask, is_causal, enable_gqa=enable_gqa)
    problem = Problem(query, key, key, attn_mask, None, 0.0, is_causal, scale, shape, 0)
    with below_autocast():
        return problem.scores(range(problem.L)).contiguous()


def _check_softmax(scores: Tensor, *, dtype: str = "float32") -> torch.dtype:
    check_dense("scores", scores)
    check_cuda_library(scores.device, "scores")
    if dtype not in _DTYPES:
        refuse("dtype", f"one of {', '.join(_DTYPES)}", repr(dtype))
    wide = _accumulator(_DTYPES[dtype])
    if scores.dim() < 2 or scores.dtype != wide:
        refuse("scores", f"rank 2 or more and {wide} for {dtype} weights", f"{shape_of(scores)}, {scores.dtype}")
    if scores.device.type == "cuda":
        rows = scores.shape[:-1]
        check_limits(
            {"scores": (scores, 2)},
            lambda: [(contiguous(scores.shape), 2), (contiguous(rows), 1), (contiguous(rows), 1)],
            scores.shape[:-2],
        )
    return _DTYPES[dtype]


def _softmax_fake(scores: Tensor, *, dtype: str = "float32") -> tuple[Tensor, Tensor, Tensor]:
    weights = scores.new_empty(scores.shape, dtype=_check_softmax(scores, dtype=dtype))
    return weights, scores.new_empty(scores.shape[:-1]), scores.new_empty(scores.shape[:-1])


def _softmax_cpu(scores: Tensor, *, dtype: str = "float32") -> tuple[Tensor, Tensor, Tensor]:
    out = _check_softmax(scores, dtype=dtype)
    top = scores.amax(-1, keepdim=True) if scores.size(-1) else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1)
    return weights.to(out).contiguous(), total, total.log() + top.squeeze(-1)


def _check_values(weights: Tensor, row_sum: Tensor, value: Tensor, *, enable_gqa: bool = False) -> list[int]:
    tail = 3 if enable_gqa else 2
    check_operand("weights", weights, weights, tail)
    check_cuda_library(weights.device, "weights")
    check_operand("value", value, weights, tail, "weights'")
    check_shape("row_sum", row_sum, list(weights.shape[:-1]), _accumulator(weights.dtype), weights.device)
    S = weights.size(-1)
    torch._check(
        value.size(-2) == S,
        lambda: message("value", f"the weights' last size S = {S} as its second to last size", shape_of(value)),
    )
    if enable_gqa:
        check_heads("value", value, weights, "weights'")
    leading, own = weights.shape[:-tail], value.shape[:-tail]
    want = f"leading dimensions that broadcast to the weights' {shape_of(weights)}"
    if len(own) > len(leading):
        refuse("value", want, shape_of(value))
    for size, target in zip(reversed(own), reversed(leading), strict=False):
        if not surely(size == 1):
            torch._check(size == target, lambda: message("value", want, shape_of(value)))
    shape = [*weights.shape[:-1], value.size(-1)]
    if weights.device.type == "cuda":
        inputs = {"weights": (weights, 2), "row_sum": (row_sum, 1), "value": (value, 2)}
        check_limits(inputs, lambda: [(contiguous(shape), 2)], shape[:-2], enable_gqa)
    return shape


def _values_fake(weights: Tensor, row_sum: Tensor, value: Tensor, *, enable_gqa: bool = False) -> Tensor:
    return value.new_empty(_check_values(weights, row_sum, value, enable_gqa=enable_gqa))


def _values_cpu(weights: Tensor, row_sum: Tensor, value: Tensor, *, enable_gqa: bool = False) -> Tensor:
    _check_values(weights, row_sum, value, enable_gqa=enable_gqa)
    query = weights.new_empty((*weights.shape[:-1], 0))
    problem = Problem(query, value[..., :0], value, None, None, 0.0, False, None, list(weights.shape), 0)
    total = row_sum.unsqueeze(-1)
    with below_autocast():
        product = problem.product(weights.to(problem.acc), problem.value)
    return (product / total.masked_fill(total == 0.0, 1.0)).to(value.dtype).contiguous()


def _checked(name: str, check: Any) -> Any:
    """What stands before the kernels of every device: the checks, and the refusal of gradients."""
    operator = getattr(torch.ops.attention_ext, name).default
    arguments = [argument.name for argument in operator._schema.arguments]

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        for argument, tensor in zip(arguments, args, strict=False):
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                got = f"one that does: {name} has no gradient, sdpa has one"
                refuse(argument, "a tensor that does not require grad", got)
        return redispatch(operator, keyset, *args, **kwargs)

    return call


def register(library: torch.library.Library) -> None:
    """Registers the CPU path, the fake kernels, the checks and the refusal of gradients."""
    for name, check, cpu, fake in (
        ("qk_scores", _check_scores, _scores_cpu, _scores_fake),
        ("row_softmax", _check_softmax, _softmax_cpu, _softmax_fake),
        ("scores_values", _check_values, _values_cpu, _values_fake),
    ):
        register_kernel_calls(library, getattr(torch.ops.attention_ext, name).default)
        library.impl(name, cpu, "CPU")
        library.impl(name, _checked(name, check), "Autograd", with_keyset=True)
        torch.library.register_fake(f"attention_ext::{name}", fake, lib=library)
