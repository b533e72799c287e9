"""For the tests of the choice of PyTorch's back ends on CUDA: a card that need not be there, and calls of fake tensors on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import qkv
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import attention_ext
from attention_ext import _torch_private
from attention_ext._libraries import CUDA_PROBLEM
from attention_ext._recall import Known
from attention_ext.attention import choice, recall, router, torch_cuda

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_library = pytest.mark.skipif(CUDA_PROBLEM is not None, reason=str(CUDA_PROBLEM))
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
# A table for Hopper where PyTorch's back ends run as much as they may: what a back end is not to run is for the guards to say,
# whatever was measured (routes.py).
_GENEROUS = {
    ("half", "plain", False): (("cudnn", 256), ("flash", 96)),
    ("half", "plain, one query", False): (("cudnn", 128), ("flash", 128)),
    ("half", "plain, another width of values", False): (("cudnn", 192),),
    ("half", "causal", False): (("cudnn", 256), ("flash", 96)),
    ("half", "causal, another width of values", False): (("cudnn", 192),),
    ("half", "causal, L and S apart", False): (("cudnn", 256), ("flash", 96)),
    ("half", "bool mask", False): (("cudnn", 128),),
    ("half", "plain", True): (("cudnn", 256), ("flash", 256), ("efficient", 32)),
    ("half", "plain, another width of values", True): (("cudnn", 192), ("efficient", 128)),
    ("half", "causal", True): (("cudnn", 256), ("flash", 256), ("efficient", 128)),
    ("half", "causal, another width of values", True): (("cudnn", 192), ("efficient", 128)),
    ("half", "causal, L and S apart", True): (("cudnn", 256), ("flash", 256), ("efficient", 128)),
    ("half", "bool mask", True): (("cudnn", 256), ("efficient", 128)),
}


@pytest.fixture(autouse=True)
def generous(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For every test of a module that imports this: the generous table, and nothing kept of calls under another one."""
    monkeypatch.setattr(choice, "ROUTES", {(9, 0): _GENEROUS})
    monkeypatch.setattr(recall, "_KNOWN", Known())
    choice.decide.cache_clear()
    yield
    choice.decide.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, cudnn_first: bool = True) -> None:
    """A card of this capability beside a cuDNN that PyTorch's operator tries first, or not; None: no card."""
    monkeypatch.setattr(torch_cuda, "capability", lambda index: capability)
    monkeypatch.setattr(_torch_private, "_cudnn_would_come_first", lambda: cudnn_first)
    choice.decide.cache_clear()


@contextmanager
def forgotten() -> Iterator[None]:
    """What is decided inside is forgotten."""
    try:
        yield
    finally:
        choice.decide.cache_clear()


def fake(*shape: int, dtype: torch.dtype = BF16, **options: Any) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda", **options)


def fake_qkv(
    B: int = 2, heads: tuple[int, ...] = (8,), L: int = 256, S: int | None = None, E: int = 64, Ev: int | None = None,
    dtype: torch.dtype = BF16, grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """query, key, value; heads is (Hq,) or (Hq, Hk)."""
    S, Ev = L if S is None else S, E if Ev is None else Ev
    shapes = ((B, heads[0], L, E), (B, heads[-1], S, E), (B, heads[-1], S, Ev))
    query, key, value = (fake(*shape, dtype=dtype).requires_grad_(grad) for shape in shapes)
    return query, key, value


def routed(*tensors: Tensor | None, **options: Any) -> tuple[str, str]:
    """(target, reason) of a call of sdpa."""
    return tuple(router.route(router.checked(*tensors, **options)[0]))  # type: ignore[return-value]


def symbolic_qkv(mode: FakeTensorMode, L: int = 128, S: int | None = None, E: int = 64, dtype: torch.dtype = BF16) -> list[Tensor]:
    """query, key, value on CUDA whose lengths are symbols: one for both, or where S is given two."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    lengths = [L] if S is None else [L, S]
    made = []
    for n, length in enumerate(lengths):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK, DimDynamic.STATIC])
        like = mode.from_tensor(torch.empty(length, E), symbolic_context=context, source=ConstantSource(f"length{n}"))
        made.append(like.shape[0])
    rows, columns = made[0], made[-1]
    with mode:
        return [fake(2, 8, size, E, dtype=dtype) for size in (rows, columns, columns)]


def symbolic_mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def targets(graph: torch.fx.GraphModule) -> set[str]:
    """The names of the operators of a graph, and of the graphs in it."""
    return {
        str(node.target).split(".")[1]
        for module in graph.modules() if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    }  # fmt: skip


# name: (sizes of qkv, shape of a bool mask, options)
CALLS: dict[str, tuple[dict[str, Any], tuple[int, ...] | None, dict[str, Any]]] = {
    "plain": ({"L": 256, "E": 64}, None, {}),
    "odd length": ({"L": 191, "S": 320, "E": 128}, None, {}),
    "wide": ({"L": 192, "E": 256}, None, {}),
    "causal": ({"L": 191, "E": 64}, None, {"causal": True}),
    "causal, more keys": ({"L": 130, "S": 300, "E": 64}, None, {"causal": True}),
    "causal, more queries": ({"L": 300, "S": 130, "E": 64}, None, {"causal": True}),
    "grouped": ({"heads": (4, 2), "L": 192, "E": 64}, None, {"gqa": True}),
    "grouped, causal": ({"heads": (4, 1), "L": 256, "E": 128}, None, {"gqa": True, "causal": True}),
    "one query": ({"L": 1, "S": 257, "E": 64}, None, {}),
    "values of 64": ({"L": 128, "E": 128, "Ev": 64}, None, {}),
    "values of 128": ({"L": 128, "E": 192, "Ev": 128}, None, {"causal": True}),
    "values of 128, odd length": ({"L": 100, "E": 64, "Ev": 128}, None, {}),
    "mask": ({"L": 65, "S": 101, "E": 64}, (65, 101), {}),
    "mask of keys": ({"L": 64, "S": 250, "E": 64}, (2, 1, 1, 250), {}),
    "mask of queries": ({"L": 63, "S": 72, "E": 32}, (63, 1), {}),
    "scale": ({"L": 128, "E": 64}, None, {"scale": 0.7}),
    "rank 2": ({"batch": (), "heads": (), "L": 192, "E": 64}, None, {}),
    "rank 3": ({"batch": (), "L": 192, "E": 64}, None, {"causal": True}),
    "rank 5": ({"batch": (2, 2), "L": 192, "E": 64}, None, {}),
}


def problem(name: str, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, dict[str, Any]]:
    sizes, mask, options = CALLS[name]
    keep = None if mask is None else torch.rand(mask, device="cuda") < 0.7
    return qkv(**sizes, dtype=dtype, device="cuda"), keep, options


def as_arguments(options: dict[str, Any]) -> dict[str, Any]:
    return {{"causal": "is_causal", "gqa": "enable_gqa"}.get(name, name): value for name, value in options.items()}


def kernel_of(*tensors: Tensor | None, **options: Any) -> str:
    return attention_ext.explain(*tensors, **options).kernel
