"""Which of PyTorch's back ends runs a call of sdpa on CUDA in place of this package's kernels, and why not the others.

A back end runs where it was measured faster (routes.py), on cards without a record wherever it can, and only where it keeps the
contract: what each one refuses says where. cuDNN has no operator that is safe by name: F.scaled_dot_product_attention runs where it
takes cuDNN, and where whatever else it may take keeps the contract too, never its MATH back end. FlashAttention-2 ("flash") and the
memory-efficient CUTLASS kernels ("efficient") are called by name. Their limits are those of torch 2.10 to 2.14
(aten/src/ATen/native/transformers/cuda).

Nothing here adds a guard to a traced program: where sizes are symbolic, a condition has to hold for all that they may be, and a
limit on size counts as kept.
"""

import functools
import math
from typing import Any, NamedTuple

import torch

from .._checks import known
from .._torch_private import SdpSettings, cudnn_comes_first
from .routes import ROUTES

__all__ = ["BACK_ENDS", "Facts", "decide"]

BACK_ENDS = ("cudnn", "flash", "efficient")
_UNIT = 8  # elements of a half type in 16 bytes, the unit of their loads
_UNRECORDED = (("flash", 256), ("efficient", 256))
_MOST_BLOCKS = 65535  # of a grid's second and third dim
_32_BITS = 1 << 31
_FLOAT32 = torch.finfo(torch.float32)
_Sizes = tuple[int, ...]  # symbolic ones in a traced program


