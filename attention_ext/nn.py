"""Modules that wrap PyTorch's own and run the fused operators."""

from typing import Any

from torch import Tensor, nn

from ._checks import message, shape_of, text
from ._overrides import handle_torch_function, overridden
from ._torch_private import module_hooks
from .linear.checks import as_scale
from .linear.softmax import call_and_update

__all__ = ["LinearBatchNormSoftmax", "linear_batchnorm_softmax"]


def _check_plain(name: str, module: nn.Module, kind: Any) -> None:
    """Refuses a module whose own forward would do something else: it is never called."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        raise TypeError(message(name, f"an nn.{kind.__name__} or a subclass with the same forward", type(module).__name__))
    if any(len(registered) > 0 for registered in module_hooks(module)) or "forward" in module.__dict__:
        raise RuntimeError(message(name, "a module without hooks, since its forward is not called", "one with hooks"))


def linear_batchnorm_softmax(input: Tensor, linear: nn.Linear, bn: nn.BatchNorm1d, scale: Tensor | float) -> Tensor:
    """softmax(scale * bn(linear(input)), -1): the forward of LinearBatchNormSoftmax as a function of its modules.

    It is what torch.fx records of the module, with `linear` and `bn` as submodules: their mode, parameters and buffers are read
    when the graph runs. attention_ext.linear_batchnorm_softmax is the function of tensors.
    """
    if overridden(input, scale):
        result: Tensor = handle_torch_function(linear_batchnorm_softmax, (input, scale), input, linear, bn, scale)
        return result
    _check_plain("linear", linear, nn.Linear)
    _check_plain("bn", bn, nn.BatchNorm1d)
    update = bn.training and bn.track_running_stats and bn.running_mean is not None
    kept = not bn.training or update
    return call_and_update(
        input,
        linear.weight,
        linear.bias,
        bn.weight,
        bn.bias,
        bn.running_mean if kept else None,
        bn.running_var if kept else None,
        scale,
        bn.training or (bn.running_mean is None and bn.running_var is None),
        bn.momentum,
        bn.eps,
        bn.num_batches_tracked if update else None,
    )


class LinearBatchNormSoftmax(nn.Module):
    """softmax(scale * bn(linear(input)), -1) by attention_ext.linear_batchnorm_softmax.

    Args:
        linear: nn.Linear, K to F features.
        bn: nn.BatchNorm1d of F features, with any of its switches.
        scale: a number, or a tensor of shape (), (1,) or (F,). A Parameter is trained; any other tensor, or a number, is a buffer.
            A tensor of integers, or one of rank 0 and another dtype, becomes one of float32 (float64 beside float64).

    The three are shared, not copied, and read at each call: what happens to `linear` and `bn` outside happens here (also
    parametrizations, .to(), loading a state). The state holds those of the two under "linear." and "bn.", and "scale".
    The mode is that of `bn`: bn.eval() alone suffices. In training mode the output is normalised with the batch's statistics, and
    the running ones are updated as nn.BatchNorm1d does; it counts an empty batch and leaves them alone.

    Hooks of wrapped modules are refused; global module hooks see this module alone. torch.jit.script is not supported.

    Shape: input (M, K) -> (M, F). Input and linear of one dtype; bn and scale of that or float32. The output is in the input's
    dtype, where PyTorch's chain promotes to that of scale.

    Raises:
        ValueError: bn.num_features is not linear.out_features; one row for batch statistics; a negative bn.eps, or 0 for batch
            statistics.
        TypeError: a module that is not an nn.Linear or an nn.BatchNorm1d, or a subclass with a forward of its own
            (nn.SyncBatchNorm: its statistics are those of all processes).
        RuntimeError: a wrapped module with hooks, which would not run; anything that the operator refuses.
    """

    linear: nn.Linear
    bn: nn.BatchNorm1d
    scale: Tensor

    def __init__(self, linear: nn.Linear, bn: nn.BatchNorm1d, scale: Tensor | float) -> None:
        super().__init__()
        if isinstance(linear, nn.LazyLinear):  # a plain nn.Linear once it has run
            raise TypeError(message("linear", "initialised parameters", "a lazy module that has not run yet"))
        _check_plain("linear", linear, nn.Linear)
        _check_plain("bn", bn, nn.BatchNorm1d)
        features = linear.out_features
        if bn.num_features != features:
            raise ValueError(message("bn", f"num_features = linear.out_features = {features}", f"num_features = {bn.num_features}"))
        if not isinstance(scale, nn.Parameter):
            scale = as_scale(scale, linear.weight.dtype, linear.weight.device)
        if tuple(scale.shape) not in ((), (1,), (features,)):
            raise ValueError(message("scale", f"a number or shape (), (1,) or {text([features])}", shape_of(scale)))
        self.linear = linear
        self.bn = bn
        if isinstance(scale, nn.Parameter):
            self.scale = scale
        else:
            self.register_buffer("scale", scale)

    def forward(self, input: Tensor) -> Tensor:
        return linear_batchnorm_softmax(input, self.linear, self.bn, self.scale)
