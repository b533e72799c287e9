"""How calls of sdpa are run that are like one before (_recall.py)."""

from collections.abc import Callable, Hashable
from functools import partial

from torch import Tensor

from .._recall import Known, Sample
from .._torch_private import sdp_settings

__all__ = ["Run", "recall", "sample"]

Run = Callable[..., Tensor]  # takes the arguments of sdpa by position
_KNOWN = Known()


def _outline(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Hashable:  # fmt: skip
    """What checks.py, router.py and choice.py look at beside single tensors, and of these what tells most calls apart."""
    if not query.is_cuda:
        return query.shape, key.shape, attn_mask is None, dropout_p, is_causal, scale, enable_gqa
    aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
    return query.shape, key.shape, attn_mask is None, dropout_p, is_causal, scale, enable_gqa, aligned, sdp_settings()


def recall(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Run | None:  # fmt: skip
    """How a call like this one was run, if that is known."""
    if not (type(query) is type(key) is type(value) is Tensor):
        return None
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    try:
        run: Run | None = _KNOWN.find(
            _outline(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), *tensors
        )  # fmt: skip
    except (RuntimeError, TypeError):  # of a tensor without sizes or memory, or an argument that cannot be one
        return None
    return run


def sample(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Sample:  # fmt: skip
    """This call, to keep how it is run."""
    outline = partial(_outline, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return Sample(_KNOWN, outline, query, key, value, *([] if attn_mask is None else [attn_mask]))
