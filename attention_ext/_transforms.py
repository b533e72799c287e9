"""What the registrations of all operators need to know about the dispatcher and the transforms around a call."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["AUTOCAST", "castable", "constant", "forward_mode", "tangents", "why_composed", "wraps"]

AUTOCAST = {
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU),
    "cuda": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
}
_JVP = torch._C._functorch.TransformType.Jvp


def castable(tensor: Tensor, device_type: str) -> bool:
    """Whether an autocast region of this device type casts such an operand."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type


def constant(number: float | None) -> float | None:
    """A number that a graph of torch.compile is compiled for, and compiled anew when it changes.

    For numbers that an operator takes: where one comes of arithmetic with a number that tensors meet as well, the graph would keep
    its first value for ever (pytorch/pytorch#197889). PyTorch's own operators share that, and so do this package's where they are
    called as torch.ops.attention_ext.* with such a number.
    """
    if number is None or not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # imports sympy: 0.3 s that eager calls never need

    value: float = guard_scalar(number)
    return value


def forward_mode(*tensors: Tensor | None) -> bool:
    """Whether a call is differentiated in forward mode.

    PyTorch counts the open levels in Python, but a graph of torch.compile opens its level in C++ alone: there the operands tell, or
    the transform that opened it.
    """
    if forward_ad._current_level >= 0:
        return True
    transforms = torch._C._functorch.get_interpreter_stack()
    if transforms and any(transform.key() == _JVP for transform in transforms):
        return True
    below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther)  # of autograd, which takes them off
    # Releases before 2.13 tell Dynamo alone that they compile.
    traced = torch.compiler.is_compiling() or any(t is not None and wraps(t) for t in tensors)
    return traced and not below and not torch.compiler.is_exporting() and _any_dual(*tensors)


def wraps(tensor: Tensor) -> bool:
    """Whether a tensor's class takes the operators on it into its own hands: a DTensor, or one that is traced."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _any_dual(*tensors: Tensor | None) -> bool:
    return any(t is not None and torch._VF._unpack_dual(t, level=0).tangent is not None for t in tensors)


def tangents(*tensors: Tensor | None) -> bool:
    """Whether one of the operands of a call carries a tangent of forward mode."""
    return forward_mode(*tensors) and _any_dual(*tensors)


def why_composed(*tensors: Tensor | None) -> str | None:
    """Why a call has to be a composition of PyTorch's operators, which every transform knows; None where it need not."""
    if forward_mode(*tensors):
        return "forward-mode AD is open, which the kernels have no derivative for"
    if torch._C._functorch.get_interpreter_stack():
        return "a torch.func transform is active, which the kernels do not support"
    return None
