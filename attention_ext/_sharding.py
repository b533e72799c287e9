"""DTensor operands (torch.distributed.tensor): along which dims the operators work shard by shard, without communication.

Attention, its stages and the linear layers compute each row of a result from one slice of every operand, so one rule gives all
strategies: a result is sharded along one of its dims; an operand that has this dim in full is sharded with it, one that is
broadcast along it is replicated, and the gradient of such an operand is a partial sum. DTensor redistributes other placements.

This module imports torch.distributed.tensor; _after_import waits for someone else to do so, and says why.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ._checks import refuse, surely
from ._torch_private import tell_calls_apart
from .attention.call import AttentionCall
from .attention.checks import attention_shape

__all__: list[str] = []

_Spec = Any  # what DTensor passes in place of an operand: its shape and its mesh
_Span = Sequence[int | None]  # a tensor's sizes along the dims of a result, aligned at the right; None where it has no such dim
_Placed = list[Placement | None]
_Strategies = list[tuple[_Placed, _Placed]]  # placements of the outputs and of the arguments on one dim of the mesh


def _shard_counts(mesh_shape: Sequence[int]) -> set[int]:
    """Into how many shards a dim may fall: any of the mesh dims may shard it, and several of them at once."""
    counts = {1}
    for ranks in mesh_shape:
        counts |= {ranks * count for count in counts}
    return counts


def _placements(axis: int, result: Sequence[int], spans: Sequence[_Span | None], counts: set[int] | None) -> _Placed | None:
    """How tensors go with a result that is sharded along `axis`; None if they do not. A span of None has no placement.

    counts is given for grouped heads, of which operands have different numbers: shards belong together where each count divides
    each number. A count above a size does not matter, as DTensor drops such a strategy by itself.
    """
    placed: _Placed = []
    for span in spans:
        dim = axis - len(result) + len(span or ())
        size = span[dim] if span is not None and dim >= 0 else None
        if span is None:
            placed.append(None)
        elif size is None or (surely(size == 1) and not surely(result[axis] == 1)):
            placed.append(Replicate())
        elif surely(size == result[axis]) if counts is None else all(surely(size % n == 0) or surely(size < n) for n in counts):
            placed.append(Shard(dim))
        else:
            return None
    return placed


def _strategies(
    result: Sequence[int], arguments: Sequence[_Span | None], outputs: Sequence[_Span | None], axes: Iterable[int],
    grouped: dict[int, set[int]] | None = None,
) -> _Strategies:  # fmt: skip
    """Everything replicated, and the result sharded along each of the axes; `grouped` has the shard counts of an axis of groups.

    None among the arguments is one that is no tensor, among the outputs one that is the same on every rank.
    """
    found: _Strategies = [([Replicate() for _ in outputs], [None if span is None else Replicate() for span in arguments])]
    for axis in axes:
        counts = (grouped or {}).get(axis)
        given, made = (_placements(axis, result, spans, counts) for spans in (arguments, outputs))
        if given is not None and made is not None:
            found.append(([Replicate() if p is None else Partial() if p.is_replicate() else p for p in made], given))
    return found


def _attention(
    call: AttentionCall, rows: Sequence[int], arguments: Sequence[_Span | None], outputs: Sequence[_Span | None]
) -> _Strategies:
    """Strategies for results with rows (..., Hq, L): along leading dims, heads and, where its index does not matter, L.

    With dropout, which is where there is a seed, only replicated: a number is drawn for each weight from the indices of its leading
    dims, head, row and key, and those in a shard are not those in the whole.
    """
    first: _Spec = call.query
    axes = range(0 if call.seed is not None else len(rows) - call.is_causal)
    grouped = {len(rows) - 2: _shard_counts(first.mesh.shape)} if call.enable_gqa else None
    return _strategies(rows, arguments, outputs, axes, grouped)


def _of_keys(operand: _Spec) -> _Span:
    """Key (..., Hk, S, E) or value (..., Hk, S, Ev) beside rows (..., Hq, L)."""
    return [*operand.shape[:-2], None]


def _of_mask(attn_mask: _Spec | None) -> _Span | None:
    return None if attn_mask is None else attn_mask.shape[:-1]


def _of_seed(seed: _Spec | None) -> _Span | None:
    return None if seed is None else []


def _operands(call: AttentionCall) -> list[_Span | None]:
    if call.key_lengths is not None:
        refuse("key_lengths", "None for DTensors", "a tensor")
    return [call.query.shape[:-1], _of_keys(call.key), _of_keys(call.value), _of_mask(call.attn_mask)]


def _sdpa_forward(*specs: Any, **options: Any) -> _Strategies:
    call = AttentionCall(*specs, **options)
    rows = attention_shape(call)[:-1]
    return _attention(call, rows, [*_operands(call), _of_seed(call.seed), None, None], [rows, rows])


def _sdpa_with_lse(*specs: Any, **options: Any) -> _Strategies:
    """Only inference mode asks for those of the routers. With dropout they have none: DTensor then runs them, not each rank, which
    draws one seed for all."""
    call = AttentionCall.of_router(*specs, **options)
    if call.dropout_p > 0.0:
        raise NotImplementedError
    return _sdpa_forward(*call)


def _sdpa(*specs: Any, **options: Any) -> _Strategies:
    return [(outputs[:1], given) for outputs, given in _sdpa_with_lse(*specs, **options)]


def _sdpa_backward(
    grad_out: _Spec, grad_lse: _Spec | None, query: _Spec, key: _Spec, value: _Spec, attn_mask: _Spec | None, out: _Spec,
    lse: _Spec, *rest: Any, mask_grad: bool = False, wide_grads: bool = False, **options: Any,
) -> _Strategies:  # fmt: skip
    call, rows = AttentionCall(query, key, value, attn_mask, *rest, **options), lse.shape
    operands = _operands(call)
    arguments = [rows, None if grad_lse is None else rows, *operands, rows, rows, _of_seed(call.seed), None, None]
    return _attention(call, rows, arguments, operands if mask_grad else [*operands[:3], None])  # else the fourth is empty


def _qk_scores(query: _Spec, key: _Spec, attn_mask: _Spec | None = None, *flags: Any, **options: Any) -> _Strategies:
    call = AttentionCall(query, key, key, attn_mask, None, 0.0, *flags, **options)
    rows = attention_shape(call)[:-1]
    return _attention(call, rows, [query.shape[:-1], _of_keys(key), _of_mask(attn_mask), None], [rows])


def _row_softmax(scores: _Spec, **options: Any) -> _Strategies:
    rows = scores.shape[:-1]
    return _attention(AttentionCall(scores, scores, scores), rows, [rows], [rows, rows, rows])


def _scores_values(weights: _Spec, row_sum: _Spec, value: _Spec, *, enable_gqa: bool = False) -> _Strategies:
    rows = weights.shape[:-1]
    call = AttentionCall(weights, value, value, enable_gqa=enable_gqa)
    return _attention(call, rows, [rows, rows, _of_keys(value)], [rows])


def _linear_float32(input: _Spec, weight: _Spec, bias: _Spec | None = None) -> _Strategies:
    """Rows and features of out (..., N). Also K, whose parts add up to out, but not with a bias, which every rank would add."""
    out = [*input.shape[:-1], weight.shape[0]]
    of_weight = weight.shape[:1]
    arguments = [[*input.shape[:-1], None], of_weight, None if bias is None else of_weight]
    found = _strategies(out, arguments, [out], range(len(out)))
    if bias is None:
        found.append(([Partial()], [Shard(len(out) - 1), Shard(1), None]))
    return found


def _linear_batchnorm_softmax(
    input: _Spec, weight: _Spec, bias: _Spec | None, bn_weight: _Spec | None, bn_bias: _Spec | None, running_mean: _Spec | None,
    running_var: _Spec | None, scale: _Spec, training: bool, eps: float,
) -> _Strategies:  # fmt: skip
    """Rows, unless the batch's statistics are taken over all of them; never the features, over which the softmax runs."""
    out = [input.shape[0], weight.shape[0]]
    of_features = [None if t is None else t.shape[:1] for t in (weight, bias, bn_weight, bn_bias, running_mean, running_var, scale)]
    return _strategies(out, [[out[0], None], *of_features, None, None], [out, None, None, out], () if training else (0,))


def _register(name: str, strategies: Callable[..., _Strategies]) -> None:
    operator = getattr(torch.ops.attention_ext, name).default
    register_sharding(operator)(strategies)
    tell_calls_apart(DTensor, operator)


_register("sdpa", _sdpa)
_register("sdpa_with_lse", _sdpa_with_lse)
_register("sdpa_forward", _sdpa_forward)
_register("sdpa_backward", _sdpa_backward)
_register("qk_scores", _qk_scores)
_register("row_softmax", _row_softmax)
_register("scores_values", _scores_values)
_register("linear_float32", _linear_float32)
_register("linear_batchnorm_softmax", _linear_batchnorm_softmax)
