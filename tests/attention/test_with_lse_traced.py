"""sdpa_with_lse compiled, exported, under autocast, vmap and the other transforms."""

from __future__ import annotations

import logging
import warnings
from functools import partial

import pytest
import reference
import torch
from helpers import FLOATS, HALVES, close, leaves, normal, qkv, sdpa, sdpa_with_lse
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.utils.checkpoint import checkpoint
from with_lse import KINDS, both_grads, finite, oracle, problem

import attention_ext


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["plain", "causal", "float", "value heads"])
def test_compiled(device: str, kind: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    inputs, options = problem(kind, torch.float32, device)

    def f(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = attention_ext.sdpa_with_lse(*tensors, **options)
        return out * 2, lse + 1

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for L, S in [(9, 13), (17, 5)][: 1 + dynamic]:
        inputs, _ = problem(kind, torch.float32, device, L, S)
        out, lse = f(*inputs)
        grad, grad_lse = normal(*out.shape), normal(*lse.shape)
        want = both_grads(f, leaves(*inputs), grad, grad_lse)
        got = both_grads(compiled, leaves(*inputs), grad, grad_lse)
        for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compiled_by_inductor_with_dropout(device: str) -> None:
    torch._dynamo.reset()
    inputs, _ = problem("plain", torch.float32, device)
    compiled = torch.compile(lambda *t: sdpa_with_lse(*t, 0.5), fullgraph=True)
    (a, lse), (b, _) = compiled(*inputs), compiled(*inputs)
    assert not torch.equal(a, b)
    torch.testing.assert_close(lse, sdpa_with_lse(*inputs)[1])


@pytest.mark.parametrize("kind", ["plain", "causal"])
def test_export_with_dynamic_sizes(device: str, kind: str) -> None:
    b, l, s = Dim("b", min=1, max=64), Dim("l", min=1, max=512), Dim("s", min=1, max=512)
    options = {"is_causal": kind == "causal"}

    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return attention_ext.sdpa_with_lse(q, k, v, **options)

    example = qkv((3,), (2,), L=9, S=7, E=8, device=device)
    program = export(Attend(), example, dynamic_shapes=({0: b, 2: l}, {0: b, 2: s}, {0: b, 2: s}))
    for B, L, S in [(1, 1, 1), (2, 1, 9), (5, 33, 64)]:
        inputs = qkv((B,), (2,), L=L, S=S, E=8, device=device)
        for got, want in zip(program.module()(*inputs), oracle([*inputs, None], options), strict=True):
            close(got, want, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(device: str, kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16)[: 2 if kind in ("plain", "float") else 1]:
        inputs, options = problem(kind, dtype, device)
        torch.library.opcheck(torch.ops.attention_ext.sdpa_with_lse.default, leaves(*inputs), options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fake_results_lie_as_real_ones(device: str, kind: str, dtype: torch.dtype) -> None:
    inputs, options = problem(kind, dtype, device)
    with FakeTensorMode() as mode:
        fakes = sdpa_with_lse(*(None if t is None else mode.from_tensor(t) for t in inputs), **options)
    for real, fake in zip(sdpa_with_lse(*inputs, **options), fakes, strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
        assert real.device == fake.device


@pytest.mark.parametrize("region", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "grouped"])
def test_autocast(device: str, kind: str, region: torch.dtype) -> None:
    """Operands in the region's dtype, products and sums in float32 all the same; also in a backward pass inside the region."""
    inputs, options = problem(kind, torch.float32, device)
    lowered = [t.to(region) for t in inputs[:3]]
    grad, grad_lse = normal(*oracle(inputs, options)[0].shape, dtype=region), normal(*oracle(inputs, options)[1].shape)
    want = both_grads(partial(sdpa_with_lse, **options), [*leaves(*lowered), inputs[3]], grad, grad_lse)
    with torch.autocast(device, dtype=region):
        out, lse = sdpa_with_lse(*leaves(*inputs), **options)
        got = both_grads(partial(sdpa_with_lse, **options), [*leaves(*lowered), inputs[3]], grad, grad_lse)
    assert out.dtype == region == sdpa(*lowered, inputs[3], **options).dtype and lse.dtype == torch.float32
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    for a, b in zip(got[2], want[2], strict=True):
        assert torch.equal(a, b)
    mixed = [inputs[0], inputs[1].to(region), *inputs[2:]]
    with torch.autocast(device, dtype=region):
        assert torch.equal(sdpa_with_lse(*mixed, **options)[0], out)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 0), (0, 0, 0), (2, None, 1)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "grouped", "rank 2"])
def test_vmap_is_the_loop(device: str, kind: str, dims: tuple) -> None:
    (*inputs, mask), options = problem(kind, torch.float32, device)
    for i, d in enumerate(dims):
        if d is not None:
            inputs[i] = torch.stack([inputs[i] + n for n in range(4)], d)
    op = lambda *t: sdpa_with_lse(*t, mask, **options)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(op, in_dims=dims)(*inputs)
    loop = [op(*(t if d is None else t.select(d, n) for t, d in zip(inputs, dims, strict=True))) for n in range(4)]
    for a, b in zip(got, zip(*loop, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "grouped", "value heads", "scale 0"])
def test_transforms(device: str, kind: str) -> None:
    """grad, vmap of grad, forward mode and second derivatives of out and lse."""
    (*inputs, mask), options = problem(kind, torch.float64, device, L=4, S=5)
    cpu = [t.cpu() for t in inputs]
    cpu_mask = None if mask is None else mask.cpu()

    def mine(q: Tensor) -> Tensor:
        out, lse = sdpa_with_lse(q, *inputs[1:], mask, **options)
        return out.square().sum() + finite(lse).sin().sum()

    def right(q: Tensor) -> Tensor:
        out, lse = oracle([q, *cpu[1:], cpu_mask], options)
        return out.square().sum() + finite(lse).sin().sum()

    q, x = inputs[0], cpu[0]
    close(torch.func.grad(mine)(q), torch.func.grad(right)(x), 1e-12)
    batch = torch.stack([q, q * 2])
    close(torch.vmap(torch.func.grad(mine))(batch), torch.vmap(torch.func.grad(right))(batch.cpu()), 1e-12)
    direction = normal(*q.shape, dtype=torch.float64)
    for a, b in zip(torch.func.jvp(mine, (q,), (direction.to(device),)), torch.func.jvp(right, (x,), (direction,)), strict=True):
        close(a, b, 1e-12)
    close(torch.func.hessian(mine)(q), torch.func.hessian(right)(x), 1e-11)


def test_dropout_under_vmap(device: str) -> None:
    q = normal(4, 3, 9, 8, device=device)
    with pytest.raises(RuntimeError, match=r"^attention_ext: dropout_p: expected .*, got 0.5"):
        torch.vmap(lambda t: sdpa_with_lse(t, t, t, None, 0.5))(q)
    out, _ = torch.vmap(lambda t: sdpa_with_lse(t, t, t, None, 0.5), randomness="different")(q[:1].expand(4, 3, 9, 8))
    assert not torch.equal(out[0], out[1])


def test_double_backward_is_refused(device: str) -> None:
    (q,) = leaves(normal(1, 2, 4, 8, dtype=torch.float64, device=device))
    for value in sdpa_with_lse(q, q, q):
        (grad,) = torch.autograd.grad(value.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            grad.square().sum().backward()


def test_checkpoint(device: str) -> None:
    inputs = leaves(*qkv(L=9, device=device))
    results = []
    for op in (sdpa_with_lse, lambda *t: checkpoint(sdpa_with_lse, *t, use_reentrant=False)):
        torch.manual_seed(3)
        out, lse = op(*inputs, None, 0.4)
        results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rank_above_ten(device: str) -> None:
    q, k, v = (t.reshape(2, *(1,) * 8, 3, 5, 8) for t in qkv(L=5, E=8, device=device))
    out, lse = sdpa_with_lse(q, k, v)
    want, want_lse = reference.attention(q, k, v)
    close(out, want, 1e-5)
    close(lse, want_lse, 1e-5)


def test_public_function_and_log(caplog: pytest.LogCaptureFixture) -> None:
    inputs, options = problem("value heads", torch.float32, "cpu")
    with caplog.at_level(logging.INFO, "attention_ext"):
        got = attention_ext.sdpa_with_lse(*inputs, **options)
    assert type(got) is tuple and any("sdpa_with_lse on cpu" in record.getMessage() for record in caplog.records)
    assert all(torch.equal(a, b) for a, b in zip(got, sdpa_with_lse(*inputs, **options), strict=True))
