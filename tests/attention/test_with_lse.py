"""sdpa_with_lse: the contract of sdpa, with the log-sum-exp of the rows beside it, differentiable in both."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import reference
import torch
from helpers import FLOATS, HALVES, check_lse, close, compare, leaves, normal, qkv, run, sdpa, sdpa_forward, sdpa_with_lse
from torch import Tensor
from with_lse import KINDS, NEG_INF, both_grads, finite, oracle, problem


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_both_results(device: str, kind: str, dtype: torch.dtype, poison: None) -> None:
    inputs, options = problem(kind, dtype, device)
    named = {"causal": options.get("is_causal", False), "scale": options.get("scale"), "gqa": options.get("enable_gqa", False)}
    compare(*inputs, **named, op=lambda *tensors, **rest: sdpa_with_lse(*tensors, **rest)[0])
    out, lse = sdpa_with_lse(*inputs, **options)
    check_lse(lse, oracle(inputs, options)[1], dtype)
    assert out.stride() == sdpa_forward(*inputs, None, 0.0, options.pop("is_causal", False), **options)[0].stride()
    assert lse.is_contiguous()
    if inputs[3] is not None:
        assert (lse[..., 2] == NEG_INF).all() and (out[..., 2, :] == 0).all()


@pytest.mark.parametrize("lower", [(1,), (2,), (1, 2)], ids=["key", "value", "both"])
def test_operands_of_rank_2_next_to_heads(device: str, lower: tuple[int, ...], poison: None) -> None:
    """One key or value for all batch rows and heads."""
    q, k, v = (t[0, 0] if n in lower else t for n, t in enumerate(qkv(L=5, S=7, device=device)))
    out, _ = compare(q, k, v, op=lambda *tensors, **rest: sdpa_with_lse(*tensors, **rest)[0])
    close(sdpa_forward(q, k, v, None, None, 0.0, False)[0], out.double())  # to this one the operands come as they are


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["both", "lse"])
def test_gradient_of_both(device: str, kind: str, dtype: torch.dtype, which: str) -> None:
    inputs, options = problem(kind, dtype, device)
    doubles = leaves(*(t.cpu().double() if t is not None and t.is_floating_point() else t for t in inputs))
    want, want_lse = oracle(doubles, options)
    grad, grad_lse = normal(*want.shape) * (which == "both"), normal(*want_lse.shape)
    _, _, right = both_grads(lambda *t: oracle(t, options), doubles, grad, grad_lse)
    _, _, got = both_grads(partial(sdpa_with_lse, **options), leaves(*inputs), grad, grad_lse)
    for a, b in zip(got, right, strict=True):
        close(a, b, 64 * torch.finfo(a.dtype).eps)  # of a float32 mask: float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "float32", "grouped"])
def test_gradient_of_the_log_sum_exp_in_half(device: str, kind: str, dtype: torch.dtype) -> None:
    """Against the oracle of the same inputs; a gradient is a sum of a few products of half numbers."""
    inputs, options = problem(kind, dtype, device)
    doubles = leaves(*(t.cpu().double() if t is not None and t.is_floating_point() else t for t in inputs))
    want, want_lse = oracle(doubles, options)
    grad, grad_lse = normal(*want.shape, dtype=dtype), normal(*want_lse.shape)
    _, _, right = both_grads(lambda *t: oracle(t, options), doubles, grad, grad_lse)
    _, _, got = both_grads(partial(sdpa_with_lse, **options), leaves(*inputs), grad, grad_lse)
    for a, b in zip(got, right, strict=True):
        close(a, b, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["plain", "causal", "float", "value heads"])
def test_gradcheck(device: str, kind: str) -> None:
    inputs, options = problem(kind, torch.float64, device, L=3, S=4)

    def op(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = sdpa_with_lse(*tensors, **options)
        return out, finite(lse)

    assert torch.autograd.gradcheck(op, leaves(*inputs))


SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]


@pytest.mark.parametrize("subset", SUBSETS, ids=str)
def test_subsets_of_requires_grad(device: str, subset: tuple[int, ...]) -> None:
    inputs, _ = problem("float", torch.float64, device)
    doubles = [t.cpu() for t in inputs]
    for i in subset:
        inputs[i].requires_grad_()
        doubles[i].requires_grad_()
    out, lse = sdpa_with_lse(*inputs)
    assert out.requires_grad and lse.requires_grad
    grad, grad_lse = normal(*out.shape), normal(*lse.shape)
    _, _, right = both_grads(lambda *t: oracle(t, {}), doubles, grad, grad_lse)
    _, _, got = both_grads(sdpa_with_lse, inputs, grad, grad_lse)
    for a, b in zip(got, right, strict=True):
        close(a, b, 1e-13)


def test_gradient_of_a_dead_row_is_zero(device: str) -> None:
    """Also where the gradient of its log-sum-exp is not 0."""
    for dtype in FLOATS:
        inputs, _ = problem("bool", dtype, device)
        inputs = leaves(*inputs)
        _, lse = sdpa_with_lse(*inputs)
        grads = torch.autograd.grad(lse, inputs[:2], torch.ones_like(lse))
        assert all(g.isfinite().all() for g in grads) and (grads[0][..., 2, :] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", [(0, 4, 8, 8), (3, 0, 8, 8), (3, 4, 0, 8), (3, 4, 8, 0), (0, 0, 0, 0)], ids=str)
def test_zero_sizes(device: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    L, S, E, Ev = sizes
    inputs = leaves(*qkv(L=L, S=S, E=E, Ev=Ev, dtype=dtype, device=device))
    out, lse = sdpa_with_lse(*inputs)
    want, want_lse = reference.attention(*inputs)
    close(out, want, 4 * torch.finfo(dtype).eps)
    check_lse(lse, want_lse.detach(), dtype)
    grads = torch.autograd.grad(out.sum() + finite(lse).sum(), inputs)
    assert all(g.shape == t.shape and g.isfinite().all() for g, t in zip(grads, inputs, strict=True))


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout(device: str, p: float) -> None:
    """The log-sum-exp is that without dropout; out and its gradients are those of sdpa with the same random numbers."""
    inputs, _ = problem("float", torch.float32, device)
    grad = normal(2, 3, 9, 12)
    torch.manual_seed(5)
    out, lse = sdpa_with_lse(*inputs, p)
    torch.manual_seed(5)
    again, _ = sdpa_with_lse(*inputs, p)
    assert torch.equal(out, again) and torch.equal(lse, sdpa_with_lse(*inputs)[1])
    assert (out == 0).all() if p == 1.0 else not torch.equal(out, sdpa_with_lse(*inputs, p)[0])
    if device == "cuda":
        torch.manual_seed(5)
        same, grads = run(sdpa, leaves(*inputs), grad, dropout_p=p)
        torch.manual_seed(5)
        mine, my_grads = run(lambda *t: sdpa_with_lse(*t, p)[0], leaves(*inputs), grad)
        assert all(torch.equal(a, b) for a, b in zip((same, *grads), (mine, *my_grads), strict=True))


def test_p_zero_draws_no_random_numbers(device: str) -> None:
    inputs, _ = problem("plain", torch.float32, device)
    state = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    before = state()
    sdpa_with_lse(*inputs)
    assert torch.equal(before, state())
