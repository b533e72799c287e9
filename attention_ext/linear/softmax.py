"""The operator linear_batchnorm_softmax: its CPU path, fake kernel, autograd, autocast and vmap.

    linear = input @ weight.T + bias                        (M, F)
    mean, var = those of the columns of linear (biased; NaN where M = 0) when training, else the running ones
    out = softmax(scale * ((linear - mean) / sqrt(var + eps) * bn_weight + bn_bias)) over the features

All of it in float32 (float64 for float64). The operator changes nothing: who calls it updates the running statistics.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._checks import accumulator, surely
from .._dispatch import Kernel, redispatch, register_operator
from .._recall import ARRAYS, Known, Sample
from .._torch_private import attempt_first, function_modes, kernel_of, softmax_backward, torch_linear
from .._transforms import autocast_to, below_autocast, constant, why_composed
from .checks import as_scale, check_linear_batchnorm_softmax
from .product import exactly, log_composed, log_kernel, product

__all__ = ["call_and_update", "register"]

_OPERATOR = torch.ops.attention_ext.linear_batchnorm_softmax.default
_KERNEL = Kernel(_OPERATOR)
_BATCH_NORM = kernel_of(torch.ops.attention_ext._batch_norm.default, "CPU")
_Four = tuple[Tensor, Tensor, Tensor, Tensor]
_KNOWN = Known()


def _normalised(linear: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return (linear - mean) * torch.rsqrt(var + eps)


def _affine(normalised: Tensor, bn_weight: Tensor | None, bn_bias: Tensor | None) -> Tensor:
    out = normalised if bn_weight is None else normalised * bn_weight.to(normalised.dtype)
    return out if bn_bias is None else out + bn_bias.to(normalised.dtype)


def _composed(
    input: Tensor, weight: Tensor, bias: Tensor | None, bn_weight: Tensor | None, bn_bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, scale: Tensor, training: bool, eps: float,
) -> _Four:  # fmt: skip
    """The operator out of PyTorch's, which every transform can differentiate and map."""
    check_linear_batchnorm_softmax(input, weight, bias, bn_weight, bn_bias, running_mean, running_var, scale, training, eps)
    acc = accumulator(input.dtype)
    linear = exactly(torch_linear, input.to(acc), weight.to(acc), None if bias is None else bias.to(acc))
    if not training and running_mean is not None and running_var is not None:
        mean, var = (t.detach().to(acc, copy=True, memory_format=torch.contiguous_format) for t in (running_mean, running_var))
    elif surely(linear.size(0) == 0):  # var_mean would warn
        mean, var = linear.mean(0), linear.mean(0)
    else:
        var, mean = torch.var_mean(linear, 0, correction=0)
    x = _affine(_normalised(linear, mean, var, eps), bn_weight, bn_bias)
    return torch.softmax(x * scale.to(acc), -1).to(input.dtype), mean, var, linear


def _outline(
    input: Tensor, weight: Tensor, bias: Tensor | None, bn_weight: Tensor | None, bn_bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, scale: Tensor, training: bool, eps: float,
) -> Hashable:  # fmt: skip
    absent = bias is None, bn_weight is None, bn_bias is None, running_mean is None, running_var is None
    return input.shape, weight.shape, absent, training, eps


def recall(*args: Any) -> Callable[..., _Four] | None:
    """What runs a call of the operator like this one, if that is known: on the CPU."""
    if type(args[0]) not in ARRAYS or type(args[1]) not in ARRAYS:  # others are to see the function, not reads of sizes
        return None
    try:
        run: Callable[..., _Four] | None = _KNOWN.find(_outline(*args), *[tensor for tensor in args[:8] if tensor is not None])
    except (RuntimeError, TypeError):  # of a tensor without sizes, or an argument that is no tensor
        return None
    return run


def _all_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None, bn_weight: Tensor | None, bn_bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, scale: Tensor, training: bool, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    return input, weight, bias, bn_weight, bn_bias, running_mean, running_var, scale, training, eps


def attempt(args: tuple[Any, ...]) -> _Four | None:
    """The result past the dispatcher's keys, if a call like this one is known. Not for code that Dynamo follows."""
    run = None if function_modes() else recall(*args)
    return None if run is None else run(*args)


