"""What an eager call came to, kept under all facts that decided it: the next call of the same facts runs at once.

Checks, route and choice take the host some 30 us, as much as PyTorch's whole operator. Nothing is decided here: the router decides,
and keeps here how the call is run. Shapes repeat from layer to layer and from step to step, so few calls are new.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .._log import is_logging
from .._torch_private import sdp_settings, undisturbed

__all__ = ["Run", "facts", "keep", "kept"]

Run = Callable[..., Tensor]  # takes the arguments of sdpa by position
_MOST = 2048  # calls, after which all are forgotten
_MASKS = (Tensor, torch.nn.Parameter)
kept: dict[Hashable, Run] = {}  # nothing is known of None


def facts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Hashable:  # fmt: skip
    """Everything that checks.py, router.py and choice.py look at; None for a call that something else may decide about.

    That is: a subclass of Tensor, a mode, a transform of torch.func, forward-mode AD, the log, and a tensor that is no array in
    memory (sparse, nested, functional, of no elements) or whose array is to be read with another sign.
    """
    if not (type(query) is type(key) is type(value) is Tensor and undisturbed()) or is_logging():
        return None
    try:
        starts = query.data_ptr(), key.data_ptr(), value.data_ptr()
        found: tuple[Any, ...] = (
            query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), query.dtype, key.dtype, value.dtype,
            query.device, key.device, value.device, dropout_p, is_causal, scale, enable_gqa,
        )  # fmt: skip
        if mask is not None:
            if type(mask) not in _MASKS or not mask.data_ptr() or mask.is_neg():
                return None
            recorded = mask.requires_grad and torch.is_grad_enabled()
            found = (*found, mask.shape, mask.stride(), mask.dtype, mask.device, recorded)
    except RuntimeError:  # of a tensor without strides or memory
        return None
    if 0 in starts:
        return None
    if not query.is_cuda:
        return found
    if query.is_neg() or key.is_neg() or value.is_neg():
        return None
    gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return (found, gradient, (starts[0] | starts[1] | starts[2]) % 16 == 0, sdp_settings())


def keep(found: Hashable, run: Run) -> None:
    """Files how a call of these facts is run."""
    if len(kept) >= _MOST:
        kept.clear()
    kept[found] = run
