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


JUNK = {0: [], 1: [0], 2: [1], 3: [0, 2], 4: [0, 1, 2]}  # the parts that are dead in each row


def with_junk(dtype: torch.dtype, device: str, *junk: float) -> tuple[list[Tensor], list[Tensor]]:
    """Three parts of five rows, what is dead filled with each of `junk` in turn."""
    outs = [normal(2, 5, 4, dtype=dtype, device=device) for _ in range(3)]
    lses = [normal(2, 5, dtype=torch.promote_types(dtype, torch.float32), device=device) for _ in range(3)]
    for row, parts in JUNK.items():
        for part in parts:
            lses[part][:, row] = NEG_INF
            outs[part][:, row] = torch.tensor(junk, dtype=dtype, device=device).repeat(4)[:4]
    return outs, lses


def merged_twice(parts: list[Tensor], op=merge_partials) -> list[Tensor]:
    """out and lse without its -inf, first derivatives, and derivatives of those."""
    parts = leaves(*parts)
    out, lse = op(parts[:3], parts[3:])
    lse = lse.masked_fill(lse == NEG_INF, 0.0)
    grads = torch.autograd.grad(out.float().sin().sum() + lse.sin().sum(), parts, create_graph=True)
    return [out, lse, *grads, *torch.autograd.grad(sum(g.float().square().sum() for g in grads), parts)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_dead_part_adds_nothing(device: str, dtype: torch.dtype) -> None:
    """Whatever its output holds: values and derivatives are those beside a dead part of zeros."""
    torch.manual_seed(0)
    outs, lses = with_junk(dtype, device, 0.0)
    want = merged_twice([*outs, *lses])
    assert all(t.isfinite().all() for t in want)
    for junk in (float("nan"), float("inf"), NEG_INF), (float("nan"),):
        torch.manual_seed(0)
        outs, lses = with_junk(dtype, device, *junk)
        assert not all(t.isfinite().all() for t in outs)
        got = merged_twice([*outs, *lses])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        for row, parts in JUNK.items():
            assert all((got[2 + part][:, row] == 0).all() for part in parts), "the gradient of what is dead"
        assert (got[0][:, 4] == 0).all() and (merge_partials(outs, lses)[1][:, 4] == NEG_INF).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_dead_part_compiled_and_mapped(device: str, dtype: torch.dtype) -> None:
    outs, lses = with_junk(dtype, device, float("nan"), float("inf"))
    op = lambda *t: merge_partials(t[:3], t[3:])  # noqa: E731
    want = op(*outs, *lses)
    assert all(not t.isnan().any() for t in want)
    torch._dynamo.reset()
    for transformed in (torch.compile(op, fullgraph=True, backend="aot_eager"), torch.vmap(op)):
        got = transformed(*outs, *lses)
        torch.testing.assert_close(got, want)
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    mine, right = (leaves(*outs, *lses) for _ in range(2))
    grads = [torch.autograd.grad(f(*t)[0].float().sin().sum(), t) for f, t in ((compiled, mine), (op, right))]
    torch.testing.assert_close(*grads)
    assert all(g.isfinite().all() for g in grads[0])


def test_what_is_not_dead_counts(device: str) -> None:
    """A live part that is not finite stays so beside a dead one; a log-sum-exp of NaN or +inf makes its row NaN."""
    outs, lses = with_junk(torch.float32, device, float("nan"))
    outs[1][:, 1, 2] = float("nan")
    outs[2][:, 2, 3] = float("inf")
    out, _ = merge_partials(outs, lses)
    assert out[:, 1].isnan().tolist() == [[False, False, True, False]] * 2
    assert out[:, 2].isinf().tolist() == [[False, False, False, True]] * 2
    assert out[:, [0, 3, 4]].isfinite().all()
    for value in (float("nan"), float("inf")):
        lses[1][:, 3] = value
        assert all(t[:, 3].isnan().all() for t in merge_partials(outs, lses))


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
