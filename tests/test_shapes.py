"""Shapes: sizes 0 and 1, head dims that are no multiple of 8, Ev other than E, large head dims, ranks, broadcasting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import reference
import torch
from helpers import FLOATS, HALVES, close, compare, leaves, normal, qkv, run, sdpa

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
            assert not want.numel() or reference.errors(out, want)[0] <= 4 * torch.finfo(dtype).eps * max(
                reference.largest(want), 1.0
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
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "ok", f"exit code {done.returncode}\n{done.stderr}"


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


@pytest.mark.gpu
@pytest.mark.parametrize("n", [46400, 65600])
def test_mask_offset_past_32_bits(n: int) -> None:
    """n^2 mask elements pass 2^31 or 2^32; rows on both sides of the boundary are right."""
    need = 3 * n * n
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need >> 30} GiB of free GPU memory")
    q, k, v = qkv((1,), (1,), L=n, E=64, dtype=torch.bfloat16, device="cuda")
    mask = torch.ones(n, n, dtype=torch.bool, device="cuda")
    mask[:, 1::2] = False
    out = sdpa(q, k, v, mask)
    edge = (2**31 if n * n < 2**32 else 2**32) // n
    for row in (0, n // 2, edge - 1, edge + 1, n - 1):
        one = q[..., row : row + 1, :]
        want, _ = reference.attention(one, k, v, mask[row : row + 1])
        base = torch.nn.functional.scaled_dot_product_attention(one, k, v, mask[row : row + 1])
        reference.check_error(f"row {row}", out[..., row : row + 1, :], want, base)
