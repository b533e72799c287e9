"""Which calls go to sdpa where a user asks for that once and not at each call: what `when` means for override and integrations.

A call in a program that is traced is decided while it is traced, so only what holds for all lengths is looked at.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ._checks import message
from ._torch_private import constant_in_programs
from .attention.torch_cuda import capability

__all__ = ["When", "check_when", "why_not"]

When = str | Callable[[Tensor, Tensor, Tensor], bool]


def check_when(when: When) -> When:
    if not (callable(when) or when in ("preferred", "always")):
        raise ValueError(message("when", "'preferred', 'always' or a function of query, key and value", repr(when)))
    return when


@constant_in_programs
def _capability(device_index: int) -> int:
    """10 * major + minor: a number, which every torch takes for a constant."""
    major, minor = capability(device_index) or (0, 0)
    return 10 * major + minor


def _why_not_preferred(query: Tensor, value: Tensor, dropout_p: float) -> str:
    """Of what preferred() reads (csrc/plan/forward.cpp) that which holds for all lengths."""
    E, Ev = query.size(-1), value.size(-1)
    if query.device.type != "cuda":
        return f"on {query.device.type} sdpa is PyTorch's operator"
    if _capability(query.device.index) != 90:
        return "it was measured faster on compute capability 9.0 alone"
    if query.dtype == torch.float32:
        if not (64 <= E <= 1024 and 64 <= Ev <= 1024):
            return "it was measured faster in float32 for head dims from 64 to 1024 alone"
    elif query.dtype not in (torch.float16, torch.bfloat16):
        return "it was measured faster for half types and float32 alone"
    elif not (256 < E <= 1024 and 256 < Ev <= 1024 and E % 8 == 0 and Ev % 8 == 0):
        return "it was measured faster for head dims that are multiples of 8 from 264 to 1024 alone"
    if dropout_p > 0.0:
        return "it was not measured faster with dropout"
    return ""


def why_not(when: When, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> str:
    """A clause: why a call stays with PyTorch; empty where it goes to sdpa."""
    if when == "always":
        return ""
    if when == "preferred":
        return _why_not_preferred(query, value, dropout_p)
    return "" if when(query, key, value) else "when(query, key, value) is false"  # type: ignore[operator]
