"""What the CUDA kernels refuse beyond what attention is not defined for, told from sizes and strides alone.

For the fake kernels, and so that the operators refuse before they run. The limits are those of csrc/, which _C tells; what symbolic
sizes leave open, the kernels decide when they run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .._checks import refuse, shape_of, text
from .._torch_private import runs_host_code

__all__ = ["MAX_BATCH_DIMS", "backward_kernel_name", "check_kernel_name", "check_limits"]

_LARGEST, MAX_BATCH_DIMS = torch.ops.attention_ext.limits()  # rows and columns of a matrix; dims before them that do not merge
_KERNELS = {  # device type, whether backward: the names beside "auto"
    ("cpu", False): ("reference",),
    ("cpu", True): ("reference",),
    ("cuda", False): tuple(torch.ops.attention_ext.kernels("forward")),
    ("cuda", True): tuple(torch.ops.attention_ext.kernels("backward")),
}
_WITH_BACKWARD = {names[0] for (_, backward), names in _KERNELS.items() if backward}  # that take every problem


def check_kernel_name(device: torch.device, kernel_name: str, *, backward: bool = False) -> None:
    """Refuses a name that no kernel of this device type has; whether the kernel takes the problem, it says itself."""
    names = _KERNELS.get((device.type, backward))
    if kernel_name == "auto" or names is None or kernel_name in names:
        return
    quoted = [f'"{name}"' for name in names]
    several = f"one of the kernels {', '.join(quoted[:-1])} and " if len(quoted) > 1 else ""
    on_cpu = " for CPU tensors" if device.type == "cpu" else ""
    refuse("kernel_name", f'"auto" or {several}{quoted[-1]}{on_cpu}', f'"{kernel_name}"')


def backward_kernel_name(kernel_name: str) -> str:
    """The name for sdpa_backward after a forward by that name: the same if that kernel's backward takes everything, else "auto"."""
    return kernel_name if kernel_name in _WITH_BACKWARD else "auto"


def check_limits(
    inputs: Mapping[str, tuple[Tensor | None, int]],
    results: Callable[[], Iterable[tuple[Tensor, int]]],
    batch: Sequence[int],
    enable_gqa: bool = False,
) -> None:
    """Refuses what is too large or too strided for the kernels.

    inputs and results: each with the number of its last dims that are a matrix's (2) or a row's values (1); the dims before them
    broadcast to batch, whose last one is the query heads with enable_gqa.
    """
    given = {name: (tensor, tail) for name, (tensor, tail) in inputs.items() if tensor is not None}
    for name, (tensor, tail) in given.items():
        if any(isinstance(size, int) and size > _LARGEST for size in tensor.shape[-tail:]):
            refuse(name, f"matrices of at most {_LARGEST} rows and columns", shape_of(tensor))
    if len(batch) <= MAX_BATCH_DIMS:
        return
    operands = [(tensor.shape[:-tail], tensor.stride()[:-tail]) for tensor, tail in (*given.values(), *results())]
    ranks = [len(sizes) for sizes, _ in operands]
    sizes, strides = ([number for operand in operands for number in operand[i]] for i in (0, 1))
    if not all(isinstance(number, int) for number in (*batch, *sizes, *strides)):
        return
    if not runs_host_code(torch.ops.attention_ext.batch_dims_merge.default, list(batch), ranks, sizes, strides, enable_gqa):
        refuse(next(iter(given)), f"at most {MAX_BATCH_DIMS} leading dims that strides keep apart", text(batch))
