"""Every private name of torch that the package uses, and what for; all of them are there in torch 2.10 to 2.14.

Nothing else in the package names one, so that a release that moves one is met here.
"""

import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

# PyTorch's operators themselves, not those of torch.nn.functional at the time of a call: this package's may stand in their place.
torch_sdpa: Any = torch._C._nn.scaled_dot_product_attention
torch_linear: Any = torch._C._nn.linear
# The fused operator's MATH back end, which supports every transform, without the context manager that asks for it.
math_attention: Any = torch.ops.aten._scaled_dot_product_attention_math.default
# Two of the back ends on CUDA by name: they look at no switch and check next to nothing, and tracing keeps them as they are.
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
# What nn.MultiheadAttention and nn.TransformerEncoderLayer run in evaluation, unless torch.backends.mha says otherwise.
FAST_PATHS: Any = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)
# How PyTorch may round the operands of float32 products on the CPU: "none" and "ieee" for not at all.
cpu_precision: Callable[[], str] = functools.partial(torch._C._get_fp32_precision_getter, "mkldnn", "matmul")
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


def keyset_of(tensors: Iterable[Tensor | None]) -> Any:
    """The keys by which the dispatcher runs a call of these tensors here and now."""
    keys = torch._C._dispatch_tls_local_include_set()
    for tensor in tensors:
        keys = keys if tensor is None else keys | torch._C._dispatch_keys(tensor)
    return keys - torch._C._dispatch_tls_local_exclude_set()


_ALWAYS_ADDED = torch._C._dispatch_tls_local_include_set() | keyset("BackendSelect") | keyset("ADInplaceOrView")


def keys_are_added() -> bool:
    """Whether this thread adds keys to all calls, as modes and tracers do; also while a mode's own handler runs."""
    added: bool = torch._C._dispatch_tls_local_include_set() | _ALWAYS_ADDED != _ALWAYS_ADDED
    return added


AUTOCAST = {"cpu": keyset("AutocastCPU"), "cuda": keyset("AutocastCUDA")}
BELOW_AUTOGRAD: Any = torch._C._after_ADInplaceOrView_keyset  # the keys after those of autograd


