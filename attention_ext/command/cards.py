"""What sdpa would run on a card that need not be there: the tables that choose for a call, asked without tensors."""

from dataclasses import dataclass

import torch

from .._libraries import BUILD
from .._torch_private import SdpSettings
from ..attention.choice import decide
from ..ops import Explanation
from .cases import Case

__all__ = ["CARDS", "Card", "at", "backward_kernel", "explained"]

_WORKSPACE = 128 << 20  # bytes, the operators' default
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # in the order of DataType in csrc/core/tensors.h
# As PyTorch sets them, with a cuDNN that is new enough to come first.
_SETTINGS = SdpSettings(True, True, True, (3, 1, 2, 0, 4), False, False, False)


@dataclass(frozen=True)
class Card:
    name: str
    capability: tuple[int, int]
    sms: int

    def __str__(self) -> str:
        return "{}, compute capability {}.{}".format(self.name, *self.capability)

    @property
    def is_hopper(self) -> bool:
        return self.capability == (9, 0)

    @property
    def lacks_kernels(self) -> bool:
        """A Hopper card, and a build for CUDA (9.0) that is without the kernels for it (9.0a)."""
        return self.is_hopper and BUILD.cuda_major > 0 and not BUILD.has_hopper_kernels


CARDS = {
    "a100": Card("NVIDIA A100", (8, 0), 108),
    "l40s": Card("NVIDIA L40S", (8, 9), 142),
    "h100": Card("NVIDIA H100", (9, 0), 132),
    "h200": Card("NVIDIA H200", (9, 0), 132),
}


def at(device: torch.device) -> Card:
    """The card at hand."""
    found = torch.cuda.get_device_properties(device)
    return Card(found.name, torch.cuda.get_device_capability(device), found.multi_processor_count)


def _plan(case: Case, card: Card, table: str) -> tuple[str, str, int, bool]:
    """(kernel, reason, workspace, preferred) of csrc/plan for contiguous operands; table: "forward" or "backward"."""
    group = 1 if case.Hk == 1 else case.Hq // case.Hk  # one head for all is a broadcast
    problem = {"N": case.B * case.Hq, "L": case.L, "S": case.S, "E": case.E, "Ev": case.Ev, "key_group": group}
    problem |= {"value_group": group, "batch_dims": 2 if case.Hk == 1 < min(case.B, case.Hq) else 1}
    problem |= {"type": _TYPES.index(case.dtype), "causal": int(case.causal)}
    for name, (batch, heads, _, width) in zip(("query", "key", "value"), case.shapes, strict=True):
        row = width * case.dtype.itemsize
        problem |= {f"{name}.row_alignment": min(row & -row, 128), f"{name}.matrices": batch * heads}
    major, minor = card.capability
    found = torch.ops.attention_ext.plan(table, list(problem), list(problem.values()), 10 * major + minor, card.sms, _WORKSPACE)
    kernel, reason, workspace, preferred = found[:4]
    return kernel, reason, workspace, preferred


def _back_end(case: Case, card: Card, gradient: bool) -> tuple[str, str]:
    """(back end of PyTorch's, why), or ("", why none)."""
    strides = tuple((heads * rows * width, rows * width, width, 1) for _, heads, rows, width in case.shapes)
    return decide(
        card.capability, tuple(_SETTINGS), gradient, case.dtype, *case.shapes, strides, True, None, 0.0, case.causal, None
    )


def explained(case: Case, card: Card, gradient: bool = False) -> Explanation:
    """attention_ext.explain for contiguous operands on this card, where this package has kernels and PyTorch its usual settings."""
    back_end, why = _back_end(case, card, gradient)
    if back_end:
        copied = back_end == "efficient" and case.Hq > 1  # it gives the result in another order
        return Explanation(f"torch: {back_end}", why, copied * case.B * case.Hq * case.L * case.Ev * case.dtype.itemsize, False)
    kernel, reason, workspace, preferred = _plan(case, card, "forward")
    return Explanation(kernel, f"{reason}; PyTorch's operator does not run: {why}", workspace, preferred)


def backward_kernel(case: Case, card: Card) -> str:
    """Which kernel of this package computes the gradients, where its own kernels run."""
    return _plan(case, card, "backward")[0]
