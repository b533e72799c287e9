"""Derivatives: first order everywhere, second order right or refused, forward mode, torch.func, checkpointing, determinism."""

from __future__ import annotations

import itertools
import threading
import warnings
from functools import partial

import error_rule
import pytest
import reference
import torch
from helpers import FLOATS, close, leaves, normal, oracle_with_grads, qkv, run, sdpa, torch_own
from torch.utils.checkpoint import checkpoint

SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(("query", "key", "value", "attn_mask"), n)]
VARIANTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "negative scale": {"is_causal": True, "scale": -0.7},
    "bool": {"attn_mask": "bool"},
    "float": {"attn_mask": "float"},
}


def variant(name: str, L: int, S: int, device: str, dtype: torch.dtype = torch.float64) -> dict:
    options = dict(VARIANTS[name])
    if options.get("attn_mask") == "bool":
        keep = torch.rand(L, S) < 0.7
        keep[:, 0], keep[1] = True, False
        options["attn_mask"] = keep.to(device)
    elif "attn_mask" in options:
        options["attn_mask"] = normal(L, S, dtype=dtype, device=device)
    return options


def oracle(name_or_options, q, k, v):
    o = name_or_options
    return reference.attention(q, k, v, o.get("attn_mask"), o.get("is_causal", False), o.get("scale"))[0]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("L", "S", "E", "Ev"), [(4, 4, 3, 3), (3, 5, 4, 2), (5, 3, 2, 4)])
def test_gradcheck(device: str, name: str, L: int, S: int, E: int, Ev: int) -> None:
    inputs = leaves(*qkv((1,), (2,), L=L, S=S, E=E, Ev=Ev, dtype=torch.float64, device=device))
    options = variant(name, L, S, device)
    assert torch.autograd.gradcheck(partial(sdpa, **options), inputs)


def test_gradcheck_of_grouped_heads_and_mask(device: str) -> None:
    inputs = leaves(*qkv((2,), (4, 2), L=3, S=4, E=3, dtype=torch.float64, device=device))
    mask = normal(4, 1, 4, dtype=torch.float64, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k, v, m: sdpa(q, k, v, m, enable_gqa=True), (*inputs, mask))


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_subsets_of_requires_grad(device: str, subset: tuple[str, ...], dtype: torch.dtype) -> None:
    error_rule.settle(lambda: check_subset(device, subset, dtype, (1, 3, 1, 6), dtype))