def apply_without_transforms(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The apply of an autograd.Function where no transform of torch.func is active: before 2.14 that is asked in Python first."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def kernel_of(operator: Any, key: str) -> Callable[..., Any]:
    """An operator's kernel by one dispatch key: operator.redispatch without its Python."""
    return functools.partial(operator._handle.redispatch_boxed, keyset(key))


def attempt_first(packet: Any, all_arguments: Any, attempt: Callable[[Any], Any]) -> None:
    """Calls torch.ops.attention_ext.NAME(...) from Python are what `attempt` makes of their arguments, unless that is None, before
    the dispatcher sees them.

    all_arguments: of the operator's signature, gives all arguments in order. Code that looks at packets sees no other object than
    before: the same one, of the same operator.
    """
    by_position, by_name = all_arguments.__defaults__ or (), all_arguments.__kwdefaults__ or {}
    least = all_arguments.__code__.co_argcount - len(by_position)
    # By how many arguments are given by position, and none by name: the others.
    others = {least + i: (*by_position[i:], *by_name.values()) for i in range(len(by_position) + 1)}.get
    through_dispatcher: Any = torch._ops.OpOverloadPacket.__call__

    class AttemptingPacket(torch._ops.OpOverloadPacket):  # type: ignore[type-arg, unused-ignore]
        def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
            if not kwargs and (left_out := others(len(args))) is not None:
                out = attempt(args + left_out)
            else:
                try:
                    arguments = all_arguments(*args, **kwargs)
                except TypeError:  # of names or a number of arguments that the schema does not know: the operator says so
                    return through_dispatcher(self, *args, **kwargs)
                out = attempt(arguments)
            return through_dispatcher(self, *args, **kwargs) if out is None else out

    packet.__class__ = AttemptingPacket


def attempt_overload(overload: Any, attempting: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Calls torch.ops.attention_ext.NAME.default(...) from Python run what `attempting` makes of the way to the dispatcher.

    Compiled programs call so. The overload stays the object that it was, of its class, which Inductor asks for. Releases before
    2.14 make its hash of this way, so nothing may have asked for that before.
    """
    overload._op = attempting(overload._op)


def runs_host_code(operator: Any, *arguments: Any) -> Any:
    """An operator without tensors, also while tensors are fake or traced: its kernel by the key that one such as it has."""
    return operator.redispatch(keyset("CPU"), *arguments)


def argument_names(operator: Any, kwarg_only: bool) -> list[str]:
    """The names of an operator's arguments: those that may be given by position, or the others."""
    return [argument.name for argument in operator._schema.arguments if argument.kwarg_only == kwarg_only]


def leading_tensors(operator: Any) -> int:
    """How many of an operator's first arguments are tensors, or None in the place of one."""
    is_tensor = [str(argument.type) in ("Tensor", "Optional[Tensor]") for argument in operator._schema.arguments]
    return (*is_tensor, False).index(False)


def transforms() -> Sequence[Any]:
    """The transforms of torch.func that are active, the outermost first."""
    return torch._C._functorch.get_interpreter_stack() or ()


def within_vmap(active: Sequence[Any]) -> bool:
    return any(transform.key() == torch._C._functorch.TransformType.Vmap for transform in active)


def within_forward_mode(active: Sequence[Any]) -> bool:
    """Whether PyTorch counts an open level of forward-mode AD, or a transform has opened one."""
    return forward_mode_is_open() or any(t.key() == torch._C._functorch.TransformType.Jvp for t in active)


def autograd_is_off() -> bool:
    """Whether a call is made below autograd, which takes the tangents off its operands."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther)


def is_dual(tensor: Tensor) -> bool:
    """Whether a tensor carries a tangent; forward_ad.unpack_dual asks for a level that is open in Python."""
    return torch._VF._unpack_dual(tensor, level=0).tangent is not None


def jit_traces() -> bool:
    """Whether torch.jit.trace is at work."""
    return torch._C._get_tracing_state() is not None


def dispatch_modes() -> int:
    """How many TorchDispatchModes of Python are active."""
    return torch._C._len_torch_dispatch_stack()


def is_traced(tensor: Tensor) -> bool:
    """Whether it stands for a tensor of the program that is being traced."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def alike(*tensors: Tensor, any_size: bool = False) -> Callable[..., bool]:
    """PyTorch's guard of a compiled graph: whether as many tensors, here and now, are to the dispatcher like these.

    In class, dtype, device, sizes, strides, requires_grad, and the dispatch keys of tensor and thread (layout, negation, modes but
    those of FakeTensor, make_fx and functionalisation, transforms, autocast, tracing, inference mode); not in grad mode. Quicker
    than to read the sizes of two tensors, and holds none. any_size: sizes and strides may be others, the rank may not.
    """
    if len({id(tensor) for tensor in tensors}) < len(tensors):  # which the guard takes for another call
        checks = [alike(tensor, any_size=any_size) for tensor in tensors]
        return lambda *others: all(check(other) for check, other in zip(checks, others, strict=True))
    sizes: Any
    strides: Any
    if any_size:
        sizes = strides = [[None] * tensor.dim() for tensor in tensors]
    else:
        sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


_TensorGuards: Any = torch._C._dynamo.guards.TensorGuards
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled
# How many TorchFunctionModes are active; the dispatcher does not know of them.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def forward_mode_is_open() -> bool:
    """Whether PyTorch counts an open level of forward-mode AD."""
    return forward_ad._current_level >= 0


_F = TypeVar("_F", bound=Callable[..., Any])


def constant_in_programs(function: _F) -> _F:
    """torch.compiler.assume_constant_result: Dynamo calls it where it traces a call of it. Without the import of Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_programs
def within_sdpa_kernel() -> bool:
    """Whether a call stands inside torch.nn.attention.sdpa_kernel: nothing else turns off the back end of other devices."""
    return not torch._C._get_overrideable_sdp_enabled()


def without_protocol(function: Any) -> Any:
    """A function of PyTorch's that does not ask modes and subclasses for itself: its own code, with no for an answer.

    None where this release of PyTorch asks in another way than by these two functions of torch.overrides.
    """
    asking = {name for name in function.__code__.co_names if "torch_function" in name} - {"handle_torch_function"}
    if not asking <= {"has_torch_function", "has_torch_function_unary"} or function.__closure__ is not None:
        return None
    scope = function.__globals__ | dict.fromkeys(asking, lambda tensors: False)
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class SdpSettings(NamedTuple):
    """What a user may set for PyTorch's attention in the whole process."""

    cudnn: bool
    flash: bool
    efficient: bool
    order: tuple[int, ...]  # of torch.nn.attention.SDPBackend
    deterministic: bool
    warn_only: bool  # what is not deterministic only warns
    flash_replaced: bool  # by FlashAttention 3 or 4, which torch.nn.attention puts in the place of the operator


def sdp_settings() -> tuple[Any, ...]:
    """The fields of SdpSettings as they are now; a plain tuple, which costs the host of each call less."""
    deterministic = _is_deterministic()
    return (
        _takes_cudnn(),
        _takes_flash(),
        _takes_efficient(),
        tuple(_priority_order()),
        deterministic,
        deterministic and _only_warns(),
        _FLASH_REGISTRY is not None and _FLASH_REGISTRY._FLASH_ATTENTION_ACTIVE is not None,
    )


_takes_cudnn, _takes_flash = torch._C._get_cudnn_sdp_enabled, torch._C._get_flash_sdp_enabled
_takes_efficient, _priority_order = torch._C._get_mem_efficient_sdp_enabled, torch._C._get_sdp_priority_order
_is_deterministic, _only_warns = torch._C._get_deterministic_algorithms, torch._C._get_deterministic_algorithms_warn_only
_FLASH_REGISTRY: Any = sys.modules.get("torch.nn.attention._registry")
if not hasattr(_FLASH_REGISTRY, "_FLASH_ATTENTION_ACTIVE"):  # of releases where nothing can replace it
    _FLASH_REGISTRY = None


@functools.cache
def _cudnn_would_come_first() -> bool:
    version = torch.backends.cudnn.version()
    return version is not None and version > 91500 and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"


def cudnn_comes_first(order: tuple[int, ...]) -> bool:
    """Whether PyTorch's operator tries cuDNN, flash, efficient and its MATH back end in this order on compute capability 9.0.

    PyTorch puts cuDNN first in the first call on such a card, if it is new enough (sdp_utils.cpp, priority_order).
    """
    return order == (3, 1, 2, 0, 4) or (order == (1, 2, 0, 3, 4) and _cudnn_would_come_first())


def chosen_by_torch(*arguments: Any, **options: Any) -> str:
    """The back end that PyTorch's operator takes for these arguments."""
    return ("math", "flash", "efficient", "cudnn", "overrideable")[torch._fused_sdp_choice(*arguments, **options)]


def module_hooks(module: torch.nn.Module) -> tuple[Any, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def tell_calls_apart(dtensor: Any, operator: Any) -> None:
    """DTensor keeps its decisions, and tells calls apart by operands and integers alone; here flags and names decide as well."""
    told_apart = dtensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator]
    told_apart.static_argnum = 0
    told_apart.static_kwargkey = argument_names(operator, kwarg_only=True)
