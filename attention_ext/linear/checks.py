"""What the linear operators accept; the kernels on the CPU, the fake ones and autograd call the same functions.

All refusals are RuntimeError, but for one row for batch statistics and an eps that is no such thing: ValueError, as in PyTorch.
"""

import functools

import torch
from torch import Tensor

from .._checks import DTYPES, accumulator, check_dense, check_shape, message, refuse, refuse_unless, shape_of, surely, text
from .._libraries import check_cuda_library
from .._torch_private import dispatch_modes, function_modes, jit_traces, transforms

__all__ = ["as_scale", "check_linear_batchnorm_softmax", "check_linear_float32"]


@functools.lru_cache(maxsize=64)
def _number(value: float, dtype: torch.dtype, inference: bool) -> Tensor:
    """A number on the CPU for all calls that have it; in inference mode another one, which no call outside could save."""
    return torch.full((), value, dtype=dtype)


def as_scale(scale: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The scale as the operator takes it beside operands of this dtype and device; what cannot fit is left for it to refuse.

    A number and, as in PyTorch's type promotion, a tensor of integers or of rank 0 do not decide the dtype; one of rank 0 on the
    CPU may stand beside operands elsewhere.
    """
    wide = accumulator(dtype)
    if not isinstance(scale, Tensor):
        if torch.compiler.is_compiling():  # a graph freezes the number of full, not that of a product (pytorch/pytorch#197889)
            return torch.ones((), dtype=wide, device=device) * scale
        # Elsewhere it would be a wrapper, or a node of a graph.
        plain = not (dispatch_modes() or function_modes() or transforms() or jit_traces())
        if plain and device.type == "cpu":
            return _number(float(scale), wide, torch.is_inference_mode_enabled())
        return torch.full((), float(scale), dtype=wide, device=device)
    if scale.dim() == 0 and scale.is_cpu:
        scale = scale.to(device)
    decides = scale.dtype.is_complex or (scale.dtype.is_floating_point and scale.dim() > 0)
    return scale if decides or scale.dtype in (dtype, wide) else scale.to(wide)


def _check_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """weight (N, K) and bias (N,) for an input (..., K), all of its dtype and device."""
    check_cuda_library(input.device, "input")
    check_dense("weight", weight)
    if weight.dtype != input.dtype:
        refuse("weight", f"the input's dtype {input.dtype}", weight.dtype)
    if weight.device != input.device:
        refuse("weight", f"the input's device {input.device}", weight.device)
    if weight.dim() != 2:
        refuse("weight", "a matrix (features, K)", f"{shape_of(weight)} of rank {weight.dim()}")
    K = input.size(-1)
    if not surely(weight.size(1) == K):
        refuse_unless(weight.size(1) == K, "weight", f"a matrix of as many columns as the input's K = {K}", weight)
    if bias is not None:
        check_shape("bias", bias, [weight.size(0)], input.dtype, input.device)


def check_linear_float32(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuses what linear_float32 is not defined for."""
    check_dense("input", input)
    if input.dtype != torch.float32:
        refuse("input", "dtype float32", input.dtype)
    if input.dim() < 1:
        refuse("input", "rank 1 or more", f"{shape_of(input)} of rank {input.dim()}")
    _check_product(input, weight, bias)


def _check_feature(name: str, tensor: Tensor, input: Tensor, shape: list[int]) -> None:
    """A tensor of this shape, of the input's dtype or the accumulator's, on the input's device."""
    check_dense(name, tensor)
    wide = accumulator(input.dtype)
    if tensor.dtype not in (input.dtype, wide):
        refuse(name, f"dtype {wide}" if wide == input.dtype else f"the input's dtype {input.dtype} or {wide}", tensor.dtype)
    check_shape(name, tensor, shape, tensor.dtype, input.device)


def _check_scale(scale: Tensor, input: Tensor, features: int) -> None:
    check_dense("scale", scale)
    fits = scale.dim() == 0 or (scale.dim() == 1 and (surely(scale.size(0) == 1) or scale.size(0) == features))
    if not surely(fits):
        refuse_unless(fits, "scale", f"shape (), (1,) or {text([features])}", scale)
    _check_feature("scale", scale, input, list(scale.shape))


def check_linear_batchnorm_softmax(
    input: Tensor, weight: Tensor, bias: Tensor | None, bn_weight: Tensor | None, bn_bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, scale: Tensor, training: bool, eps: float,
) -> None:  # fmt: skip
    """Refuses what linear_batchnorm_softmax is not defined for."""
    check_dense("input", input)
    if input.dtype not in DTYPES:
        refuse("input", "dtype float16, bfloat16, float32 or float64", input.dtype)
    if input.dim() != 2:
        refuse("input", "a matrix (rows, K)", f"{shape_of(input)} of rank {input.dim()}")
    _check_product(input, weight, bias)
    features = weight.size(0)
    if (running_mean is None) != (running_var is None):
        missing, other = ("running_mean", "running_var") if running_mean is None else ("running_var", "running_mean")
        refuse(missing, f"a tensor together with {other}", None)
    named = {"bn_weight": bn_weight, "bn_bias": bn_bias, "running_mean": running_mean, "running_var": running_var}
    for name, tensor in named.items():
        if tensor is not None:
            _check_feature(name, tensor, input, [features])
    _check_scale(scale, input, features)
    if not (eps > 0.0 or (eps == 0.0 and not training)):
        raise ValueError(
            message("eps", "a positive number when training" if training else "a number that is not negative", str(eps))
        )
    if training:
        rows = input.size(0)
        torch._check_value(rows != 1, lambda: message("input", "more than 1 value per channel when training", shape_of(input)))
    elif running_mean is None:
        refuse("running_mean", "a tensor where training is False", None)