def _run_on_cpu(
    input: Tensor, weight: Tensor, bias: Tensor | None, bn_weight: Tensor | None, bn_bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, scale: Tensor, training: bool, eps: float,
) -> _Four:  # fmt: skip
    """The operator for arguments that are checked, in one pass over (M, F) between PyTorch's linear and its softmax."""
    dtype, acc = input.dtype, accumulator(input.dtype)
    if dtype != acc:
        input, weight, bias = input.to(acc), weight.to(acc), None if bias is None else bias.to(acc)
    linear = exactly(torch_linear, input, weight, bias).contiguous()
    running = (None, None) if training else (running_mean, running_var)
    columns = (None if t is None else t if t.dtype == acc else t.to(acc) for t in (bn_weight, bn_bias, *running, scale))
    x, mean, var = _BATCH_NORM(linear, *columns, eps)
    return torch.softmax(x, -1, out=x).to(dtype), mean, var, linear  # each row is read before it is written


def _cpu(*args: Any) -> _Four:
    if run := recall(*args):
        return run(*args)
    check_linear_batchnorm_softmax(*args)
    with below_autocast():
        if args[0].size(0) == 0:  # which have no mean
            out, mean, var, linear = _composed(*args)
            return out.contiguous(), mean, var, linear.contiguous()
        result = _run_on_cpu(*args)
    this = Sample(_KNOWN, partial(_outline, *args), *[tensor for tensor in args[:8] if tensor is not None])
    this.keep(lambda: _run_on_cpu)
    return result


def _fake(*args: Any) -> _Four:
    check_linear_batchnorm_softmax(*args)
    input, weight = args[:2]
    acc, shape = accumulator(input.dtype), [input.size(0), weight.size(0)]
    mean, var = (input.new_empty(shape[1:], dtype=acc) for _ in range(2))
    return input.new_empty(shape), mean, var, input.new_empty(shape, dtype=acc)


def _sum_to(tensor: Tensor, like: Tensor) -> Tensor:
    """The sum over the rows (M, F) that goes to a tensor of shape (), (1,) or (F,)."""
    return tensor.sum_to_size(like.shape).to(like.dtype)


class LinearBatchNormSoftmax(torch.autograd.Function):
    """The operator with a gradient in every input but the running statistics, which PyTorch does not differentiate either.

    All four results are differentiable, and the backward is made of differentiable operators on what was saved: second derivatives
    come out right.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> _Four:
        out, mean, var, linear = _KERNEL(*args)
        input, weight, bias, bn_weight, bn_bias, _, _, scale, ctx.training, ctx.eps = args
        if not ctx.training:
            ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.bias_dtype = input.dtype, None if bias is None else bias.dtype
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        input, weight = input if needs_weight else None, weight if needs_input else None
        ctx.save_for_backward(input, weight, bn_weight, bn_bias, scale, mean, var, linear)
        return out, mean, var, linear

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, grad_mean, grad_var, grad_linear = grads
        input, weight, bn_weight, bn_bias, scale, mean, var, linear = ctx.saved_tensors
        needs, acc, rows = ctx.needs_input_grad, linear.dtype, linear.size(0)
        grad_bn_weight, grad_bn_bias, grad_scale = None, None, None
        parts = [] if grad_linear is None else [grad_linear]
        if grad_out is not None:
            normalised, wide_scale = _normalised(linear, mean, var, ctx.eps), scale.to(acc)
            x = _affine(normalised, bn_weight, bn_bias)
            weights = torch.softmax(x * wide_scale, -1)
            grad = softmax_backward(grad_out.to(acc), weights, -1, acc)
            if needs[7]:
                grad_scale = _sum_to(grad * x, scale)
            grad = grad * wide_scale
            if bn_bias is not None and needs[4]:
                grad_bn_bias = _sum_to(grad, bn_bias)
            if bn_weight is not None:
                grad_bn_weight = _sum_to(grad * normalised, bn_weight) if needs[3] else None
                grad = grad * bn_weight.to(acc)
            if ctx.training:
                grad = grad - grad.mean(0) - normalised * (grad * normalised).mean(0)
            parts.append(grad * torch.rsqrt(var + ctx.eps))
        if ctx.training and grad_mean is not None:
            parts.append((grad_mean / rows).expand_as(linear))
        if ctx.training and grad_var is not None:
            parts.append((linear - mean) * (grad_var * 2.0 / rows))
        if not parts or not any(needs[:3]):
            return None, None, None, grad_bn_weight, grad_bn_bias, None, None, grad_scale, None, None
        grad = sum(parts[1:], parts[0])
        return (
            product(grad, weight.to(acc).t()).to(ctx.dtype) if needs[0] else None,
            product(grad.t(), input.to(acc).t()).to(ctx.dtype) if needs[1] else None,
            grad.sum(0).to(ctx.bias_dtype) if needs[2] else None,
            grad_bn_weight, grad_bn_bias, None, None, grad_scale, None, None,
        )  # fmt: skip


def _autograd(keyset: Any, *args: Any) -> _Four:
    if run := recall(*args):
        return run(*args)
    if reason := why_composed(*args[:5], args[7]):
        log_composed("linear_batchnorm_softmax", args[0], reason)
        return _composed(*args)
    check_linear_batchnorm_softmax(*args)
    log_kernel("linear_batchnorm_softmax", *args)
    differentiable = (*args[:5], args[7])
    out: _Four
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
        out = LinearBatchNormSoftmax.apply(*args)
    else:
        out = redispatch(_OPERATOR, keyset, *args)
    return out


def _autocast(device_type: str) -> Any:
    """In an autocast region: the product's operands in the region's dtype, all else in float32, the output in the dtype that
    softmax(scale * bn(linear(input))) has there: float32 on CUDA, on the CPU what scale and the product promote to."""

    def cast(*args: Any) -> _Four:
        dtypes = [torch.get_autocast_dtype(device_type)] * 3 + [torch.float32] * 5
        with below_autocast(device_type):
            tensors = [autocast_to(dtype, device_type, t) for dtype, t in zip(dtypes, args, strict=False)]
            out, mean, var, linear = _OPERATOR(*tensors, *args[8:])
            if out.dtype != torch.float64:
                out = out.to(torch.float32 if device_type == "cuda" else torch.result_type(out, args[7]))
        return out, mean, var, linear

    return cast


def _batched(*args: Any) -> _Four:
    """Under vmap: PyTorch's operators, each of which knows how it is mapped."""
    log_composed("linear_batchnorm_softmax", args[0], "vmap is active")
    return _composed(*args)


