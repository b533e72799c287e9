"""merge_partials: attention over disjoint sets of keys, put together, is attention over all of them."""

from __future__ import annotations

import pytest
import reference
import torch
from helpers import FLOATS, HALVES, check_lse, close, leaves, normal, qkv
from torch import Tensor

from attention_ext import merge_partials, sdpa_with_lse

NEG_INF = float("-inf")
SPLITS = [(13,), (6, 7), (1, 9, 3), (12, 0, 1), (1,) * 13]


def masked(kind: str, dtype: torch.dtype, device: str, L: int = 7, S: int = 13) -> Tensor | None:
    """Row 2 is dead everywhere; row 3 sees the last key only, row 4 the first; float masks require grad."""
    if kind == "none":
        return None
    keep = torch.rand(L, S) < 0.6
    keep[2:5], keep[3, -1], keep[4, 0] = False, True, True
    mask = keep if kind == "bool" else normal(3, L, S, dtype=dtype).masked_fill(~keep, NEG_INF)
    return mask.to(device)


def in_parts(split: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    masks = [None] * len(split) if mask is None else mask.split(split, -1)
    parts = [sdpa_with_lse(q, a, b, m, **options) for a, b, m in zip(k.split(split, -2), v.split(split, -2), masks, strict=True)]
    return merge_partials(*zip(*parts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_parts_are_the_whole(device: str, split: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    """Forward and the gradients of every input, through out and through lse."""
    q, k, v = qkv(L=7, S=13, E=8, dtype=dtype, device=device)
    inputs = [q, k, v, masked(kind, dtype, device)]
    doubles = leaves(*(t.cpu().double() if t is not None and t.is_floating_point() else t for t in inputs))
    want, want_lse = reference.attention(*doubles)
    out, lse = in_parts(split, *(mine := leaves(*inputs)))
    close(out, want, 16 * torch.finfo(dtype).eps)
    check_lse(lse, want_lse.detach(), dtype)
    if kind != "none":
        assert (out[..., 2, :] == 0).all() and (lse[..., 2] == NEG_INF).all()
    grad, grad_lse = normal(*want.shape), normal(*want_lse.shape)
    results = []
    for tensors, a, b in ((mine, out, lse), (doubles, want, want_lse)):
        alive = b.masked_fill(b == NEG_INF, 0.0)
        total = (a * grad.to(a)).sum() + (alive * grad_lse.to(b)).sum()
        results.append(torch.autograd.grad(total, [t for t in tensors if t is not None and t.requires_grad]))
    for got, right in zip(*results, strict=True):
        close(got, right, 128 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half(device: str, dtype: torch.dtype) -> None:
    """Each part was rounded to half precision, the sum of them is rounded once more."""
    q, k, v = qkv(L=7, S=13, E=8, dtype=dtype, device=device)
    mask = masked("bool", dtype, device)
    out, lse = in_parts((5, 8), q, k, v, mask)
    want, want_lse = reference.attention(q, k, v, mask)
    assert out.dtype == dtype and lse.dtype == torch.float32
    close(out, want, 2 * torch.finfo(dtype).eps)
    check_lse(lse, want_lse, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_part_comes_back(device: str, dtype: torch.dtype) -> None:
    out, lse = sdpa_with_lse(*qkv(L=7, S=13, dtype=dtype, device=device), masked("bool", dtype, device))
    same, same_lse = merge_partials([out], [lse])
    assert torch.equal(out, same) and torch.equal(lse, same_lse)


def test_grouped_heads_and_causal_by_hand(device: str) -> None:
    """A causal mask over keys in parts is a boolean mask of each part."""
    q, k, v = qkv(heads=(4, 2), L=13, S=13, device=device)
    tril = torch.ones(13, 13, dtype=torch.bool, device=device).tril()
    out, lse = in_parts((6, 7), q, k, v, tril, enable_gqa=True)
    want, want_lse = reference.attention(q, k, v, None, True, None, True)
    close(out, want, 1e-5)
    check_lse(lse, want_lse, torch.float32)


def test_far_apart(device: str) -> None:
    """Parts whose log-sum-exps differ by more than exp can hold, on either side of zero."""
    outs = [normal(3, 4, device=device).requires_grad_() for _ in range(3)]
    lses = [torch.tensor(x, device=device).requires_grad_() for x in ([900.0, -900.0, 5e4], [-900.0, 900.0, 1.0], [0.0, 0.0, 0.0])]
    out, lse = merge_partials(outs, lses)
    assert torch.equal(out, torch.stack([outs[0][0], outs[1][1], outs[0][2]])) and lse.tolist() == [900.0, 900.0, 5e4]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum() + lse.sum(), [*outs, *lses]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_everywhere(device: str, dtype: torch.dtype) -> None:
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    outs = [torch.zeros(2, 5, 3, dtype=dtype, device=device, requires_grad=True) for _ in range(2)]
    lses = [torch.full((2, 5), NEG_INF, dtype=acc, device=device, requires_grad=True) for _ in range(2)]
    out, lse = merge_partials(outs, lses)
    assert (out == 0).all() and (lse == NEG_INF).all() and lse.dtype == acc
    grads = torch.autograd.grad((out, lse), [*outs, *lses], (torch.ones_like(out), torch.ones_like(lse)))
    assert all((g == 0).all() for g in grads)


def test_gradcheck(device: str) -> None:
    outs = leaves(*(normal(2, 3, 2, dtype=torch.float64, device=device) for _ in range(3)))
    lses = leaves(*(normal(2, 3, dtype=torch.float64, device=device) for _ in range(3)))
    op = lambda *t: merge_partials(t[:3], t[3:])  # noqa: E731
    assert torch.autograd.gradcheck(op, (*outs, *lses))
    assert torch.autograd.gradgradcheck(op, (*outs, *lses))


def test_compiled_and_mapped(device: str) -> None:
    q, k, v = qkv(L=7, S=13, E=8, device=device)
    f = lambda q, k, v: in_parts((6, 7), q, k, v, None)  # noqa: E731
    want = f(q, k, v)
    torch._dynamo.reset()
    for got in (torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v), torch.vmap(f)(q, k, v)):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_no_rows_and_no_columns(device: str) -> None:
    for shape in ((2, 0, 4), (2, 3, 0), (0, 3, 4)):
        out, lse = merge_partials([torch.zeros(shape, device=device)] * 2, [torch.zeros(shape[:-1], device=device)] * 2)
        assert out.shape == shape and lse.shape == shape[:-1]


O, Z = (2, 5, 3), (2, 5)
REFUSED = {
    "outs": [
        (lambda o, z: o[0], lambda o, z: z),
        (lambda o, z: [], lambda o, z: []),
        (lambda o, z: None, lambda o, z: z),
    ],
    "lses": [(lambda o, z: o, lambda o, z: z[:1]), (lambda o, z: o, lambda o, z: z[0]), (lambda o, z: o, lambda o, z: [])],
    "outs[0]": [
        (lambda o, z: [t.long() for t in o], lambda o, z: z),
        (lambda o, z: [t[0, 0] for t in o], lambda o, z: z),
        (lambda o, z: [1.0, 2.0], lambda o, z: z),
    ],
    "outs[1]": [
        (lambda o, z: [o[0], o[1][:1]], lambda o, z: z),
        (lambda o, z: [o[0], o[1][0]], lambda o, z: z),
        (lambda o, z: [o[0], o[1].half()], lambda o, z: z),
        (lambda o, z: [o[0], o[1].to("meta")], lambda o, z: z),
    ],
    "lses[0]": [(lambda o, z: o, lambda o, z: [t.double() for t in z]), (lambda o, z: o, lambda o, z: [t[..., None] for t in z])],
    "lses[1]": [
        (lambda o, z: o, lambda o, z: [z[0], z[1][:, :4]]),
        (lambda o, z: o, lambda o, z: [z[0], z[1].half()]),
        (lambda o, z: o, lambda o, z: [z[0], z[1].to("meta")]),
        (lambda o, z: o, lambda o, z: [z[0], None]),
    ],
}


@pytest.mark.parametrize("argument", REFUSED)
def test_refused(device: str, argument: str) -> None:
    outs, lses = [torch.zeros(O, device=device) for _ in range(2)], [torch.zeros(Z, device=device) for _ in range(2)]
    for of_outs, of_lses in REFUSED[argument]:
        with pytest.raises(RuntimeError) as caught:
            merge_partials(of_outs(outs, lses), of_lses(outs, lses))
        text = str(caught.value)
        assert text.startswith(f"attention_ext: {argument}: expected ") and ", got " in text, text
