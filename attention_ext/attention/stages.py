"""The pipeline's stages as operators of their own, for tests, timing and teaching: their CPU path, fake kernels and checks.

    qk_scores       scale * Q K^T + mask, -inf where a key is not visible
    row_softmax     exp(scores - row maximum), its row sums before rounding, the log-sum-exp: softmax = weights / row_sum
    scores_values   weights @ value / row_sum

None of them has a gradient; an input that requires grad is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import accumulator, check_dense, check_shape, refuse, refuse_unless, shape_of, surely
from .._dispatch import redispatch, register_operator
from .._libraries import check_cuda_library
from .._log import log_call
from .._torch_private import argument_names
from .._transforms import below_autocast
from .call import AttentionCall
from .checks import check_attention, check_heads, check_operand
from .limits import check_limits
from .reference import Problem, softmax_parts

__all__ = ["register"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def _meta(like: Tensor, *shapes: Sequence[int]) -> Callable[[], list[tuple[Tensor, int]]]:
    """Results of these shapes, matrices and then rows, without memory: for check_limits."""
    return lambda: [(like.new_empty(shape, device="meta"), 1 if i else 2) for i, shape in enumerate(shapes)]


def _check_scores(query: Tensor, key: Tensor, attn_mask: Tensor | None = None, *flags: Any, **options: Any) -> AttentionCall:
    call = check_attention(AttentionCall(query, key, key, attn_mask, None, 0.0, *flags, **options))
    if query.device.type == "cuda":
        inputs = {"query": (query, 2), "key": (key, 2), "attn_mask": (attn_mask, 2)}
        check_limits(inputs, _meta(query, call.scores), call.scores[:-2], call.enable_gqa)
    return call


def _scores_fake(query: Tensor, *rest: Any, **options: Any) -> Tensor:
    return query.new_empty(_check_scores(query, *rest, **options).scores, dtype=accumulator(query.dtype))


def _scores_cpu(*arguments: Any, **options: Any) -> Tensor:
    problem = Problem(_check_scores(*arguments, **options))
    with below_autocast():
        return problem.scores(range(problem.L)).contiguous()


def _check_softmax(scores: Tensor, *, dtype: str = "float32") -> torch.dtype:
    check_dense("scores", scores)
    check_cuda_library(scores.device, "scores")
    if dtype not in _DTYPES:
        refuse("dtype", "float16, bfloat16, float32 or float64", f'"{dtype}"')
    wide = accumulator(_DTYPES[dtype])
    if scores.dim() < 2 or scores.dtype != wide:
        refuse("scores", f"rank 2 or more and {wide} for {dtype} weights", f"{shape_of(scores)}, {scores.dtype}")
    if scores.device.type == "cuda":
        sizes = list(scores.shape)
        check_limits({"scores": (scores, 2)}, _meta(scores, sizes, sizes[:-1], sizes[:-1]), sizes[:-2])
    return _DTYPES[dtype]


def _softmax_fake(scores: Tensor, *, dtype: str = "float32") -> tuple[Tensor, Tensor, Tensor]:
    weights = scores.new_empty(scores.shape, dtype=_check_softmax(scores, dtype=dtype))
    return weights, scores.new_empty(scores.shape[:-1]), scores.new_empty(scores.shape[:-1])


def _softmax_cpu(scores: Tensor, *, dtype: str = "float32") -> tuple[Tensor, Tensor, Tensor]:
    out = _check_softmax(scores, dtype=dtype)
    weights, total, lse = softmax_parts(scores)
    return weights.to(out).contiguous(), total, lse


def _check_values(weights: Tensor, row_sum: Tensor, value: Tensor, *, enable_gqa: bool = False) -> list[int]:
    tail = 3 if enable_gqa else 2
    check_operand("weights", weights, weights, tail)
    check_cuda_library(weights.device, "weights")
    check_operand("value", value, weights, tail, "weights'")
    check_shape("row_sum", row_sum, weights.shape[:-1], accumulator(weights.dtype), weights.device)
    S = weights.size(-1)
    if not surely(value.size(-2) == S):
        refuse_unless(value.size(-2) == S, "value", f"the weights' last size S = {S} as its second to last size", value)
    if enable_gqa:
        check_heads("value", value, weights, "weights'")
    leading, own = weights.shape[:-tail], value.shape[:-tail]
    fits = [len(own) <= len(leading)]
    fits += [surely(size == 1) or size == target for size, target in zip(reversed(own), reversed(leading), strict=False)]
    for fit in fits:
        if not surely(fit):
            refuse_unless(fit, "value", f"leading dimensions that broadcast to the weights' {shape_of(weights)}", value)
    shape = [*weights.shape[:-1], value.size(-1)]
    if weights.device.type == "cuda":
        inputs = {"weights": (weights, 2), "row_sum": (row_sum, 1), "value": (value, 2)}
        check_limits(inputs, _meta(value, shape), shape[:-2], enable_gqa)
    return shape


def _values_fake(weights: Tensor, row_sum: Tensor, value: Tensor, *, enable_gqa: bool = False) -> Tensor:
    return value.new_empty(_check_values(weights, row_sum, value, enable_gqa=enable_gqa))


def _values_cpu(weights: Tensor, row_sum: Tensor, value: Tensor, *, enable_gqa: bool = False) -> Tensor:
    _check_values(weights, row_sum, value, enable_gqa=enable_gqa)
    query = weights.new_empty((*weights.shape[:-1], 0))
    problem = Problem(AttentionCall(query, value[..., :0], value, scores=tuple(weights.shape)))
    total = row_sum.unsqueeze(-1)
    with below_autocast():
        product = problem.product(weights.to(problem.acc), problem.value)
    return (product / total.masked_fill(total == 0.0, 1.0)).to(value.dtype).contiguous()


def _log(name: str) -> Callable[..., None]:
    def log(first: Tensor, *rest: Any, **options: Any) -> None:
        log_call(name, first, "pipeline" if first.is_cuda else "reference", "it is a stage of that kernel")

    return log


def _autograd(name: str, check: Callable[..., Any], log: Callable[..., None]) -> Any:
    """What stands before the kernels of every device: the checks, the log and the refusal of gradients."""
    operator = getattr(torch.ops.attention_ext, name).default
    names = argument_names(operator, kwarg_only=False)

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        for argument, tensor in zip(names, args, strict=False):
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                got = f"one that does: {name} has no gradient, sdpa has one"
                refuse(argument, "a tensor that does not require grad", got)
        log(*args, **kwargs)
        return redispatch(operator, keyset, *args, **kwargs)

    return call


def register(library: torch.library.Library) -> None:
    for name, check, cpu, fake in (
        ("qk_scores", _check_scores, _scores_cpu, _scores_fake),
        ("row_softmax", _check_softmax, _softmax_cpu, _softmax_fake),
        ("scores_values", _check_values, _values_cpu, _values_fake),
    ):
        log = _log(name)
        register_operator(library, name, cpu, _autograd(name, check, log), fake, log)