def _update(running: Tensor, batch: Tensor, factor: float | Tensor) -> None:
    """running = (1 - factor) * running + factor * batch, in place, computed in the dtype of the batch's statistic.

    Not by add_'s alpha: a compiled program would keep the number of its first call.
    """
    batch = batch.detach()  # not under no_grad: a region in an exported program, which not every release of torch can load
    if running.dtype == batch.dtype:
        running.mul_(1.0 - factor).add_(batch * factor)
    else:
        running.copy_(running.to(batch.dtype) * (1.0 - factor) + batch * factor)


def call_and_update(
    input: Tensor, weight: Tensor, bias: Tensor | None, bn_weight: Tensor | None, bn_bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, scale: Tensor | float, training: bool, momentum: float | None,
    eps: float, num_batches_tracked: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The operator and, when training, the update of what it leaves alone: running statistics and the count of batches.

    momentum None, beside num_batches_tracked: the running statistics become the mean of those of all batches so far. An empty batch
    is counted and leaves the running statistics alone, as nn.BatchNorm1d does.
    """
    scale = as_scale(scale, input.dtype, input.device)
    args = input, weight, bias, bn_weight, bn_bias, running_mean, running_var, scale, training, constant(eps)
    out: Tensor
    out, mean, var, _ = (None if is_compiling() else attempt(args)) or _OPERATOR(*args)
    factor: float | Tensor = 0.0 if momentum is None else momentum
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum is None:
            factor = 1.0 / num_batches_tracked.to(mean.dtype)
    rows = input.size(0)
    if training and running_mean is not None and running_var is not None and rows > 0:
        _update(running_mean, mean, factor)
        _update(running_var, var * (rows / (rows - 1)), factor)
    return out


def register(library: torch.library.Library) -> None:
    """Registers everything about linear_batchnorm_softmax that is not a CUDA kernel."""
    name = "linear_batchnorm_softmax"
    register_operator(library, name, _cpu, _autograd, _fake, partial(log_kernel, name))
    attempt_first(torch.ops.attention_ext.linear_batchnorm_softmax, _all_arguments, attempt)
    library.impl(name, _autocast("cpu"), "AutocastCPU")
    library.impl(name, _autocast("cuda"), "AutocastCUDA")
    library.impl(name, _batched, "FuncTorchBatched")
