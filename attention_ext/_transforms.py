"""What the registrations of all operators need to know about the dispatcher."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["AUTOCAST", "castable", "why_composed"]

AUTOCAST = {
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU),
    "cuda": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
}


def castable(tensor: Tensor, device_type: str) -> bool:
    """Whether an autocast region of this device type casts such an operand."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type


def why_composed() -> str | None:
    """Why a call has to be a composition of PyTorch's operators, which every transform knows; None where it need not."""
    if forward_ad._current_level >= 0:
        return "forward-mode AD is open, which the kernels have no derivative for"
    if torch._C._functorch.get_interpreter_stack():
        return "a torch.func transform is active, which the kernels do not support"
    return None
