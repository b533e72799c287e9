"""What the registrations of all operators need to know about the dispatcher and the transforms around a call."""

from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ._torch_private import AUTOCAST, autograd_is_off, below_keys, is_dual, transforms, within_forward_mode

__all__ = ["autocast_to", "below_autocast", "constant", "forward_mode", "tangents", "why_composed", "wraps"]


def below_autocast(device_type: str = "cpu") -> Any:
    """Inside, operators keep the dtypes that they are given, also in a backward pass within an autocast region."""
    return below_keys(AUTOCAST[device_type])


def autocast_to(dtype: torch.dtype, device_type: str, tensor: Any) -> Any:
    """An operand in an autocast region of this device type, which leaves float64, other devices and None alone."""
    casts = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if casts and tensor.device.type == device_type else tensor


_Number = TypeVar("_Number", bound=float | None)


def constant(number: _Number) -> _Number:
    """A number that a graph of torch.compile is compiled for, and compiled anew when it changes.

    For numbers that an operator takes: where one comes of arithmetic with a number that tensors meet as well, the graph would keep
    its first value for ever (pytorch/pytorch#197889). PyTorch's own operators share that, and so do this package's where they are
    called as torch.ops.attention_ext.* with such a number.
    """
    if number is None or not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # imports sympy: 0.3 s that eager calls never need

    value: _Number = cast(Any, guard_scalar(number))
    return value


def forward_mode(*tensors: Tensor | None) -> bool:
    """Whether a call is differentiated in forward mode.

    PyTorch counts the open levels in Python, but a graph of torch.compile opens its level in C++ alone: there the operands tell, or
    the transform that opened it.
    """
    if within_forward_mode(transforms()):
        return True
    # Releases before 2.13 tell Dynamo alone that they compile.
    traced = torch.compiler.is_compiling() or any(t is not None and wraps(t) for t in tensors)
    return traced and not autograd_is_off() and not torch.compiler.is_exporting() and _any_dual(*tensors)


def wraps(tensor: Tensor) -> bool:
    """Whether a tensor's class takes the operators on it into its own hands: a DTensor, or one that is traced."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _any_dual(*tensors: Tensor | None) -> bool:
    return any(t is not None and is_dual(t) for t in tensors)


def tangents(*tensors: Tensor | None) -> bool:
    """Whether one of the operands of a call carries a tangent of forward mode."""
    return forward_mode(*tensors) and _any_dual(*tensors)


def why_composed(*tensors: Tensor | None) -> str | None:
    """Why a call has to be a composition of PyTorch's operators, which every transform knows; None where it need not."""
    if forward_mode(*tensors):
        return "forward-mode AD is open, which the kernels have no derivative for"
    if transforms():
        return "a torch.func transform is active, which the kernels do not support"
    return None
