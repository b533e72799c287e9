"""How calls of sdpa are run that are like one before (_recall.py)."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.compiler import is_compiling

from .._recall import Known, Sample
from .._torch_private import function_modes, sdp_settings

__all__ = ["Arguments", "Run", "attempt", "recall", "sample"]

Arguments: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, float | None, bool]  # all of sdpa, in its order
Run = Callable[[Arguments], Tensor]
_KNOWN = Known()


def _outline(arguments: Arguments) -> Hashable:
    """What checks.py, router.py and choice.py look at beside single tensors, and of these what tells most calls apart."""
    query, key, value, mask, dropout_p, causal, scale, grouped = arguments
    if not query.is_cuda:
        return query.shape, key.shape, mask is None, dropout_p, causal, scale, grouped
    aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
    return query.shape, key.shape, mask is None, dropout_p, causal, scale, grouped, aligned, sdp_settings()


def _tensors(arguments: Arguments) -> tuple[Any, ...]:
    return arguments[:3] if arguments[3] is None else arguments[:4]


def recall(arguments: Arguments) -> Run | None:
    """How a call like this one was run, if that is known."""
    tensors = _tensors(arguments)
    if not (type(tensors[0]) is type(tensors[1]) is type(tensors[2]) is Tensor):
        return None
    try:
        run: Run | None = _KNOWN.find(_outline(arguments), *tensors)
    except (RuntimeError, TypeError):  # of a tensor without sizes or memory, or an argument that cannot be one
        return None
    return run


def attempt(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """The result of sdpa past the dispatcher's keys, if a call like this one is known."""
    if is_compiling() or function_modes():
        return None
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    run = recall(arguments)
    return None if run is None else run(arguments)


def sample(arguments: Arguments) -> Sample:
    """This call, to keep how it is run."""
    return Sample(_KNOWN, partial(_outline, arguments), *_tensors(arguments))