class Facts(NamedTuple):
    """What decides about a call. Operands are of rank 4; capability is None where the card is not known."""

    capability: tuple[int, int] | None
    settings: SdpSettings
    gradient: bool
    dtype: torch.dtype
    query: _Sizes
    key: _Sizes
    value: _Sizes
    strides: tuple[_Sizes, _Sizes, _Sizes]
    aligned: bool  # all three begin on 16-byte boundaries
    mask: torch.dtype | None
    dropout_p: float
    is_causal: bool
    scale: float | None

    @property
    def square(self) -> bool:
        return known(self.query[2] == self.key[2])

    @property
    def grouped(self) -> bool:
        return not known(self.query[1] == self.key[1])

    @property
    def kind(self) -> str:
        """As routes.py names it."""
        kind = "bool mask" if self.mask is not None else "causal" if self.is_causal else "plain"
        if self.mask is None and known(self.query[2] == 1):
            kind += ", one query"
        elif self.is_causal and not self.square:
            kind += ", L and S apart"
        return kind if self.query[3] == self.value[3] else f"{kind}, another width of values"

    def unsteady(self) -> bool:
        """Whether a back end that can be deterministic is asked to warn instead."""
        return self.gradient and self.settings.deterministic and self.settings.warn_only

    def flash_overflows(self) -> bool:
        """Whether the gradient's sums pass the 32 bits that FlashAttention-2 counts them with."""
        B, H, L, E = self.query
        return self.gradient and known(B * H * ((L + 127) // 128 * 128) * max((E + 31) // 32 * 32, 32) >= _32_BITS)


def _none_takes(f: Facts) -> str:
    """Why no back end of PyTorch's runs a call, a clause; empty where one may."""
    if f.dtype == torch.float32:  # a row's only value does not come back as it is; at rank 3 PyTorch runs MATH
        return "its fused kernels multiply float32 as three terms of TF32, which is less accurate than this package's"
    if f.dtype not in (torch.float16, torch.bfloat16):
        return f"its fused kernels do not take {f.dtype}"
    if f.mask not in (None, torch.bool):
        return "its fused kernels lose a float mask's rows of lowest numbers"
    if not 0.0 <= f.dropout_p < 1.0:
        return "its fused kernels do not take a dropout_p of 1"
    if f.scale is not None and not _FLOAT32.tiny <= f.scale <= _FLOAT32.max:
        return "its fused kernels want a scale that is positive and normal in float32"
    shapes = (f.query, f.key, f.value)
    (B, H, L, E), (key_B, key_H, _, _), (value_B, value_H, _, Ev) = shapes
    if not (isinstance(E, int) and isinstance(Ev, int)):
        return "tracing leaves the head dim open"
    if not all(known(size > 0) for shape in shapes for size in shape):
        return "its fused kernels do not take sizes of 0"
    if not (known(key_B == B) and known(value_B == B) and known(key_H == value_H)):
        return "its fused kernels do not broadcast leading dims or heads"
    if E % _UNIT or Ev % _UNIT:
        return f"its fused kernels take head dims that are multiples of {_UNIT}"
    for shape, strides in zip(shapes, f.strides, strict=True):
        if not known(strides[3] == 1) or not all(known(stride % _UNIT == 0) for stride in strides[:3]):
            return "its fused kernels take adjacent columns and rows on 16-byte boundaries"
        if known(strides[2] < shape[3]) and not known(shape[2] == 1):
            return "its fused kernels take rows that do not overlap in memory"
        expanded = [known(stride == 0) and not known(size == 1) for stride, size in zip(strides[:2], shape[:2], strict=True)]
        if any(expanded):  # the parts of a gradient are to be summed in float32
            return "its fused kernels take leading dims and heads that are not expanded in memory"
    if not f.aligned:
        return "its fused kernels take operands that begin on 16-byte boundaries"
    if known(B > _MOST_BLOCKS) or known(H > _MOST_BLOCKS):
        return f"its fused kernels take at most {_MOST_BLOCKS} of a batch and of heads"
    counts = [math.prod(shape) for shape in shapes] + [stride for strides in f.strides for stride in strides]
    if any(known(count >= _32_BITS) for count in (*counts, B * H * L)):
        return "its fused kernels count elements in 32 bits"
    return ""


def _cudnn_refuses(f: Facts) -> str:
    (_, _, L, E), S, Ev, settings = f.query, f.key[2], f.value[3], f.settings
    if f.mask is not None:
        return "it lets masked keys into rows without a visible one"
    if f.dropout_p > 0.0:
        return "it rounds dropout_p by a rule of its own"
    if not (settings.cudnn and cudnn_comes_first(settings.order)):
        return "PyTorch's operator does not take it first"
    if settings.deterministic and (f.gradient or not settings.warn_only):
        return "it is not deterministic"
    if Ev != E and max(E, Ev) > 128 and (E, Ev) != (192, 128):
        return f"it was not measured for head dims of {E} and {Ev}"
    if not all(isinstance(size, int) or known(size > 1) for size in (L, S)):
        return "PyTorch's operator cannot tell whether a length is 1"
    if f.is_causal and not f.square and not known(L != S):
        return "PyTorch's operator cannot tell whether L is S"
    flash_too = Ev == E and (f.square or not f.is_causal)
    if not (settings.flash if flash_too else settings.efficient and not f.grouped):
        return "only PyTorch's MATH back end would be left in its place"
    if f.gradient and f.is_causal and not f.square:
        return "its gradient for is_causal is used for L = S alone"
    if f.gradient and not f.is_causal and not known(S % 128 == 0):
        return "its gradients can be NaN where S is not a multiple of 128"
    if f.flash_overflows():
        return "FlashAttention-2, which may run in its place, counts the sums of a gradient in 32 bits"
    return ""


def _flash_refuses(f: Facts) -> str:
    E, capability = f.query[3], f.capability
    if not f.settings.flash:
        return "it is turned off"
    if f.settings.flash_replaced:
        return "another implementation was put in its place"
    if f.mask is not None or f.value[3] != E or E > 256:
        return "it takes no mask, and one head dim for keys and values, up to 256"
    if f.is_causal and not f.square:
        return "it would let the last query see the last key, for L and S that differ"
    if f.unsteady():
        return "its gradient is not deterministic where that only warns"
    small = capability is None or capability in ((8, 6), (8, 9)) or capability[0] == 12  # shared memory
    if small and f.gradient and (192 < E <= 224 or (E > 224 and f.dropout_p > 0.0)):
        return f"it has no gradient for a head dim of {E} on this card"
    return "it counts the sums of a gradient in 32 bits" if f.flash_overflows() else ""


def _efficient_refuses(f: Facts) -> str:
    if not f.settings.efficient:
        return "it is turned off"
    if f.grouped:
        return "before torch 2.14 it takes no grouped heads"
    if f.dropout_p > 0.0:
        return "its random numbers repeat in large problems"
    if (f.mask is not None or f.is_causal) and known(f.query[2] * f.key[2] >= _32_BITS):
        return "it counts the scores of a head in 32 bits"
    return "its gradient is not deterministic where that only warns" if f.unsteady() else ""


_REFUSES = {"cudnn": _cudnn_refuses, "flash": _flash_refuses, "efficient": _efficient_refuses}


def _candidates(f: Facts) -> tuple[tuple[tuple[str, int], ...], str]:
    """(back end, widest head dim) in the order in which they are tried, and why they, a clause."""
    kind = ("half", f.kind, f.gradient)
    faster = f"it was measured faster for such a call ({f.kind}, {'with' if f.gradient else 'without'} a gradient)"
    if f.capability is None:  # by name, and faster on all cards with a record
        limits = [dict(table.get(kind, ())) for table in ROUTES.values()]
        common = ((name, min(own.get(name, 0) for own in limits)) for name in BACK_ENDS[1:])
        return tuple(pair for pair in common if pair[1]), f"{faster}, and it is not known which card will run it"
    card = "compute capability {}.{}".format(*f.capability)
    if f.capability in ROUTES:
        return ROUTES[f.capability].get(kind, ()), f"{faster} on {card}"
    if f.capability[0] in (8, 10) or f.capability in ((12, 0), (12, 1)):
        return _UNRECORDED, f"nothing was measured on {card}, and it takes the call"
    return (), ""


@functools.lru_cache(maxsize=4096)
def decide(*facts: Any) -> tuple[str, str]:
    """(back end, why), or ("", why none), from the fields of Facts; one by one, which is what the cache costs least with."""
    f = Facts(*facts)
    f = f._replace(settings=SdpSettings(*f.settings))
    if reason := _none_takes(f):
        return "", reason
    candidates, why = _candidates(f)
    width = max(f.query[3], f.value[3])
    refusals: list[str] = []
    for name, widest in candidates:
        refusal = f"it was measured faster up to a head dim of {widest}" if width > widest else _REFUSES[name](f)
        if not refusal:
            return name, "; ".join([why, *refusals])
        refusals.append(f"not {name}: {refusal}")
    nothing = (
        f"none of its back ends was measured faster for such a call ({f.kind}, {'with' if f.gradient else 'without'} a gradient)"
    )
    return "", "; ".join(refusals) or nothing
