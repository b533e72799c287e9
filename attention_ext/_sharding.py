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

from ._checks import attention_shape, refuse, surely

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
    rows: Sequence[int], arguments: Sequence[_Span | None], outputs: Sequence[_Span | None], first: _Spec, *,
    is_causal: bool = False, seed: _Spec | None = None, enable_gqa: bool = False,
) -> _Strategies:  # fmt: skip
    """Strategies for results with rows (..., Hq, L): along leading dims, heads and, where its index does not matter, L.

    With dropout, which is where there is a seed, only replicated: a number is drawn for each weight from the indices of its leading
    dims, head, row and key, and those in a shard are not those in the whole.
    """
    axes = range(0 if seed is not None else len(rows) - is_causal)
    return _strategies(rows, arguments, outputs, axes, {len(rows) - 2: _shard_counts(first.mesh.shape)} if enable_gqa else None)


def _of_keys(operand: _Spec) -> _Span:
    """Key (..., Hk, S, E) or value (..., Hk, S, Ev) beside rows (..., Hq, L)."""
    return [*operand.shape[:-2], None]


def _of_mask(attn_mask: _Spec | None) -> _Span | None:
    return None if attn_mask is None else attn_mask.shape[:-1]


def _of_seed(seed: _Spec | None) -> _Span | None:
    return None if seed is None else []


def _sdpa_forward(
    query: _Spec, key: _Spec, value: _Spec, attn_mask: _Spec | None, seed: _Spec | None, dropout_p: float, is_causal: bool, *,
    enable_gqa: bool = False, key_lengths: _Spec | None = None, **options: Any,
) -> _Strategies:  # fmt: skip
    if key_lengths is not None:
        refuse("key_lengths", "None for DTensors", "a tensor")
    rows = attention_shape(query, key, value, enable_gqa)[:-1]
    arguments = [query.shape[:-1], _of_keys(key), _of_keys(value), _of_mask(attn_mask), _of_seed(seed), None, None]
    return _attention(rows, arguments, [rows, rows], query, is_causal=is_causal, seed=seed, enable_gqa=enable_gqa)


def _sdpa_with_lse(
    query: _Spec, key: _Spec, value: _Spec, attn_mask: _Spec | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    enable_gqa: bool = False, **options: Any,
) -> _Strategies:  # fmt: skip
    """Only inference mode asks for those of the routers. With dropout they have none: DTensor then runs them, not each rank, which
    draws one seed for all."""
    if dropout_p > 0.0:
        raise NotImplementedError
    return _sdpa_forward(query, key, value, attn_mask, None, dropout_p, is_causal, enable_gqa=enable_gqa)


def _sdpa(*arguments: Any, **options: Any) -> _Strategies:
    return [(outputs[:1], given) for outputs, given in _sdpa_with_lse(*arguments, **options)]


def _sdpa_backward(
    grad_out: _Spec, grad_lse: _Spec | None, query: _Spec, key: _Spec, value: _Spec, attn_mask: _Spec | None, out: _Spec,
    lse: _Spec, seed: _Spec | None, dropout_p: float, is_causal: bool, *, enable_gqa: bool = False, mask_grad: bool = False,
    key_lengths: _Spec | None = None, **options: Any,
) -> _Strategies:  # fmt: skip
    if key_lengths is not None:
        refuse("key_lengths", "None for DTensors", "a tensor")
    rows = lse.shape
    operands = [query.shape[:-1], _of_keys(key), _of_keys(value), _of_mask(attn_mask)]
    arguments = [rows, None if grad_lse is None else rows, *operands, rows, rows, _of_seed(seed), None, None]
    outputs = operands if mask_grad else [*operands[:3], None]  # without mask_grad the fourth is empty
    return _attention(rows, arguments, outputs, query, is_causal=is_causal, seed=seed, enable_gqa=enable_gqa)


def _qk_scores(
    query: _Spec, key: _Spec, attn_mask: _Spec | None = None, is_causal: bool = False, *, enable_gqa: bool = False, **options: Any
) -> _Strategies:
    rows = attention_shape(query, key, key, enable_gqa)[:-1]
    arguments = [query.shape[:-1], _of_keys(key), _of_mask(attn_mask), None]
    return _attention(rows, arguments, [rows], query, is_causal=is_causal, enable_gqa=enable_gqa)


def _row_softmax(scores: _Spec, **options: Any) -> _Strategies:
    rows = scores.shape[:-1]
    return _attention(rows, [rows], [rows, rows, rows], scores)


def _scores_values(weights: _Spec, row_sum: _Spec, value: _Spec, *, enable_gqa: bool = False) -> _Strategies:
    rows = weights.shape[:-1]
    return _attention(rows, [rows, rows, _of_keys(value)], [rows], weights, enable_gqa=enable_gqa)


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
    # DTensor keeps its decisions, and tells calls apart by operands and integers alone; flags and names decide as well here.
    told_apart = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator]
    told_apart.static_argnum = 0
    told_apart.static_kwargkey = [argument.name for argument in operator._schema.arguments if argument.kwarg_only]


_register("sdpa", _sdpa)
_register("sdpa_with_lse", _sdpa_with_lse)
_register("sdpa_forward", _sdpa_forward)
_register("sdpa_backward", _sdpa_backward)
_register("qk_scores", _qk_scores)
_register("row_softmax", _row_softmax)
_register("scores_values", _scores_values)
_register("linear_float32", _linear_float32)
_register("linear_batchnorm_softmax", _linear_batchnorm_softmax)
