"""PyTorch's back ends as sdpa runs them on a card: operands off alignment, compiled and exported programs, dropout."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import close, leaves, normal, qkv, run, sdpa
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch_route import (
    BF16,
    FP16,
    as_arguments,
    generous,  # noqa: F401 (a fixture for all tests here)
    kernel_of,
    problem,
)

import attention_ext

pytestmark = pytest.mark.gpu


MISALIGNED = """
import torch, attention_ext
torch.manual_seed(0)
f = {function}
aligned = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
f(aligned, aligned, aligned)
base = torch.randn(2 * 4 * 256 * 64 + 8, device="cuda", dtype=torch.bfloat16)
t = base[1 : 1 + 2 * 4 * 256 * 64].view(2, 4, 256, 64)
wide = torch.randn(2, 4, 256, 65, device="cuda", dtype=torch.bfloat16)[..., :64]
for x in (t, wide):
    for grad in (False, True):
        q = x.detach().requires_grad_(grad)
        out = f(q, q, q)
        if grad:
            out.float().sum().backward()
        want = torch.softmax(x.double() @ x.double().mT / 8, -1) @ x.double()
        assert (out.double() - want).abs().max() < 0.05, (out.double() - want).abs().max()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    "function", ["attention_ext.sdpa", "torch.compile(attention_ext.sdpa)", "torch.compile(attention_ext.sdpa, dynamic=True)"]
)
def test_operands_off_alignment(function: str) -> None:
    """In a process of its own: a misaligned address ends the CUDA context."""
    done = subprocess.run([sys.executable, "-c", MISALIGNED.format(function=function)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_one_compilation_for_all_lengths(dtype: torch.dtype, causal: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: attention_ext.sdpa(q, k, v, is_causal=causal), backend=counter, fullgraph=True, dynamic=True
    )
    for grad in (False, True):
        torch._dynamo.reset()
        counter.clear()
        for L in (128, 256, 300):
            inputs = qkv((2,), (4,), L, L, 64, dtype=dtype, device="cuda")
            inputs = leaves(*inputs) if grad else list(inputs)
            close(compiled(*inputs), sdpa(*inputs, is_causal=causal), 4 * torch.finfo(dtype).eps)
        assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["plain", "odd length", "causal, more keys", "mask", "values of 64"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_compiled(name: str, dtype: torch.dtype, backend: str) -> None:
    (q, k, v), mask, options = problem(name, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: attention_ext.sdpa(*inputs, **as_arguments(options)), fullgraph=True, backend=backend)
    grad = normal(*q.shape[:-1], v.size(-1), device="cuda")
    out, grads = run(compiled, [*leaves(q, k, v), mask], grad)
    want, want_grads = run(sdpa, [*leaves(q, k, v), mask], grad, **as_arguments(options))
    for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
        close(got, expected, 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_exported_program_can_be_differentiated(dtype: torch.dtype) -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention_ext.sdpa(q, k, v)

    q, k, v = qkv((2,), (4,), 192, 192, 64, dtype=dtype, device="cuda")
    program = torch.export.export(Attend(), (q, k, v)).run_decompositions().module()
    grad = normal(*q.shape, device="cuda")
    out, grads = run(program, leaves(q, k, v), grad)
    want, want_grads = run(sdpa, leaves(q, k, v), grad)
    for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
        close(got, expected, 16 * torch.finfo(dtype).eps)


def test_dropout_rate_and_random_numbers() -> None:
    """A rate that is not a multiple of 1/16; p = 0 leaves the generator as it is; replays of a graph draw anew."""
    q, k, v = (torch.zeros(4, 8, 1024, 64, dtype=FP16, device="cuda") for _ in range(3))
    v[:] = 1.0
    inputs = leaves(q, k, v)
    assert kernel_of(*inputs, dropout_p=0.1) == "torch: flash"
    out = sdpa(*inputs, None, 0.1)
    assert abs(out.float().mean().item() - 1.0) < 0.01, "the weights that are left are scaled by 1 / (1 - p)"
    spread = out.float()[..., 0].std().item()  # of a mean of 1024 draws: sqrt(p / (1 - p) / 1024)
    assert abs(spread / (0.1 / 0.9 / 1024) ** 0.5 - 1.0) < 0.05
    before = torch.cuda.get_rng_state()
    sdpa(*inputs)
    assert torch.equal(before, torch.cuda.get_rng_state())
    static = q.clone()
    sdpa(static, k, v, None, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sdpa(static, k, v, None, 0.1)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first, drawn)


@pytest.mark.parametrize("E", [64, 128, 256])
def test_dropout_under_checkpointing(E: int) -> None:
    """As below, where the backward pass runs the call again."""
    q, k, v = qkv((1,), (2,), 128, 128, E, dtype=FP16, device="cuda")
    grad = normal(*v.shape, dtype=FP16, device="cuda")
    for reentrant in (True, False):
        inputs = leaves(q, k, v)
        out = checkpoint(lambda *t: sdpa(*t, None, 0.3), *inputs, use_reentrant=reentrant)
        out.backward(grad)
        close((inputs[2].grad.double() * v.double()).sum()[None], (grad.double() * out.double()).sum()[None], 0.02)


def test_dropout_of_the_backward_pass_is_that_of_the_forward_pass() -> None:
    """out is linear in the values: its derivative by them is what they were multiplied by."""
    q, k, v = qkv((1,), (2,), 128, 128, 64, dtype=FP16, device="cuda")
    inputs = leaves(q, k, v)
    assert kernel_of(*inputs, dropout_p=0.3) == "torch: flash"
    out = sdpa(*inputs, None, 0.3)
    grad = normal(*out.shape, dtype=FP16, device="cuda")
    (d_value,) = torch.autograd.grad(out, inputs[2], grad)
    close((d_value.double() * v.double()).sum()[None], (grad.double() * out.double()).sum()[None], 0.02)
