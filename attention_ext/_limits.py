"""What the CUDA kernels refuse beyond _checks, told from sizes and strides, in the words of csrc/binding.

For the fake kernels and for the operators called by themselves, so that both say the same. What symbolic sizes leave open, the
kernels decide when they run.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ._checks import refuse, shape_of

__all__ = ["backward_kernel_name", "check_kernel_name", "check_limits", "contiguous", "layout_like"]

_LARGEST = 2**31 - 1 - 1024  # rows and columns of a matrix: tiles count them in 32 bits
_MAX_BATCH_DIMS = 8  # kMaxBatchDims of csrc/core/tensors.h
_KERNELS = tuple(torch.ops.attention_ext.kernels("forward"))
_BACKWARD_KERNELS = ("reference", "pipeline")
_EXPECTED_NAMES = {
    ("cpu", False): "'auto' or 'reference' for CPU tensors",
    ("cpu", True): "'auto' or 'reference' for CPU tensors",
    ("cuda", False): '"auto" or one of the kernels ' + ", ".join(f'"{name}"' for name in _KERNELS[:-1]) + f' and "{_KERNELS[-1]}"',
    ("cuda", True): '"auto" or "pipeline"',
}

Layout = tuple[Sequence[int], Sequence[int]]  # sizes and strides


def check_kernel_name(device: torch.device, kernel_name: str, *, backward: bool = False) -> None:
    """Refuses a name that no kernel of this device type has; whether the kernel takes the problem, it says itself."""
    names = ("reference",) if device.type == "cpu" else ("pipeline",) if backward else _KERNELS
    if kernel_name == "auto" or kernel_name in names or (device.type, backward) not in _EXPECTED_NAMES:
        return
    got = repr(kernel_name) if device.type == "cpu" else f'"{kernel_name}"'
    refuse("kernel_name", _EXPECTED_NAMES[device.type, backward], got)


def backward_kernel_name(kernel_name: str) -> str:
    """The name for sdpa_backward after a forward by that name: the same if that kernel has a backward, else "auto"."""
    return kernel_name if kernel_name in _BACKWARD_KERNELS else "auto"


def contiguous(sizes: Sequence[int]) -> Layout:
    strides, step = [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return sizes, strides


def layout_like(sizes: Sequence[int], like: Tensor) -> Layout:
    """Of a result, as _reference.like_order makes it."""
    if len(sizes) < 3 or like.dim() < 3 or like.stride(-3) >= like.stride(-2):
        return contiguous(sizes)
    *leading, heads, length, width = sizes
    *steps, row, head, column = contiguous([*leading, length, heads, width])[1]
    return sizes, [*steps, head, row, column]


def _merged_dims(batch: Sequence[int], operands: list[Layout], enable_gqa: bool) -> int:
    """How many leading dims are left where every dim merges that each operand steps through as through one (batch_dims.h)."""
    heads, count = batch[-1], 0
    groups = [max(heads // sizes[-1], 1) if enable_gqa and sizes and sizes[-1] > 1 else 1 for sizes, _ in operands]
    inner: tuple[int, bool, list[int]] | None = None  # size, whether the heads are part of it, strides
    for dim in reversed(range(len(batch))):
        if batch[dim] == 1:
            continue
        steps = []
        for sizes, strides in operands:
            own = dim - len(batch) + len(sizes)
            steps.append(0 if own < 0 or sizes[own] == 1 else strides[own])
        if inner is not None and all(
            step == inner[0] // (group if inner[1] else 1) * below
            for step, below, group in zip(steps, inner[2], groups, strict=True)
        ):
            inner = (inner[0] * batch[dim], inner[1], inner[2])
        else:
            inner, count = (batch[dim], dim + 1 == len(batch), steps), count + 1
    return count


def check_limits(
    inputs: Mapping[str, tuple[Tensor | None, int]],
    results: Callable[[], list[tuple[Layout, int]]],
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
            refuse(name, "matrices of at most 2^31 - 1025 rows and columns", shape_of(tensor))
    if len(batch) <= _MAX_BATCH_DIMS:
        return
    layouts: list[tuple[Layout, int]] = [((tensor.shape, tensor.stride()), tail) for tensor, tail in given.values()]
    if not all(isinstance(number, int) for (sizes, strides), _ in layouts for number in (*sizes, *strides)):
        return
    operands = [(sizes[:-tail], strides[:-tail]) for (sizes, strides), tail in (*layouts, *results())]
    if _merged_dims(batch, operands, enable_gqa) > _MAX_BATCH_DIMS:
        got = f"({', '.join(str(size) for size in batch)})"
        refuse(next(iter(given)), f"at most {_MAX_BATCH_DIMS} leading dims that strides keep apart", got)
