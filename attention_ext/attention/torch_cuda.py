"""PyTorch's own attention on CUDA: the facts that choice.py decides about, and how a back end is called."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .._checks import known
from .._torch_private import (
    chosen_by_torch,
    dispatch_modes,
    efficient_attention,
    flash_attention,
    is_traced,
    sdp_settings,
    torch_sdpa,
)
from .._transforms import wraps
from .call import AttentionCall
from .choice import decide
from .layout import heads_inside_rows

__all__ = ["capability", "choose", "name_of", "run", "workspace"]

_Sizes = tuple[int, ...]  # symbolic ones in a traced program


@functools.cache
def capability(device_index: int) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device_index) if torch.cuda.is_available() else None


def _rank_4(tensor: Tensor) -> tuple[_Sizes, _Sizes] | None:
    """The sizes and strides of an operand with its leading dims merged, or with more of them; None where they do not merge."""
    sizes, strides = tensor.shape, tensor.stride()
    if len(sizes) <= 4:
        more = 4 - len(sizes)
        return (*(1,) * more, *sizes), (*(0,) * more, *strides)
    batch, step = sizes[-4], strides[-4]
    for size, stride in zip(reversed(sizes[:-4]), reversed(strides[:-4]), strict=True):
        if known(batch == 1):
            batch, step = size, stride
        elif not known(size == 1):
            if not known(stride == batch * step):
                return None
            batch = batch * size
    return (batch, *sizes[-3:]), (step, *strides[-3:])


def _all_of_rank_4(call: AttentionCall) -> tuple[list[_Sizes], tuple[_Sizes, ...]] | None:
    """The sizes and the strides of the three operands as they are called with, or None: they cannot be."""
    tensors = call[:3]
    if max(t.dim() for t in tensors) > 4:
        first, *others = (t.shape[:-3] for t in tensors)
        same = all(len(dims) == len(first) and all(known(a == b) for a, b in zip(first, dims, strict=True)) for dims in others)
        if not same or call.attn_mask is not None:
            return None
    laid = [own for t in tensors if (own := _rank_4(t)) is not None]
    return ([sizes for sizes, _ in laid], tuple(strides for _, strides in laid)) if len(laid) == 3 else None


def _head_dim(size: int) -> int:
    """A head dim as a number, for which torch.compile then compiles, as with PyTorch's operator; torch.export keeps the symbol."""
    if isinstance(size, int) or torch.compiler.is_exporting():
        return size
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return size if free_unbacked_symbols(size) else int(size)


def choose(call: AttentionCall) -> tuple[str, str]:
    """(back end, why it) for a call on CUDA that check_attention has passed, or ("", why this package's kernels)."""
    query, key, value, mask = call[:4]
    traced = False
    for tensor in (query, key, value):
        if wraps(tensor):
            if not is_traced(tensor):
                return "", f"a {type(tensor).__name__} decides itself what runs on it"
            traced = True
    if not traced and dispatch_modes():
        return "", "a TorchDispatchMode is active, which sees the operators of this package"
    if query.dim() == key.dim() == value.dim() == 4:  # spares the host what other ranks need
        laid: Any = (query.shape, key.shape, value.shape), (query.stride(), key.stride(), value.stride())
    elif (laid := _all_of_rank_4(call)) is None:
        return "", "above rank 4 its fused kernels take leading dims that are the same and merge, and no mask"
    if traced:
        laid = [(*sizes[:3], _head_dim(sizes[3])) for sizes in laid[0]], laid[1]
        aligned = all(known(t.storage_offset() * t.element_size() % 16 == 0) for t in (query, key, value))
    else:
        aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
    exporting = torch.compiler.is_exporting()  # for whichever card; the program may be differentiated when it is run
    # Checkpointing runs the forward pass without a gradient and again with one: both have to draw the same numbers.
    gradient = exporting or call.dropout_p > 0.0 or call.needs_grad()
    facts = (
        None if exporting else capability(query.device.index),
        sdp_settings(),
        gradient,
        query.dtype,
        *laid[0],
        laid[1],
        aligned,
        None if mask is None else mask.dtype,
        call.dropout_p,
        call.is_causal,
        call.scale,
    )
    return decide.__wrapped__(*facts) if traced else decide(*facts)


def _operands(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Views of query, key and value of rank 4."""

    def view(t: Tensor) -> Tensor:
        return t if t.dim() == 4 else t.flatten(0, -4) if t.dim() > 4 else t[(None,) * (4 - t.dim())]

    return view(call.query), view(call.key), view(call.value)


def _bias_shape(mask: Tensor, S: int) -> list[int]:
    """Of the bias that a bool mask becomes: as large as the mask is in memory, with rows in units of 16 bytes."""
    sizes = [1 if known(stride == 0) else size for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True)]
    return [*sizes, S + -S % 8]  # as a sum, which is S or more for all a symbol may be


def workspace(back_end: str, call: AttentionCall) -> int:
    """Bytes that a call takes beside its result: the bias of a mask, the result in another order."""
    if back_end != "efficient":
        return 0
    query, _, value = _operands(call)
    elements = 0 if call.attn_mask is None else math.prod(_bias_shape(call.attn_mask, call.scores[-1]))
    if query.size(1) > 1 and not heads_inside_rows(call.query):
        elements += math.prod(query.shape[:3]) * value.size(3)
    return elements * query.element_size()


def _bias(call: AttentionCall, query: Tensor) -> Tensor | None:
    """A bool mask as what is added to the scores, (B, Hq, L, S)."""
    mask, L, S = call.attn_mask, call.scores[-2], call.scores[-1]
    if mask is None:
        return None
    shown = mask[tuple(slice(1) if known(stride == 0) else slice(None) for stride in mask.stride())]
    bias = query.new_zeros(_bias_shape(mask, S))[..., :S].masked_fill_(~shown, -math.inf)
    return bias.expand(query.size(0), query.size(1), L, S)


def name_of(back_end: str, call: AttentionCall) -> str:
    """What runs where choose has named this back end; where it says cuDNN, PyTorch's operator has the last word."""
    if back_end == "cudnn" and not wraps(call.query):
        back_end = chosen_by_torch(*_operands(call), None, 0.0, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa)
    return f"torch: {back_end}"


def run(back_end: str, call: AttentionCall) -> Tensor:
    """The result (..., Hq, L, Ev) of the back end that choose has named, laid out as it likes."""
    query, key, value = _operands(call)
    out: Tensor
    if back_end == "cudnn":
        out = torch_sdpa(query, key, value, None, 0.0, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa)
    elif back_end == "flash":
        out = flash_attention(query, key, value, call.dropout_p, call.is_causal, scale=call.scale)[0]
    else:
        keeps_lse = call.needs_grad() or torch.compiler.is_exporting()
        out = efficient_attention(query, key, value, _bias(call, query), keeps_lse, 0.0, call.is_causal, scale=call.scale)[0]
    rank = call.query.dim()
    return out if rank == 4 else out.unflatten(0, call.query.shape[:-3]) if rank > 4 else out.view(out.shape[4 - rank :])
