"""Attention by the plan's choice or by the kernel of a name, both with a gradient.

The plan has one kernel for an input; what holds for it (streams, graphs, sizes) is to hold for every other that takes the input.
"""

from __future__ import annotations

import pytest
import torch
from helpers import HALVES, sdpa, sdpa_forward, sdpa_with_lse
from kernels import KERNELS, Kernel, needs_the_card
from torch import Tensor

import attention_ext
from attention_ext.attention.call import AttentionCall

AUTO = {device: Kernel("auto", device, "auto") for device in ("cpu", "cuda")}
CAP = 128 << 20  # bytes of workspace that sdpa_forward takes at most by default


def expanded(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool = False) -> tuple[Tensor, ...]:
    """Views with one set of leading dims, as sdpa hands them on; with enable_gqa the heads stay as they are."""
    tail = 3 if enable_gqa else 2
    leading = torch.broadcast_shapes(*(t.shape[:-tail] for t in (query, key, value)))
    return AttentionCall(query, key, value, enable_gqa=enable_gqa, scores=(*leading, *(0,) * tail)).expanded()[:3]


def needs(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool = False) -> None:
    """Skips what the kernel does not take, and all of it on a card that it is not for."""
    needs_the_card(kernel)
    if not kernel.takes(*expanded(query, key, value, enable_gqa)):
        pytest.skip(f"{kernel.name} does not take such operands")


def attend_with_lse(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of sdpa_with_lse; given the seed of dropout, of sdpa_forward."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if kernel in AUTO.values():
        if seed is None:
            return sdpa_with_lse(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return sdpa_forward(query, key, value, attn_mask, seed, dropout_p, is_causal, **options)
    if dropout_p > 0.0 and seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=query.device)
    query, key, value = expanded(query, key, value, enable_gqa)
    arguments = (query, key, value, attn_mask, seed, dropout_p, is_causal)
    return sdpa_forward(*arguments, kernel_name=kernel.name, **options)


def attend(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, *rest, **options) -> Tensor:
    """out alone; the plan's choice is sdpa."""
    if kernel in AUTO.values():
        return sdpa(query, key, value, *rest, **options)
    return attend_with_lse(kernel, query, key, value, *rest, **options)[0]


def workspace(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options) -> int:
    """Bytes that a forward call takes next to its results, by attention_ext.explain or, for a kernel of a name, by the plan."""
    if kernel in AUTO.values():
        return attention_ext.explain(query, key, value, attn_mask, **options).workspace
    rest = (attn_mask, options.pop("dropout_p", 0.0), options.pop("is_causal", False))
    name, _, found, _ = torch.ops.attention_ext.sdpa_plan(query, key, value, *rest, kernel_name=kernel.name, **options)
    assert name == kernel.name
    return found


def by_kernel(
    dtypes: tuple[torch.dtype, ...],
    forced: tuple[torch.dtype, ...] = HALVES,
    head_dims: tuple[int, ...] = (),
    devices: tuple[str, ...] = ("cuda",),
) -> list:
    """(kernel, dtype) or, given head dims, (kernel, dtype, E): the plan's choice in all dtypes, each kernel by name in those of
    `forced`, as far as it takes them."""
    rows = [(AUTO[device], dtype, E) for device in devices for dtype in dtypes for E in head_dims or (8,)]
    named = [kernel for kernel in KERNELS if kernel.device in devices]
    rows += [(k, dtype, E) for k in named for dtype in forced for E in head_dims or (8,) if k.takes_sizes(dtype, E, E)]
    params = []
    for kernel, dtype, E in rows:
        rest = (dtype, E) if head_dims else (dtype,)
        marks = pytest.mark.gpu if kernel.device == "cuda" else ()
        params.append(pytest.param(kernel, *rest, id="-".join((kernel.name, kernel.device, *map(str, rest))), marks=marks))
    return params
