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

from ._checks import check_attention, check_shape, refuse
from ._reference import Problem, below_autocast

__all__ = ["register"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores_fake(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    shape = check_attention(query, key, key, attn_mask, 0.0, is_causal, enable_gqa)
    return query.new_empty(shape, dtype=_accumulator(query.dtype))


def _scores_cpu(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    shape = check_attention(query, key, key, attn_mask, 0.0, is_causal, enable_gqa)
    problem = Problem(query, key, key, attn_mask, None, 0.0, is_causal, scale, shape, 0)
    with below_autocast():
        return problem.scores(range(problem.L)).contiguous()


def _check_softmax(scores: Tensor, dtype: str) -> torch.dtype:
    if dtype not in _DTYPES:
        refuse("dtype", f"one of {', '.join(_DTYPES)}", repr(dtype))
    if scores.dim() < 2 or scores.dtype != _accumulator(_DTYPES[dtype]):
        refuse("scores", f"rank 2 or more and {_accumulator(_DTYPES[dtype])} for {dtype} weights", f"{scores.dtype} {scores.shape}")
    return _DTYPES[dtype]


def _softmax_fake(scores: Tensor, *, dtype: str = "float32") -> tuple[Tensor, Tensor, Tensor]:
    weights = scores.new_empty(scores.shape, dtype=_check_softmax(scores, dtype))
    return weights, scores.new_empty(scores.shape[:-1]), scores.new_empty(scores.shape[:-1])


def _softmax_cpu(scores: Tensor, *, dtype: str = "float32") -> tuple[Tensor, Tensor, Tensor]:
    out = _check_softmax(scores, dtype)
    top = scores.amax(-1, keepdim=True) if scores.size(-1) else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1)
    return weights.to(out).contiguous(), total, total.log() + top.squeeze(-1)


def _check_values(weights: Tensor, row_sum: Tensor, value: Tensor, enable_gqa: bool) -> list[int]:
    query = weights.new_empty((*weights.shape[:-1], 0))
    shape = check_attention(query, value.new_empty((*value.shape[:-1], 0)), value, None, 0.0, False, enable_gqa)
    check_shape("weights", weights, shape, value.dtype, value.device)
    check_shape("row_sum", row_sum, list(weights.shape[:-1]), _accumulator(value.dtype), value.device)
    return [*shape[:-1], value.size(-1)]


def _values_fake(weights: Tensor, row_sum: Tensor, value: Tensor, *, enable_gqa: bool = False) -> Tensor:
    return value.new_empty(_check_values(weights, row_sum, value, enable_gqa))


def _values_cpu(weights: Tensor, row_sum: Tensor, value: Tensor, *, enable_gqa: bool = False) -> Tensor:
    _check_values(weights, row_sum, value, enable_gqa)
    query = weights.new_empty((*weights.shape[:-1], 0))
    problem = Problem(query, value[..., :0], value, None, None, 0.0, False, None, list(weights.shape), 0)
    total = row_sum.unsqueeze(-1)
    with below_autocast():
        product = problem.product(weights.to(problem.acc), problem.value)
    return (product / total.masked_fill(total == 0.0, 1.0)).to(value.dtype).contiguous()


def _refuse_grad(name: str) -> Any:
    operator = getattr(torch.ops.attention_ext, name).default

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in args if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(f"attention_ext: {name} has no gradient: expected inputs that do not require grad; use sdpa")
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return call


def register(library: torch.library.Library) -> None:
    """Registers the CPU path, the fake kernels and the refusal of gradients."""
    for name, cpu, fake in (
        ("qk_scores", _scores_cpu, _scores_fake),
        ("row_softmax", _softmax_cpu, _softmax_fake),
        ("scores_values", _values_cpu, _values_fake),
    ):
        library.impl(name, cpu, "CPU")
        library.impl(name, _refuse_grad(name), "Autograd", with_keyset=True)
        torch.library.register_fake(f"attention_ext::{name}", fake, lib=library)
