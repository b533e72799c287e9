"""Layout: strides, offsets and stride 0 are honoured in every combination; outputs lie where the contract says."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import FLOATS, HALVES, compare, leaves, normal, qkv, run, sdpa, sdpa_backward, sdpa_forward
from torch import Tensor


def in_order(tensor: Tensor, *order: int) -> Tensor:
    """The same values with the dims lying in memory in this order, slowest first."""
    back = [order.index(d) for d in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(back)


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


@pytest.mark.parametrize(
    ("dtype", "E"),
    [(torch.float32, 64), (torch.float64, 16), *((d, e) for d in HALVES for e in (64, 128, 512))],
    ids=str,
)
def test_packed_projection(device: str, dtype: torch.dtype, E: int) -> None:
    """(B, L, 3, H, E) unbound and transposed: each of q, k, v strided or dense."""
    packed = normal(2, 37, 3, 4, E, dtype=dtype, device=device)
    q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
    for pick in itertools.product((False, True), repeat=3):
        compare(
            *(t.contiguous() if dense else t for t, dense in zip((q, k, v), pick, strict=True)),
            backward=all(pick) or not any(pick),
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("orders", [(0, 1, 3, 2), (3, 2, 1, 0), (1, 0, 2, 3), (2, 0, 1, 3), (0, 3, 1, 2)], ids=str)
def test_any_order_of_dims(device: str, orders: tuple[int, ...], causal: bool) -> None:
    q, k, v = qkv(L=9, S=11, E=10, Ev=12, device=device)
    for pick in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        strided = [in_order(t, *orders) if moved else t for t, moved in zip((q, k, v), pick, strict=True)]
        compare(*strided, causal=causal)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("S", [32, 33, 65])
def test_stride_zero_keys(device: str, dtype: torch.dtype, S: int) -> None:
    q = normal(2, 4, 37, 64, dtype=dtype, device=device)
    one = normal(1, 1, S, 64, dtype=dtype, device=device).expand(2, 4, S, 64)
    compare(q, one, one, torch.ones(37, S, dtype=torch.bool, device=device))
    compare(q, one, one.contiguous(), causal=True)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_stride_zero_anywhere(device: str, dims: tuple[int, ...]) -> None:
    q, k, v = qkv(L=8, S=8, E=8, device=device)

    def spread(t: Tensor) -> Tensor:
        for d in dims:
            t = t.narrow(d, 0, 1)
        return t.expand(2, 3, 8, 8)

    compare(spread(q), k, v)
    compare(q, spread(k), v)
    compare(q, k, spread(v))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("E", [8, 264])
def test_rows_that_overlap(device: str, E: int, dtype: torch.dtype) -> None:
    """Stride 0, and sliding windows over one signal: a leading dimension below the width, which BLAS does not take."""
    q, k, v = qkv((1,), (4,), L=15, S=19, E=E, dtype=dtype, device=device)
    one = normal(E, 4, dtype=dtype, device=device).mT.contiguous().view(1, 4, 1, E).expand(1, 4, 15, E)
    across = normal(4 * E, dtype=dtype, device=device).as_strided((1, 4, 15, E), (1, E, 0, 1))
    windows = normal(4 * (E + 18), dtype=dtype, device=device).as_strided((1, 4, 19, E), (0, E + 18, 1, 1))
    steps = normal(4 * (2 * 14 + E), dtype=dtype, device=device).as_strided((1, 4, 15, E), (0, 2 * 14 + E, 2, 1))
    for query, key, value in (
        (one, k, v),
        (across, k, v),
        (steps, k, v),
        (q, windows, v),
        (q, k, windows),
        (steps, windows, windows),
    ):
        compare(query, key, value, backward=dtype == torch.float64)
        compare(query, key, value, torch.zeros(15, 1, device=device, dtype=dtype), backward=False)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_storage_offset_breaks_alignment(device: str, dtype: torch.dtype, offset: int) -> None:
    def shifted(t: Tensor) -> Tensor:
        buffer = torch.full((t.numel() + 2 * offset,), float("nan"), dtype=dtype, device=device)
        view = buffer[offset : offset + t.numel()].view(t.shape)
        return view.copy_(t)

    q, k, v = qkv(L=18, S=21, E=24, dtype=dtype, device=device)
    for pick in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        compare(*(shifted(t) if moved else t for t, moved in zip((q, k, v), pick, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_of_wider_tensors(device: str, dtype: torch.dtype) -> None:
    wide = torch.full((2, 3, 40, 50), float("nan"), dtype=dtype, device=device)
    wide[:, :, 5:24, 7:23] = normal(2, 3, 19, 16, dtype=dtype, device=device)
    slab = wide[:, :, 5:24, 7:23]
    compare(slab, slab, slab)
    every_other = normal(2, 3, 38, 32, dtype=dtype, device=device)[:, :, ::2, ::2]
    compare(every_other, every_other, every_other, causal=True)


def test_inputs_are_left_alone(device: str) -> None:
    packed = normal(2, 9, 3, 4, 16, device=device)
    before, (q, k, v) = packed.clone(), (t.transpose(1, 2) for t in packed.unbind(2))
    run(sdpa, leaves(q, k, v), torch.ones(2, 4, 9, 16))
    assert torch.equal(before, packed) and packed._version == 0


def test_result_is_new_memory(device: str) -> None:
    q, k, v = qkv(L=1, S=1, device=device)
    out = sdpa(q, k, v)
    assert out.data_ptr() not in {t.data_ptr() for t in (q, k, v)} and not out._is_view()


def expected_strides(query: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """(B, L, H, E) order if the query has it (rank 3 and up, heads closer in memory than rows), else contiguous."""
    if query.dim() >= 3 and query.stride(-3) < query.stride(-2):
        swapped = torch.Size((*shape[:-3], shape[-2], shape[-3], shape[-1]))
        return torch.empty(swapped, device="meta").transpose(-2, -3).stride()
    return contiguous_strides(shape)


QUERIES = {
    "contiguous": lambda t: t,
    "BLHE": lambda t: t.transpose(-2, -3).contiguous().transpose(-2, -3),
    "packed": lambda t: torch.cat([t, t, t], -3).transpose(-2, -3).contiguous().transpose(-2, -3)[..., : t.size(-3), :, :],
    "E first": lambda t: t.mT.contiguous().mT,
    "one head": lambda t: t[..., :1, :, :].expand(t.shape),
}
RANKS = [((), ()), ((), (3,)), ((2,), (3,)), ((2, 2), (3,))]


def laid_out(layout: str, tensor: Tensor) -> Tensor:
    return QUERIES[layout](tensor) if tensor.dim() > 2 else tensor


@pytest.mark.parametrize("layout", QUERIES)
@pytest.mark.parametrize(("batch", "heads"), RANKS, ids=str)
def test_layout_of_forward(device: str, layout: str, batch: tuple[int, ...], heads: tuple[int, ...]) -> None:
    q, k, v = qkv(batch, heads, L=5, S=7, E=8, Ev=6, device=device)
    q = laid_out(layout, q)
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False)
    assert out.stride() == expected_strides(q, out.shape)
    assert lse.shape == out.shape[:-1] and lse.stride() == contiguous_strides(lse.shape)


@pytest.mark.parametrize("layout", QUERIES)
@pytest.mark.parametrize(("batch", "heads"), RANKS, ids=str)
def test_layout_of_gradients(device: str, layout: str, batch: tuple[int, ...], heads: tuple[int, ...]) -> None:
    q, k, v = (laid_out(layout, t) for t in qkv(batch, heads, L=5, S=7, E=8, device=device))
    k = k.contiguous()
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False)
    grads = sdpa_backward(torch.ones_like(out), None, q, k, v, None, out, lse, None, 0.0, False)
    for grad, t in zip(grads, (q, k, v), strict=False):
        assert grad.shape == t.shape and grad.stride() == expected_strides(t, t.shape)
    assert grads[3].shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", QUERIES)
def test_layout_of_sdpa_on_the_gpu(layout: str) -> None:
    q, k, v = qkv(L=5, S=7, E=8, Ev=6, device="cuda")
    q = laid_out(layout, q)
    out = sdpa(q, k, v)
    assert out.stride() == expected_strides(q, out.shape)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)], ids=str)
def test_layout_of_the_incoming_gradient(device: str, order: tuple[int, ...]) -> None:
    """Autograd hands over any strides, stride 0 after sum() included."""
    q, k, v = qkv(L=9, S=11, device=device)
    grad = normal(2, 3, 9, 16, device=device)
    want = run(sdpa, leaves(q, k, v), grad)[1]
    got = run(sdpa, leaves(q, k, v), in_order(grad, *order))[1]
    summed = run(sdpa, leaves(q, k, v), torch.ones((), device=device).expand(2, 3, 9, 16))[1]
    ones = run(sdpa, leaves(q, k, v), torch.ones(2, 3, 9, 16, device=device))[1]
    for a, b in zip((*got, *summed), (*want, *ones), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