@pytest.mark.parametrize("shape", [(6, 6), (1, 3, 1, 6), (2, 1, 6, 6), (1, 1, 1, 6), (3, 6, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("mask_dtype", ["float32", "same"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_only_the_mask_needs_a_gradient(device: str, shape: tuple[int, ...], dtype: torch.dtype, mask_dtype: str) -> None:
    mask_dtype = torch.float32 if mask_dtype == "float32" else dtype
    error_rule.settle(lambda: check_subset(device, ("attn_mask",), dtype, shape, mask_dtype))


def check_subset(device: str, subset: tuple[str, ...], dtype: torch.dtype, shape: tuple[int, ...], mask_dtype) -> None:
    """The inputs in `subset` get the right gradient, of their own shape and dtype, and the others get none."""
    inputs = [*qkv(L=6, E=8, dtype=dtype, device=device), normal(*shape, dtype=mask_dtype, device=device)]
    grad = normal(2, 3, 6, 8, dtype=dtype, device=device)
    want, _, want_grads = oracle_with_grads(inputs, grad, False, None, False)
    _, own = torch_own(inputs, grad, want, False, None, False)
    named = dict(zip(("query", "key", "value", "attn_mask"), inputs, strict=True))
    for name in subset:
        named[name].requires_grad_()
    out = sdpa(**named)
    assert out.requires_grad and out.grad_fn is not None
    out.backward(grad)
    for (name, tensor), right, base in zip(named.items(), want_grads, own, strict=True):
        assert (tensor.grad is not None) == (name in subset)
        if tensor.grad is not None:
            assert tensor.grad.shape == tensor.shape
            error_rule.check_error(name, tensor.grad, right, base, error_rule.largest(*want_grads), dtype)


def test_nothing_needs_a_gradient(device: str) -> None:
    q, k, v = qkv(L=4, device=device)
    assert not sdpa(q, k, v).requires_grad
    with torch.no_grad():
        assert not sdpa(*leaves(q, k, v)).requires_grad


@pytest.mark.parametrize("name", VARIANTS)
def test_double_backward_is_right_or_refused(device: str, name: str) -> None:
    (q,) = leaves(normal(1, 1, 4, 8, dtype=torch.float64, device=device))
    options = variant(name, 4, 4, device)
    (grad,) = torch.autograd.grad(sdpa(q, q, q, **options).square().sum(), q, create_graph=True)
    (plain,) = torch.autograd.grad(sdpa(q, q, q, **options).square().sum(), q)
    torch.testing.assert_close(grad.detach(), plain)
    try:
        (second,) = torch.autograd.grad(grad.square().sum(), q)
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        assert "double backward" in text or ("derivative" in text and "not implemented" in text), text
    else:
        (x,) = leaves(q.detach().cpu())
        (first,) = torch.autograd.grad(oracle(options, x, x, x).square().sum(), x, create_graph=True)
        close(second, torch.autograd.grad(first.square().sum(), x)[0], 1e-11)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_forward_mode(device: str, name: str, which: tuple[int, ...]) -> None:
    q, k, v = qkv(L=4, S=5, E=8, dtype=torch.float64, device=device)
    options = variant(name, 4, 5, device)
    tangents = [normal(*t.shape, dtype=torch.float64, device=device) for t in (q, k, v)]

    def only(op, tensors):
        def call(*chosen):
            inputs = list(tensors)
            for i, t in zip(which, chosen, strict=True):
                inputs[i] = t
            return op(*inputs)

        primals, directions = tuple(tensors[i] for i in which), tuple(tangents[i].to(tensors[0].device) for i in which)
        return torch.func.jvp(call, primals, directions)

    out, tangent = only(partial(sdpa, **options), (q, k, v))
    cpu = {n: o.cpu() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    want, want_tangent = only(partial(oracle, cpu), [t.cpu() for t in (q, k, v)])
    close(out, want, 1e-12)
    close(tangent, want_tangent, 1e-12)


def test_forward_mode_without_functorch(device: str) -> None:
    q, k, v = qkv(L=4, E=8, dtype=torch.float64, device=device)
    t = normal(*q.shape, dtype=torch.float64, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, t)
        tangent = torch.autograd.forward_ad.unpack_dual(sdpa(dual, k, v)).tangent
    want = torch.func.jvp(lambda x: reference.attention(x, k.cpu(), v.cpu())[0], (q.cpu(),), (t.cpu(),))[1]
    close(tangent, want, 1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_func_grad_and_jacobians(device: str, name: str) -> None:
    q, k, v = qkv((1,), (2,), L=3, S=4, E=3, dtype=torch.float64, device=device)
    options = variant(name, 3, 4, device)
    cpu = {n: o.cpu() if isinstance(o, torch.Tensor) else o for n, o in options.items()}

    def total(op):
        return lambda a, b, c: op(a, b, c).square().sum()

    mine, right = partial(sdpa, **options), partial(oracle, cpu)
    got = torch.func.grad(total(mine), argnums=(0, 1, 2))(q, k, v)
    want = torch.func.grad(total(right), argnums=(0, 1, 2))(q.cpu(), k.cpu(), v.cpu())
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-12)
    jacobian = torch.func.jacrev(right)(q.cpu(), k.cpu(), v.cpu())
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        close(transform(mine)(q, k, v), jacobian, 1e-12)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 0), (0, 0, 0), (2, None, 1), (None, None, 0)], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "bool", "float"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_vmap_is_the_loop_and_warns_of_nothing(device: str, dims: tuple, name: str, rank: int) -> None:
    batch, heads = {2: ((), ()), 3: ((), (3,)), 4: ((2,), (3,))}[rank]
    inputs = list(qkv(batch, heads, L=7, S=9, E=8, device=device))
    for i, d in enumerate(dims):
        if d is not None:
            inputs[i] = torch.stack([inputs[i] + n for n in range(5)], d)
    op = partial(sdpa, **variant(name, 7, 9, device, torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(op, in_dims=dims)(*inputs)
    loop = [op(*(t if d is None else t.select(d, n) for t, d in zip(inputs, dims, strict=True))) for n in range(5)]
    torch.testing.assert_close(got, torch.stack(loop), rtol=1e-5, atol=1e-5)


def test_vmap_over_the_mask(device: str) -> None:
    q, k, v = qkv(L=7, S=9, E=8, device=device)
    for masks in (normal(5, 7, 9, device=device), torch.rand(5, 1, 9, device=device) < 0.7):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = torch.vmap(lambda m: sdpa(q, k, v, m))(masks)
        torch.testing.assert_close(got, torch.stack([sdpa(q, k, v, m) for m in masks]), rtol=1e-5, atol=1e-5)


def test_vmap_of_grad(device: str) -> None:
    q, (k, v) = normal(5, 3, 7, 8, device=device), (normal(3, 9, 8, device=device) for _ in range(2))
    grad = torch.func.grad(lambda t: sdpa(t, k, v).square().sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(grad)(q)
    torch.testing.assert_close(got, torch.stack([grad(t) for t in q]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_checkpoint(device: str, reentrant: bool, p: float) -> None:
    inputs, grad = leaves(*qkv(L=9, device=device)), normal(2, 3, 9, 16)
    results = []
    for wrap in (lambda *t: sdpa(*t, None, p), lambda *t: checkpoint(sdpa, *t, None, p, use_reentrant=reentrant)):
        torch.manual_seed(3)
        out = wrap(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, grad.to(device))) if not reentrant else backward(out, inputs, grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def backward(out, inputs, grad):
    for t in inputs:
        t.grad = None
    out.backward(grad.to(out.device))
    return (out, *(t.grad.clone() for t in inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_deterministic(device: str, dtype: torch.dtype, masked: bool, deterministic: None) -> None:
    L = 513 if device == "cuda" else 130
    inputs = qkv((4,), (8,), L=L, E=64, dtype=dtype, device=device)
    mask = normal(1, 8, 1, L, dtype=dtype, device=device) if masked else None
    grad = normal(4, 8, L, 64)
    runs = [run(sdpa, leaves(*inputs, mask), grad) for _ in range(20 if device == "cuda" else 3)]
    for out, grads in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip((out, *grads), (runs[0][0], *runs[0][1]), strict=True))


def test_graph_is_kept_and_guarded(device: str) -> None:
    inputs = leaves(*qkv(L=5, device=device))
    out = sdpa(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    k = inputs[1] * 1
    out = sdpa(inputs[0], k, inputs[2])
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_threads(device: str) -> None:
    inputs, grad = qkv(L=33, device=device), normal(2, 3, 33, 16)
    want = run(sdpa, leaves(*inputs), grad, is_causal=True)
    got: list = [None] * 4

    def work(n: int) -> None:
        got[n] = [run(sdpa, leaves(*inputs), grad, is_causal=True) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for out, grads in itertools.chain(*got):
        torch.testing.assert_close((out, *grads), (want[0], *want[1]), rtol=1e-5, atol=1e-5)
