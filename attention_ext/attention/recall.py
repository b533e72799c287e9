"""How calls of sdpa are run that are like one before (_recall.py)."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeAlias

from torch import Tensor

from .._recall import Known, Sample
from .._torch_private import function_modes, sdp_settings

__all__ = ["Arguments", "Run", "all_arguments", "attempt", "recall", "sample"]

Arguments: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, float | None, bool]  # all of sdpa, in its order
Run = Callable[[Arguments], Tensor]
_KNOWN = Known()


def _outline(arguments: Arguments) -> Hashable:
    """What checks.py, router.py and choice.py look at beside single tensors, and of these what tells most calls apart: numbers of
    elements, which cost less to read than sizes."""
    query, key, value, mask, dropout_p, causal, scale, grouped = arguments
    if not query.is_cuda:
        return query.numel(), key.numel(), mask is None, dropout_p, causal, scale, grouped
    aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
    return query.numel(), key.numel(), mask is None, dropout_p, causal, scale, grouped, aligned, sdp_settings()


def recall(arguments: Arguments) -> Run | None:
    """How a call like this one was run, if that is known."""
    query, key, value, mask = arguments[:4]
    if not (type(query) is type(key) is type(value) is Tensor):
        return None
    try:
        outline = _outline(arguments)
        run: Run | None
        run = _KNOWN.find(outline, query, key, value) if mask is None else _KNOWN.find(outline, query, key, value, mask)
    except (RuntimeError, TypeError):  # of a tensor without sizes or memory, or an argument that cannot be one
        return None
    return run


def all_arguments(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Arguments:  # fmt: skip
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


def attempt(arguments: Arguments) -> Tensor | None:
    """The result of sdpa past the dispatcher's keys, if a call like this one is known. Not for code that Dynamo follows."""
    run = None if function_modes() else recall(arguments)
    return None if run is None else run(arguments)


def sample(arguments: Arguments) -> Sample:
    """This call, to keep how it is run."""
    return Sample(_KNOWN, partial(_outline, arguments), *(arguments[:3] if arguments[3] is None else arguments[:4]))
