"""What an eager call came to, kept for the calls like it, which then run at once.

Checks, route and choice take the host some 25 us, as much as PyTorch's whole operator. Nothing is decided here: the router decides,
and keeps here how the call is run. Calls are alike where PyTorch's own guard, the one of a compiled graph, finds their tensors
alike, and all else that is looked at is the same. Shapes repeat from layer to layer and from step to step, so few calls are new.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .._log import is_logging
from .._torch_private import alike, dispatch_modes, forward_mode_is_open, sdp_settings, transforms

__all__ = ["Run", "Sample", "recall"]

Guards = tuple[Callable[[Any], bool], ...]  # of query, key, value and, where there is one, the mask
Run = Callable[..., Tensor]  # takes the arguments of sdpa by position
_MOST, _MOST_ALIKE = 2048, 16  # outlines, and calls of one outline; beyond them all is forgotten
_ARRAYS = (Tensor, torch.nn.Parameter)
_known: dict[Hashable, list[tuple[Guards, Run]]] = {}  # by outline


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
    """How a call like this one was run; None where none is known, and where calls are logged."""
    if not (type(query) is type(key) is type(value) is Tensor) or is_logging() or forward_mode_is_open():
        return None
    try:
        known = _known.get(_outline(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), ())
        for (like_query, like_key, like_value, *like_mask), run in known:
            if like_query(query) and like_key(key) and like_value(value) and not (like_mask and not like_mask[0](attn_mask)):
                return run
    except (RuntimeError, TypeError):  # of a tensor without sizes or memory, or an argument that cannot be one
        pass
    return None


def _is_array(tensor: Any) -> bool:
    """Whether a tensor is just what lies in memory, and something lies there."""
    if type(tensor) not in _ARRAYS or tensor.is_nested or tensor.layout != torch.strided:
        return False
    return tensor.data_ptr() != 0 and not tensor.is_neg()


class Sample:
    """A call before it is routed: tells whether other calls are like it. None of it holds a tensor."""

    def __init__(self, *arguments: Any) -> None:
        tensors = arguments[:3] if arguments[3] is None else arguments[:4]
        plain = not (dispatch_modes() or transforms() or forward_mode_is_open() or torch.compiler.is_compiling())
        self.arguments = arguments if plain and all(map(_is_array, tensors)) else None
        if self.arguments is not None:
            self.outline, self.guards = _outline(*arguments), tuple(map(alike, tensors))

    def keep(self, run: Callable[[], Run]) -> None:
        """Keeps how the call is run, if no class, mode or transform has a say in it."""
        if self.arguments is None or _outline(*self.arguments) != self.outline:  # another thread has changed a setting meanwhile
            return
        if len(_known) >= _MOST:
            _known.clear()
        same = _known.setdefault(self.outline, [])
        if len(same) >= _MOST_ALIKE:
            same.clear()
        same.append((self.guards, run()))
