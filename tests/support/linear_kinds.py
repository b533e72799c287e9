"""Operands of float32 products by kind of magnitudes, and the CUDA kernels of the linear operators by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attention_ext  # noqa: F401  registers torch.ops.attention_ext

SIZE = (256, 2048, 512)  # M, K, N of the tests of accuracy


def size_on(device: str) -> tuple[int, int, int]:
    return SIZE if device == "cuda" else (32, 256, 48)


def inputs(kind: str, device: str, M: int, K: int, N: int) -> tuple[Tensor, Tensor]:
    """input (M, K) and weight (N, K)."""
    x, w = (torch.rand if kind == "uniform" else torch.randn)(M, K), (torch.rand if kind == "uniform" else torch.randn)(N, K)
    order = torch.randperm(K)
    columns, wide = torch.logspace(-15, 15, K)[order], torch.logspace(-30, 30, K)[order]
    rows, rows_of_weight = (torch.where(torch.arange(size) % 2 == 0, 1e-20, 1e15)[:, None] for size in (M, N))
    first = torch.arange(K) == 0
    outlier = (torch.arange(N)[:, None] == N // 2) & first  # of one feature: the others hide it in their rows

    def small_and_alike(signs: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """What the terms leave out of the small ones is the same in all K products of a row, and the largest meets zeros."""
        small, other = 2.0**-8.3 * signs, (0.5 + torch.rand(N, K) / 2) * signs
        return torch.where(first, 2.0**14, small) * (1 + torch.rand(M, 1)), torch.where(first, 0.0, other)

    scaled = {
        "1e-20": lambda: (x * 1e-20, w),
        "1e15": lambda: (x * 1e15, w),
        "both 1e15": lambda: (x * 1e15, w * 1e15),
        "1e-20 and 1e15": lambda: (x * 1e-20, w * 1e15),
        "rows of two scales": lambda: (x * rows, w),
        "rows of two scales in both": lambda: (x * rows, w * rows_of_weight),
        "scales within a row": lambda: (x * torch.where(torch.rand(M, K) < 0.5, 1e-20, 1e15), w),
        "columns of opposite scales": lambda: (x * columns, w / columns),
        "1e-30 to 1e30 in both": lambda: (x * wide, w / wide),
        "1e-30 to 1e30 in a row": lambda: (x * torch.logspace(-30, 30, K)[torch.rand(M, K).argsort(1)], w),
        "one large column": lambda: (torch.where(torch.arange(K) == 3, x * 1e10, x), w),
        "one-hot": lambda: (F.one_hot(torch.arange(M) % K, K).float(), w),
        "rows of zeros": lambda: (x * (torch.arange(M) % 3 > 0).float()[:, None], w),
        "zeros": lambda: (x * 0.0, w),
        "integers": lambda: ((x * 8).round(), (w * 8).round()),
        "outlier against zeros": lambda: (x * ~first, torch.where(outlier, w * 1e12, w)),
        "outlier against small": lambda: (torch.where(first, x * 1e-8, x), torch.where(outlier, w * 1e8, w)),
        "small and alike": small_and_alike,
        "small, alike but for signs": lambda: small_and_alike(1.0 - 2.0 * (torch.rand(K) < 0.5)),  # which meet the same signs
        "cancelling": lambda: (torch.cat([x[:, : K // 2], -x[:, : K // 2] * (1 + 2**-20)], 1), torch.cat([w[:, : K // 2]] * 2, 1)),
    }.get(kind, lambda: (x, w))()
    return scaled[0].to(device), scaled[1].to(device)


KINDS = ["normal", "uniform", "1e-20", "1e15", "both 1e15", "1e-20 and 1e15", "rows of two scales", "rows of two scales in both"]
KINDS += ["scales within a row", "columns of opposite scales", "1e-30 to 1e30 in both", "1e-30 to 1e30 in a row"]
KINDS += ["one large column", "one-hot", "rows of zeros", "zeros", "integers", "cancelling"]
KINDS += ["outlier against zeros", "outlier against small", "small and alike", "small, alike but for signs"]

# Made anew on plain cores, as far as an outlier or small ones beside large ones reach.
REMADE = ("columns of opposite scales", "1e-30 to 1e30 in both", "outlier against zeros", "outlier against small")
# One product makes a sum, or all have one sign, or plain cores make it: not for the rule of 1.05.
FEW_ROUNDINGS = (*REMADE, "uniform", "1e-30 to 1e30 in a row", "one large column", "one-hot")
FEW_ROUNDINGS += ("small and alike", "small, alike but for signs")

BY_NAME = ["tiled", "split_half", "sm90_split_half"]


def skip_where_none(kernel: str) -> None:
    if kernel == "sm90_split_half" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it needs compute capability 9.0")


def by(kernel: str, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear_float32 by the kernel of this name."""
    skip_where_none(kernel)
    out: Tensor = torch.ops.attention_ext._linear_float32_by(x, w, bias, kernel)
    return out


def layer_by(kernel: str) -> Callable[..., tuple[Tensor, ...]]:
    """linear_batchnorm_softmax by the kernel of this name."""
    skip_where_none(kernel)
    return partial(torch.ops.attention_ext._linear_batchnorm_softmax_by, kernel_name=kernel)


# The CPU path, the kernel that the plan takes, and each kernel.
EVERYWHERE = ["cpu", *(pytest.param(kernel, marks=pytest.mark.gpu) for kernel in ("auto", *BY_NAME))]


def on(where: str) -> tuple[str, Callable[..., Tensor]]:
    """The device and linear_float32 of one of EVERYWHERE."""
    return ("cpu", torch.ops.attention_ext.linear_float32) if where == "cpu" else ("cuda", partial(by, where))
