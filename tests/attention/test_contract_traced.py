"""The cases of the contract compiled, as CUDA graphs and through AOTInductor: what eager gives, and eager what is right.

By the plan's choice, and in bfloat16 by each kernel of a name (forced.py).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import error_rule
import pytest
import reference
import torch
from forced import attend, by_kernel, expanded, needs
from helpers import FLOATS, captured, close, leaves, normal, qkv, run, sdpa, sdpa_forward, sdpa_with_lse
from kernels import Kernel, params
from processes import importing
from torch import Tensor
from torch.export import Dim, export

NEG_INF = float("-inf")
CASES = [
    "dead row, bool",
    "dead row, float",
    "all dead",
    "lowest row",
    "float32 mask",
    "mask by query",
    "mask of stride 0",
    "mask requires grad",
    "causal, L < S",
    "causal, L > S",
    "scale 0",
    "negative scale",
    "long logits",
    "no keys",
    "no rows",
    "no head dim",
    "no value dim",
    "odd head dims",
    "overlapping rows",
    "value broadcasts",
    "grouped, value heads",
    "rank 2",
    "rank 5",
]


def problem(name: str, dtype: torch.dtype, device: str) -> tuple[list[Tensor | None], dict]:
    """[query, key, value, attn_mask], options; L = 7, S = 9 where the name does not say otherwise."""
    L, S = {"causal, L > S": (9, 7), "no keys": (7, 0), "no rows": (0, 9)}.get(name, (7, 9))
    E, Ev = {"no head dim": (0, 8), "no value dim": (8, 0), "odd head dims": (7, 13)}.get(name, (8, 8))
    batch, heads = {"rank 2": ((), ()), "rank 5": ((2, 1), (3,)), "grouped, value heads": ((2,), (6, 2, 3))}.get(name, ((2,), (3,)))
    q, k, v = qkv(batch, heads, L, S, E, Ev, dtype, device)
    if name == "overlapping rows":
        q = normal(E + 6, dtype=dtype, device=device).as_strided((2, 3, L, E), (0, 0, 1, 1))
    elif name == "value broadcasts":
        q, k = q[:1], k[0]
    elif name == "long logits":
        q, k = torch.full_like(q, 250.0), torch.full_like(k, 250.0)
        k[..., ::2, :] = 200.0
    keep = torch.rand(L, S) < 0.6
    if name in ("dead row, bool", "dead row, float", "lowest row", "mask by query"):
        keep[:, 0], keep[3] = True, False
    masks = {
        "dead row, bool": lambda: keep,
        "dead row, float": lambda: torch.zeros(L, S, dtype=dtype).masked_fill(~keep, NEG_INF),
        "all dead": lambda: torch.zeros(L, S, dtype=torch.bool),
        "lowest row": lambda: torch.zeros(L, S).masked_fill(~keep, torch.finfo(torch.float32).min),
        "float32 mask": lambda: normal(3, 1, S),
        "mask by query": lambda: keep[:, :1],
        "mask of stride 0": lambda: normal(3, 1, 1, dtype=dtype),
        "mask requires grad": lambda: normal(2, 1, L, 1, dtype=dtype),
    }
    mask = masks[name]().to(device) if name in masks else None
    if name == "mask of stride 0":
        mask = mask.expand(2, 3, L, S)
    options = {"is_causal": True} if "causal" in name or "scale" in name else {}
    options |= {"scale": {"scale 0": 0.0, "negative scale": -0.7}[name]} if "scale" in name else {}
    options |= {"enable_gqa": True} if "grouped" in name else {}
    return [q, k, v, mask], options


def compiled_or_eager(op, inputs: list[Tensor | None], options: dict):
    grad = torch.ones_like(op(*inputs, **options))
    return run(op, leaves(*inputs), grad, **options)


@pytest.mark.parametrize(("kernel", "dtype"), by_kernel(FLOATS, (torch.bfloat16,), devices=("cpu", "cuda")))
@pytest.mark.parametrize("name", CASES)
def test_eager(kernel: Kernel, dtype: torch.dtype, name: str) -> None:
    """The oracle's values, so that the other tests of this file compare with what is right."""
    inputs, options = problem(name, dtype, kernel.device)
    needs(kernel, *inputs[:3], options.get("enable_gqa", False))
    out, grads = compiled_or_eager(partial(attend, kernel), inputs, options)
    doubles = leaves(*(t.cpu().double() if t is not None and t.is_floating_point() else t for t in inputs))
    want, _ = reference.attention(*doubles, options.get("is_causal", False), options.get("scale"), options.get("enable_gqa", False))
    wanted = [t for t in doubles if t is not None and t.requires_grad]
    right = torch.autograd.grad(want, wanted, torch.ones_like(want), allow_unused=True, materialize_grads=True)
    among = max(1.0, error_rule.largest(*right))
    for got, exact in zip((out, *grads), (want, *right), strict=True):
        assert got.shape == exact.shape
        eps = max(
            torch.finfo(got.dtype).eps, torch.finfo(dtype).eps
        )  # the gradient of a float32 mask is as exact as the call's dtype
        close(got, exact, (64 if name == "long logits" else 8) * eps * among)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_compiled(device: str, name: str, dtype: torch.dtype) -> None:
    inputs, options = problem(name, dtype, device)
    torch._dynamo.reset()
    compiled = torch.compile(partial(sdpa, **options), fullgraph=True, backend="aot_eager")
    want, want_grads = compiled_or_eager(sdpa, inputs, options)
    got, grads = compiled_or_eager(lambda *t, **_: compiled(*t), inputs, options)
    for a, b in zip((got, *grads), (want, *want_grads), strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        close(a, b, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kernel", params())
@pytest.mark.parametrize("name", ["dead row, bool", "float32 mask", "causal, L < S", "overlapping rows", "value broadcasts"])
def test_compiled_forward(kernel: Kernel, name: str) -> None:
    """The gradient of a compiled call is one operator, whatever kernel ran before it."""
    inputs, options = problem(name, torch.bfloat16, kernel.device)
    needs(kernel, *inputs[:3], options.get("enable_gqa", False))
    inputs[:3] = expanded(*inputs[:3], options.get("enable_gqa", False))
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        causal = options.get("is_causal", False)
        return sdpa_forward(q, k, v, mask, None, 0.0, causal, scale=options.get("scale"), kernel_name=kernel.name)

    for got, want in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), call(*inputs), strict=True):
        assert got.stride() == want.stride() and torch.equal(got, want)


