"""What the tests of override share: the package's own path on every device, and what a program calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

import attention_ext
from attention_ext import _redirect

__all__ = ["attention_in", "run_own"]


def run_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """override sends calls to this package's kernels or its reference, never on to PyTorch's operator, as sdpa does on the CPU."""
    monkeypatch.setattr(_redirect, "sdpa", lambda *args, **options: attention_ext.sdpa_with_lse(*args, **options)[0])


def attention_in(function: Callable[..., Tensor], *inputs: Tensor, within: AbstractContextManager | None = None) -> list[str]:
    """The calls of attention in the graph that torch.compile makes of a function, without a break."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: object) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    with within or nullcontext():
        torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    names = {"attention_ext.sdpa.default": "ours", "<built-in function scaled_dot_product_attention>": "torch"}
    return [names[target] for target in seen if target in names]
