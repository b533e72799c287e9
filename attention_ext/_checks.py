"""What every refusal is made of: it names the argument, what was expected and what came.

Sizes are compared through torch._check, so that symbolic shapes stay symbolic. The kernels on the CPU, the fake ones and autograd
call the same functions; csrc/binding says the same in the same words.
"""

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "accumulator",
    "check_dense",
    "check_shape",
    "known",
    "message",
    "refuse",
    "refuse_unless",
    "shape_of",
    "surely",
    "text",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What scores, sums and statistics are kept in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def message(argument: str, expected: str, got: str) -> str:
    return f"attention_ext: {argument}: expected {expected}, got {got}"


def refuse(argument: str, expected: str, got: object) -> NoReturn:
    raise RuntimeError(message(argument, expected, str(got)))


def text(sizes: Iterable[int]) -> str:
    """Sizes as a tuple is written, symbolic ones too."""
    written = [str(size) for size in sizes]
    return f"({written[0]},)" if len(written) == 1 else f"({', '.join(written)})"


def shape_of(tensor: Tensor) -> str:
    return f"shape {text(tensor.shape)}"


def surely(condition: bool | torch.SymBool) -> bool:
    """A comparison of sizes or strides; False for a symbolic one that cannot be decided without a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy: 0.3 s that eager calls never need

    decided: bool = guard_or_false(condition)
    return decided


def known(condition: bool | torch.SymBool) -> bool:
    """A comparison of sizes or strides that holds for all that a traced program stands for; adds no guard, where surely may."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, as above

    decided: bool = statically_known_true(condition)
    return decided


def refuse_unless(condition: bool | torch.SymBool, name: str, expected: str, tensor: Tensor) -> None:
    """Refuses a tensor for its shape, where a condition is not surely true: at once, or when a program of symbolic sizes runs."""
    torch._check(condition, lambda: message(name, expected, shape_of(tensor)))


def check_dense(name: str, tensor: Tensor | None) -> Tensor:
    """Refuses None and what is no array of strides."""
    if tensor is None:
        refuse(name, "a tensor", None)
    if type(tensor).__module__ == "torch.nn.attention.bias":
        refuse(name, "a tensor of numbers", f"a {type(tensor).__name__} of torch.nn.attention.bias")
    if tensor.is_nested or tensor.layout is not torch.strided:
        refuse(name, "a dense (strided) tensor", "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}")
    return tensor


def check_shape(name: str, tensor: Tensor, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
    """Refuses a tensor that is not of just this shape, dtype and device."""
    check_dense(name, tensor)
    shape = list(shape)

    def sentence() -> str:
        got = f"{shape_of(tensor)}, {tensor.dtype} on {tensor.device}"
        return message(name, f"shape {text(shape)}, {dtype} on {device}", got)

    if tensor.dim() != len(shape) or tensor.dtype != dtype or tensor.device != device:
        raise RuntimeError(sentence())
    for size, target in zip(tensor.shape, shape, strict=True):
        if not surely(size == target):
            torch._check(size == target, sentence)
