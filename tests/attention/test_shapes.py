"""Shapes: sizes 0 and 1, head dims that are no multiple of 8, Ev other than E, large head dims, ranks, broadcasting."""

from __future__ import annotations

from pathlib import Path

import error_rule
import pytest
import reference
import torch
from helpers import FLOATS, HALVES, close, compare, leaves, normal, qkv, run, sdpa, sdpa_with_lse
from processes import importing, python

import attention_ext

ZERO_SIZES = [(0, 2, 3, 4, 8, 8), (2, 0, 3, 4, 8, 8), (2, 2, 0, 4, 8, 8), (2, 2, 3, 0, 8, 8), (2, 2, 3, 4, 0, 8)]
ZERO_SIZES += [(2, 2, 3, 4, 8, 0), (1, 1, 0, 0, 0, 0), (2, 2, 3, 0, 0, 0), (2, 2, 1, 0, 0, 8), (0, 0, 0, 0, 0, 0)]
HEAD_DIMS = [1, 2, 3, 5, 6, 7, 9, 10, 12, 20, 33, 65, 100, 130, 250]


def check_zero_sizes(sizes: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    B, H, L, S, E, Ev = sizes
    for causal in (False, True):
        for masked in (False, True):
            if causal and masked:
                continue
            inputs = leaves(*qkv((B,), (H,), L=L, S=S, E=E, Ev=Ev, dtype=dtype, device=device))
            mask = torch.ones(L, S, dtype=torch.bool, device=device) if masked else None
            out, grads = run(sdpa, [*inputs, mask], torch.ones(B, H, L, Ev), is_causal=causal)
            want, _ = reference.attention(*inputs, mask, causal)
            assert out.shape == (B, H, L, Ev) and out.dtype == dtype
            assert not want.numel() or error_rule.errors(out, want)[0] <= 4 * torch.finfo(dtype).eps * max(
                error_rule.largest(want), 1.0
            )
            assert [g.shape for g in grads] == [t.shape for t in inputs]
            assert all(g.isfinite().all() for g in grads)
            if S == 0:
                assert (out == 0).all() and all((g == 0).all() for g in grads)


def test_zero_sizes_do_not_kill_the_process() -> None:
    """A division by zero in native code ends the process, so this runs in one of its own, and first."""
    code = """
import torch, test_shapes as t
for sizes in t.ZERO_SIZES:
    t.check_zero_sizes(sizes, "cpu", torch.float32)
q = torch.randn(1, 4, 5, 8)
try:
    t.sdpa(q, q[:, :0], q[:, :0], enable_gqa=True)
except RuntimeError:
    print("ok")
"""
    assert python(code, env=importing(Path(__file__).parent)) == "ok"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", ZERO_SIZES, ids=str)
def test_zero_sizes(device: str, sizes: tuple[int, ...], dtype: torch.dtype, poison: None) -> None:
    check_zero_sizes(sizes, device, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_head_dim_zero_is_the_mean_of_the_visible_values(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=3, S=4, E=0, Ev=8, dtype=dtype, device=device)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(sdpa(q, k, v).double(), v.double().mean(-2, True).expand(2, 3, 3, 8), rtol=0, atol=4 * eps)
    visible = torch.stack([v[:, :, : i + 1].double().mean(-2) for i in range(3)], 2)
    torch.testing.assert_close(sdpa(q, k, v, None, 0.0, True).double(), visible, rtol=0, atol=4 * eps)
    keep = torch.tensor([True, False, False, True], device=device)[None]
    some = v[:, :, [0, 3]].double().mean(-2, True).expand(2, 3, 3, 8)
    torch.testing.assert_close(sdpa(q, k, v, keep).double(), some, rtol=0, atol=4 * eps)
    bias = torch.tensor([[1.0, float("-inf"), 0.0, -2.0]], dtype=dtype, device=device)
    compare(q, k, v, bias)


@pytest.mark.parametrize("heads", [(3, 3), (4, 2)], ids=str)
@pytest.mark.parametrize(("L", "S"), [(0, 5), (5, 0)])
def test_zero_lengths_with_grouped_heads(device: str, heads: tuple[int, ...], L: int, S: int) -> None:
    inputs = leaves(*qkv(heads=heads, L=L, S=S, device=device))
    out, grads = run(sdpa, inputs, torch.ones(2, heads[0], L, 16), enable_gqa=True)
    assert out.shape == (2, heads[0], L, 16) and (out == 0).all()
    assert [g.shape for g in grads] == [t.shape for t in inputs] and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("rank", [2, 3, 5])
@pytest.mark.parametrize(("L", "S", "E", "Ev"), [(0, 4, 8, 8), (3, 0, 8, 8), (3, 4, 0, 8), (3, 4, 8, 0)])
def test_zero_sizes_other_ranks(device: str, rank: int, L: int, S: int, E: int, Ev: int) -> None:
    batch, heads = {2: ((), ()), 3: ((), (3,)), 5: ((2, 2), (3,))}[rank]
    inputs = leaves(*qkv(batch, heads, L=L, S=S, E=E, Ev=Ev, device=device))
    want, _ = reference.attention(*inputs)
    out, grads = run(sdpa, inputs, torch.ones(want.shape))
    assert out.shape == want.shape and [g.shape for g in grads] == [t.shape for t in inputs]
    close(out, want, 1e-6)


@pytest.mark.parametrize("E", HEAD_DIMS)
def test_odd_head_dims(device: str, E: int, poison: None) -> None:
    compare(*qkv(E=E, device=device))


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("E", [1, 3, 7, 12, 33, 130])
def test_odd_head_dims_other_dtypes(device: str, E: int, dtype: torch.dtype, poison: None) -> None:
    q, k, v = qkv(E=E, dtype=dtype, device=device)
    compare(q, k, v)
    compare(q, k, v, torch.rand(19, 19, device=device) < 0.7)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("E", "Ev"), [(8, 24), (24, 8), (64, 128), (192, 128), (32, 1), (16, 17), (1, 64)])
def test_value_head_dim_differs(device: str, E: int, Ev: int, dtype: torch.dtype, poison: None) -> None:
    q, k, v = qkv((2,), (2,), L=7, S=9, E=E, Ev=Ev, dtype=dtype, device=device)
    out, grads = compare(q, k, v)
    assert out.shape == (2, 2, 7, Ev) and [g.size(-1) for g in grads] == [E, E, Ev]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("E", [256, 257, 320, 512, 576, 1024])
def test_large_head_dims(device: str, E: int, dtype: torch.dtype, poison: None) -> None:
    q, k, v = qkv((1,), (2,), L=70, E=E, dtype=dtype, device=device)
    compare(q, k, v, causal=True)
    compare(q, k, v, backward=False)


@pytest.mark.parametrize(("L", "S"), [(1, 1), (1, 64), (2, 3), (63, 64), (64, 1), (65, 127), (128, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lengths_around_a_tile(device: str, L: int, S: int, dtype: torch.dtype, poison: None) -> None:
    compare(*qkv((1,), (2,), L=L, S=S, E=64, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("batch", "heads"), [((), ()), ((), (3,)), ((2,), (3,)), ((2, 2), (3,)), ((1, 2, 1), (3,))], ids=str)
def test_ranks(device: str, batch: tuple[int, ...], heads: tuple[int, ...], dtype: torch.dtype) -> None:
    out, _ = compare(*qkv(batch, heads, L=6, S=7, E=8, dtype=dtype, device=device))
    assert out.shape == (*batch, *heads, 6, 8)


@pytest.mark.parametrize("op", [sdpa, lambda *args, **options: sdpa_with_lse(*args, **options)[0]], ids=["sdpa", "sdpa_with_lse"])
@pytest.mark.parametrize("rank", [3, 4, 12])
@pytest.mark.parametrize("kind", ["plain", "dropout", "scale", "bool", "float32", "requires grad"])
def test_order_in_memory(device: str, kind: str, rank: int, op) -> None:
    """(..., L, H, E) if the query lies so, else contiguous, whichever operator it is that runs."""
    batch = {3: (), 4: (2,), 12: (2,) + (1,) * 8}[rank]
    q, k, v = qkv(batch, (3,), L=5, S=6, E=8, Ev=7, dtype=torch.float16, device=device)
    mask = {"bool": torch.ones(5, 6, device=device) > 0, "float32": torch.zeros(5, 6, device=device)}.get(kind)
    if kind == "requires grad":
        mask = torch.zeros(5, 6, dtype=torch.float16, device=device, requires_grad=True)
    options = {"dropout": {"dropout_p": 0.5}, "scale": {"is_causal": True, "scale": -1.0}}.get(kind, {})
    inner = q.transpose(-3, -2).contiguous().transpose(-3, -2)
    assert op(q, k, v, mask, **options).is_contiguous() and op(q.mT.contiguous().mT, k, v, mask, **options).is_contiguous()
    out = op(inner, k, v, mask, **options)
    assert out.transpose(-3, -2).is_contiguous() and out.shape == (*batch, 3, 5, 7)
    assert op(inner, inner, inner, **options).stride() == inner.stride()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "grouped", "broadcast"])
def test_ranks_above_ten(device: str, kind: str, dtype: torch.dtype) -> None:
    """Which the CUDA kernels do not take: there it is PyTorch's operator, with the rest of the contract all the same."""
    heads = (4, 2) if kind == "grouped" else (3,)
    q, k, v = qkv((2,), heads, L=5, S=6, E=8, Ev=7, dtype=dtype, device=device)
    q, k, v = (t.reshape(2, *(1,) * 8, *t.shape[1:]) for t in (q, k, v))
    if kind == "broadcast":
        k, v = k[:1, 0], v[1]
    keep = torch.rand(5, 6, device=device) < 0.6
    keep[:, 0], keep[3] = True, False
    mask = {"bool": keep, "float": normal(2, *(1,) * 9, 5, 6, dtype=dtype, device=device)}.get(kind)
    out, grads = compare(q, k, v, mask, causal=kind == "causal", gqa=kind == "grouped")
    assert out.dim() == 12 and out.shape == (*q.shape[:-1], 7) and out.dtype == dtype
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v, *[mask] * (kind == "float"))]
    if kind == "bool":
        assert (out[..., 3, :] == 0).all() and (grads[0][..., 3, :] == 0).all()
    target = attention_ext.explain(q, k, v, mask, is_causal=kind == "causal", enable_gqa=kind == "grouped").kernel
    assert target == "torch_math" if device == "cuda" else target.startswith("torch")
    assert ((sdpa(q, k, v, mask, 1.0) if kind != "grouped" else sdpa(q, k, v, None, 1.0, enable_gqa=True)) == 0).all()


@pytest.mark.parametrize(
    ("q_lead", "k_lead", "v_lead"),
    [
        ((2, 3), (1, 3), (1, 3)),
        ((2, 3), (2, 1), (2, 1)),
        ((2, 3), (1, 1), (2, 3)),
        ((2, 3), (2, 3), (1, 1)),
        ((2, 3), (3,), (3,)),
        ((2, 3), (), (2, 3)),
        ((1, 3), (2, 3), (2, 3)),
        ((), (2, 3), (2, 3)),
        ((2, 1, 3), (1, 2, 1), (3,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_leading_dims_broadcast(device: str, q_lead, k_lead, v_lead, causal: bool) -> None:
    q, k, v = (
        normal(*q_lead, 4, 8, device=device),
        normal(*k_lead, 5, 8, device=device),
        normal(*v_lead, 5, 6, device=device),
    )
    out, grads = compare(q, k, v, causal=causal)
    assert out.shape == (*torch.broadcast_shapes(q_lead, k_lead, v_lead), 4, 6)
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("lengths", [(4, 5), (0, 5), (4, 0), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "leads", [((3, 1), (1, 2), (3, 2)), ((1, 2), (1, 2), (3, 2)), ((3, 1), (), (3, 2)), ((1, 2), (3, 1), (1, 1))], ids=str
)
def test_masks_beside_leading_dims_that_broadcast(device: str, leads: tuple, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """The mask broadcasts to the scores of all three operands, also where only the value has a dim, and where there is no row."""
    L, S = lengths
    q, k, v = (normal(*lead, n, 8, dtype=dtype, device=device) for lead, n in zip(leads, (L, S, S), strict=True))
    shape = torch.broadcast_shapes(*leads)
    for mask in (None, normal(*shape, L, S, dtype=dtype, device=device), torch.rand(*shape, L, 1, device=device) < 0.7):
        inputs = leaves(q, k, v, mask)
        out, grads = run(sdpa, inputs, torch.ones(*shape, L, 8))
        doubles = leaves(*(t.detach().cpu().double() if t is not None and t.is_floating_point() else t for t in inputs))
        want, _ = reference.attention(*doubles)
        wanted = [t for t in doubles if t is not None and t.requires_grad]
        right = torch.autograd.grad(want, wanted, torch.ones_like(want), allow_unused=True, materialize_grads=True)
        assert out.shape == want.shape and [g.shape for g in grads] == [t.shape for t in wanted]
        for a, b in zip((out, *grads), (want, *right), strict=True):
            close(a, b, 32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", ZERO_SIZES, ids=str)
@pytest.mark.parametrize("shape", ["full", "row", "one"])
def test_zero_sizes_with_a_mask_that_requires_grad(device: str, sizes: tuple[int, ...], shape: str, dtype: torch.dtype) -> None:
    """Its gradient is zeros of its own shape, not None."""
    B, H, L, S, E, Ev = sizes
    inputs = qkv((B,), (H,), L=L, S=S, E=E, Ev=Ev, dtype=dtype, device=device)
    mask = normal(*{"full": (B, H, L, S), "row": (1, S), "one": (1, 1)}[shape], dtype=dtype, device=device)
    out, grads = run(sdpa, leaves(*inputs, mask), torch.ones(B, H, L, Ev))
    close(out, reference.attention(*inputs, mask)[0], 4 * torch.finfo(dtype).eps)
    assert len(grads) == 4 and grads[3].shape == mask.shape and grads[3].isfinite().all()
