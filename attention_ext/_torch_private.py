"""Every private name of torch that the package uses, and what for; all of them are there in torch 2.10 to 2.14.

Nothing else in the package names one, so that a release that moves one is met here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# PyTorch's operators themselves, not those of torch.nn.functional at the time of a call: this package's may stand in their place.
torch_sdpa: Any = torch._C._nn.scaled_dot_product_attention
torch_linear: Any = torch._C._nn.linear
# The fused operator's MATH back end, which supports every transform, without the context manager that asks for it.
math_attention: Any = torch.ops.aten._scaled_dot_product_attention_math.default
# The derivative of softmax from its result, as PyTorch's own backward pass calls it.
softmax_backward: Any = torch._softmax_backward_data
# The __torch_function__ of a class that is what its data is.
plain_torch_function: Any = torch._C._disabled_torch_function_impl

# The dispatcher: sets of keys, and guards that switch keys off while a function of the package calls an operator again.
below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd
below_keys: Callable[[Any], Any] = torch._C._ExcludeDispatchKeyGuard


def keyset(name: str) -> Any:
    """The set of one dispatch key, by its name."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


AUTOCAST = {"cpu": keyset("AutocastCPU"), "cuda": keyset("AutocastCUDA")}
BELOW_AUTOGRAD: Any = torch._C._after_ADInplaceOrView_keyset  # the keys after those of autograd


def runs_host_code(operator: Any, *arguments: Any) -> Any:
    """An operator without tensors, also while tensors are fake or traced: its kernel by the key that one such as it has."""
    return operator.redispatch(keyset("CPU"), *arguments)


def argument_names(operator: Any, kwarg_only: bool) -> list[str]:
    """The names of an operator's arguments: those that may be given by position, or the others."""
    return [argument.name for argument in operator._schema.arguments if argument.kwarg_only == kwarg_only]


def transforms() -> Sequence[Any]:
    """The transforms of torch.func that are active, the outermost first."""
    return torch._C._functorch.get_interpreter_stack() or ()


def within_vmap(active: Sequence[Any]) -> bool:
    return any(transform.key() == torch._C._functorch.TransformType.Vmap for transform in active)


def within_forward_mode(active: Sequence[Any]) -> bool:
    """Whether PyTorch counts an open level of forward-mode AD, or a transform has opened one."""
    return forward_ad._current_level >= 0 or any(t.key() == torch._C._functorch.TransformType.Jvp for t in active)


def autograd_is_off() -> bool:
    """Whether a call is made below autograd, which takes the tangents off its operands."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther)


def is_dual(tensor: Tensor) -> bool:
    """Whether a tensor carries a tangent; forward_ad.unpack_dual asks for a level that is open in Python."""
    return torch._VF._unpack_dual(tensor, level=0).tangent is not None


def module_hooks(module: torch.nn.Module) -> tuple[Any, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def tell_calls_apart(dtensor: Any, operator: Any) -> None:
    """DTensor keeps its decisions, and tells calls apart by operands and integers alone; here flags and names decide as well."""
    told_apart = dtensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator]
    told_apart.static_argnum = 0
    told_apart.static_kwargkey = argument_names(operator, kwarg_only=True)