@pytest.mark.parametrize(("kernel", "dtype"), by_kernel((torch.float32, torch.bfloat16), (torch.bfloat16,)))
@pytest.mark.parametrize("name", CASES)
def test_graph(kernel: Kernel, dtype: torch.dtype, name: str) -> None:
    inputs, options = problem(name, dtype, "cuda")
    needs(kernel, *inputs[:3], options.get("enable_gqa", False))
    op = partial(attend, kernel)
    given = leaves(*inputs)
    grad = torch.ones_like(op(*inputs, **options))
    graph, (out, grads) = captured(lambda: run(op, given, grad, **options))
    graph.replay()
    want, want_grads = run(op, leaves(*inputs), grad, **options)
    assert all(torch.equal(a, b) for a, b in zip((out, *grads), (want, *want_grads), strict=True))


class Both(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return sdpa(q, k, v, is_causal=True), *sdpa_with_lse(q, k, v, mask)


class Plain(torch.nn.Module):
    """No operator of this package: the control."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return ((q @ k.mT).masked_fill(~mask, 0.0) @ v,)


def compile_ahead_of_time(model: type[torch.nn.Module], device: str, package: str) -> None:
    """With dynamic sizes, saved and loaded again."""

    def inputs(B: int, L: int, S: int) -> tuple[Tensor, ...]:
        mask = torch.rand(L, S) < 0.7
        mask[0] = False
        return (*qkv((B,), (2,), L=L, S=S, E=8, device=device), mask.to(device))

    b, l, s = Dim("b", min=1, max=64), Dim("l", min=1, max=512), Dim("s", min=1, max=512)
    dynamic = ({0: b, 2: l}, {0: b, 2: s}, {0: b, 2: s}, {0: l, 1: s})
    program = export(model(), inputs(3, 9, 7), dynamic_shapes=dynamic)
    loaded = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=package))
    for sizes in ((3, 9, 7), (1, 1, 1), (5, 33, 64)):
        given = inputs(*sizes)
        for got, want in zip(loaded(*given), model()(*given), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="AOTInductor needs a C++ compiler")
def test_aot_inductor(device: str, tmp_path: Path) -> None:
    """In a process of its own, as what goes wrong in loaded code takes the process with it; the control where it does."""

    def run_ahead(model: str) -> subprocess.CompletedProcess[str]:
        code = (
            f"import test_contract_traced as t; t.compile_ahead_of_time(t.{model}, {device!r}, {str(tmp_path / model)!r} + '.pt2')"
        )
        env = importing(Path(__file__).parent)
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)

    both = run_ahead("Both")
    if both.returncode < 0 and run_ahead("Plain").returncode < 0:
        pytest.skip("AOTInductor ends in a signal here for a model without this package's operators, too")
    assert both.returncode == 0, both.stderr[-3000:]
