"""The operator linear_float32, input @ weight.T + bias: its CPU path, fake kernel, autograd, autocast and vmap.

It is accurate to float32 whatever torch's settings for float32 products are. Its gradient is two more products of the same kind, so
it can be differentiated any number of times.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._dispatch import Kernel, redispatch, register_operator
from .._log import log_call, log_wanted
from .._recall import ARRAYS, Known, Sample
from .._torch_private import attempt_first, cpu_precision, function_modes, torch_linear
from .._transforms import autocast_to, below_autocast, why_composed, wraps
from .checks import check_linear_float32

__all__ = ["attempt", "exactly", "log_composed", "log_kernel", "product", "register", "rounds"]

_OPERATOR = torch.ops.attention_ext.linear_float32.default
_KERNEL, _PLAN = Kernel(_OPERATOR), Kernel(torch.ops.attention_ext.linear_plan.default)
_KNOWN = Known()
_Arguments = tuple[Tensor, Tensor, Tensor | None]


def rounds(tensor: Tensor) -> bool:
    """Whether PyTorch may round the operands of float32 products: on CUDA to TF32, on some CPUs to TF32 or bfloat16."""
    return tensor.is_cuda or cpu_precision() not in ("ieee", "none")


def exactly(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """A product by one of PyTorch's functions, at float32's accuracy for float32 operands.

    Where PyTorch may round them, it is computed in float64.
    """
    first = tensors[0]
    if first is not None and first.dtype == torch.float32 and rounds(first):
        return function(*(None if t is None else t.double() for t in tensors)).float()
    return function(*tensors)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T of float32 matrices by linear_float32, of float64 ones by PyTorch."""
    out: Tensor = _OPERATOR(left, right) if left.dtype == torch.float32 else torch_linear(left, right)
    return out


def log_composed(operator: str, input: Tensor, reason: str) -> None:
    log_call(operator, input, "torch", reason)


def log_kernel(operator: str, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> None:
    """The log of a call that a kernel serves, PyTorch's or this package's."""
    if not log_wanted():
        return
    kernel, reason = "torch", f"that is the plan for {input.device.type} tensors"
    if wraps(input):
        kernel, reason = operator, f"a kernel is chosen for what a {type(input).__name__} holds, not for itself"
    elif input.is_cuda:
        kernel, reason = _PLAN(_rows(input), weight, bias)
    log_call(operator, input, kernel, reason)


def _outline(input: Tensor, weight: Tensor, bias: Tensor | None) -> Hashable:
    return input.shape, weight.shape, bias is None, cpu_precision()


def recall(input: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """PyTorch's linear, if a call like this one is known to come to nothing else."""
    if type(input) not in ARRAYS or type(weight) not in ARRAYS:  # others are to see the function, not reads of sizes
        return None
    tensors = (input, weight) if bias is None else (input, weight, bias)
    try:
        run: Callable[..., Tensor] | None = _KNOWN.find(_outline(input, weight, bias), *tensors)
    except (RuntimeError, TypeError):  # of a tensor without sizes, or an argument that is no tensor
        return None
    return run


def _all_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Arguments:
    return input, weight, bias


def attempt(arguments: _Arguments) -> Tensor | None:
    """The result past the dispatcher's keys, if a call like this one is known. Not for code that Dynamo follows."""
    run = None if function_modes() else recall(*arguments)
    return None if run is None else run(*arguments)


def _cpu(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if run := recall(input, weight, bias):
        return run(input, weight, bias)
    check_linear_float32(input, weight, bias)
    tensors = (input, weight) if bias is None else (input, weight, bias)
    this = Sample(_KNOWN, partial(_outline, input, weight, bias), *tensors)
    with below_autocast():
        out = exactly(torch_linear, input, weight, bias)
    if out.is_contiguous() and not rounds(input):
        this.keep(lambda: torch_linear)
    return out.contiguous()


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_linear_float32(input, weight, bias)
    return input.new_empty([*input.shape[:-1], weight.size(0)])


def _rows(tensor: Tensor) -> Tensor:
    """(..., K) as a matrix (rows, K); not by reshape, which cannot tell the rows of a matrix without elements."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


class LinearFloat32(torch.autograd.Function):
    """linear_float32 with a gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_input, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        out: Tensor = _KERNEL(input, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        return (
            None if weight is None else product(grad, weight.t()),
            None if input is None else product(_rows(grad).t(), _rows(input).t()),
            _rows(grad).sum(0) if ctx.needs_input_grad[2] else None,
        )


def _autograd(keyset: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if run := recall(input, weight, bias):
        return run(input, weight, bias)
    check_linear_float32(input, weight, bias)
    if reason := why_composed(input, weight, bias):
        log_composed("linear_float32", input, reason)
        return exactly(torch_linear, input, weight, bias)
    log_kernel("linear_float32", input, weight, bias)
    out: Tensor
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias)):
        out = LinearFloat32.apply(input, weight, bias)
    else:
        out = redispatch(_OPERATOR, keyset, input, weight, bias)
    return out


def _autocast(device_type: str) -> Any:
    """float32 in an autocast region too: half operands are widened, as those of PyTorch's operators that autocast to float32."""

    def cast(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        widen = partial(autocast_to, torch.float32, device_type)
        with below_autocast(device_type):
            return _OPERATOR(widen(input), widen(weight), widen(bias))

    return cast


def _vmap(info: Any, in_dims: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, int]:
    """A mapped input alone is an input with one more leading dim; everything else is a batch of products by PyTorch."""
    at_input, at_weight, at_bias = (*in_dims, None)[:3]  # in_dims leaves out a bias that was not given
    input = input if at_input is None else input.movedim(at_input, 0)
    weight = weight if at_weight is None else weight.movedim(at_weight, 0)
    bias = bias if bias is None or at_bias is None else bias.movedim(at_bias, 0)
    sample = input if at_input is None else input[0]
    check_linear_float32(sample, weight if at_weight is None else weight[0], bias if bias is None or at_bias is None else bias[0])
    if at_weight is None and at_bias is None:
        return _OPERATOR(input, weight, bias), 0
    log_composed("linear_float32", input, "vmap maps weight or bias")
    rows = _rows(sample) if at_input is None else input.unsqueeze(1) if input.dim() == 2 else input.flatten(1, -2)
    out = exactly(torch.matmul, rows, weight.mT)
    if bias is not None:
        out = out + (bias if at_bias is None else bias.unsqueeze(1))
    return out.view(info.batch_size, *sample.shape[:-1], out.size(-1)), 0


def register(library: torch.library.Library) -> None:
    """Registers everything about linear_float32 that is not a CUDA kernel."""
    register_operator(library, "linear_float32", _cpu, _autograd, _fake, partial(log_kernel, "linear_float32"))
    attempt_first(torch.ops.attention_ext.linear_float32, _all_arguments, attempt)
    library.impl("linear_float32", _autocast("cpu"), "AutocastCPU")
    library.impl("linear_float32", _autocast("cuda"), "AutocastCUDA")
    torch.library.register_vmap("attention_ext::linear_float32", _vmap, lib=library)
