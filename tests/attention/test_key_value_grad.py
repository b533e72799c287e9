"""Gradients of key and value: sums over the query rows of all heads of a group, in parts where they are many."""

from typing import Any

import pytest
import reference
import torch

OPS = torch.ops.attention_ext
CAP = 128 << 20


def backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False, **options: Any
) -> list[torch.Tensor]:
    out, lse = OPS.sdpa_forward(query, key, value, None, None, 0.0, causal, enable_gqa=True)
    grad = torch.ones_like(out)
    return list(OPS.sdpa_backward(grad, None, query, key, value, None, out, lse, None, 0.0, causal, enable_gqa=True, **options))[:3]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_terms_of_one_sign(dtype: torch.dtype) -> None:
    """524,288 rows: Tensor Cores truncate as they add, which in one sum would be 4e-3 of it, always downwards."""
    torch.manual_seed(0)
    query = torch.randn(1, 8, 65536, 16, device="cuda", dtype=dtype)
    key, value = (torch.randn(1, 1, 512, 16, device="cuda", dtype=dtype) for _ in range(2))
    got = backward(query, key, value)[2].double()
    weights = torch.zeros(512, device="cuda", dtype=torch.float64)
    for head in range(8):
        scores = query[0, head].double() @ key[0, 0].double().mT / 4
        weights += torch.softmax(scores, -1).sum(0)
    off = (got[0, 0] / weights[:, None] - 1)[:, 0]
    assert off.abs().max() < 2 * torch.finfo(dtype).eps
    assert off.mean().abs() < 5e-4


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_slices_of_rows_change_no_more_than_rounding(dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, 700, 24, device="cuda", dtype=dtype)
    key, value = torch.randn(2, 2, 333, 24, device="cuda", dtype=dtype), torch.randn(2, 2, 333, 40, device="cuda", dtype=dtype)
    options = {"kernel_name": "pipeline"} if dtype == torch.float16 else {}  # sm90_256 has no slices
    whole = backward(query, key, value, causal, workspace_bytes=CAP, **options)
    sliced = backward(query, key, value, causal, workspace_bytes=1 << 20, **options)
    limit = (4 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps  # other orders of some thousand terms of either sign
    for name, a, b in zip(("query", "key", "value"), sliced, whole, strict=True):
        assert (a.double() - b.double()).norm() <= limit * b.double().norm(), name
    assert any(not torch.equal(a, b) for a, b in zip(sliced, whole, strict=True)), "the cap makes no slices"


def backward_extra(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: bool) -> int:
    """Bytes beyond the gradients that the backward takes at its peak, as the allocator counts both."""
    out, lse = OPS.sdpa_forward(query, key, value, None, None, 0.0, False, **options)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    grads = OPS.sdpa_backward(out, None, query, key, value, None, out, lse, None, 0.0, False, **options)
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del grads  # as late as here: they count with what the allocator adds to them
    return extra


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_workspace_of_a_large_group(dtype: torch.dtype) -> None:
    """32 query heads of one key head and 100,000 rows: eight keys of them all would be 205 MB of float."""
    query = torch.randn(1, 32, 100_000, 8, device="cuda", dtype=dtype)
    key, value = (torch.randn(1, 1, 64, 8, device="cuda", dtype=dtype) for _ in range(2))
    assert backward_extra(query, key, value, enable_gqa=True) <= CAP


@pytest.mark.gpu
@pytest.mark.parametrize("E", [320, 512, 1024])
def test_all_that_backward_takes_is_under_the_cap(E: int) -> None:
    """delta and norm of 100,000 rows, what the allocator adds to a large block, and slices."""
    query, key, value = (torch.randn(1, 1, 100_000, E, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert CAP // 2 < backward_extra(query, key, value) <= CAP


def float64_gradients(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> list[torch.Tensor]:
    inputs = [t.double().requires_grad_() for t in (query, key, value)]
    out, _ = reference.attention(*inputs, causal=causal, gqa=True, device="cuda")
    return list(torch.autograd.grad(out, inputs, torch.ones_like(out)))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("matrices", [1.5, 2.5, 3.5, 4.5, 5.5, 7.5])
@pytest.mark.parametrize("heads", [(6, 2, 2), (6, 1, 1), (8, 4, 2), (6, 3, 2), (5, 5, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_slices_cut_groups(
    dtype: torch.dtype, heads: tuple[int, int, int], matrices: float, causal: bool, poison_all: None
) -> None:
    """The sum of a key head goes on from slice to slice, wherever these end."""
    hq, hk, hv = heads
    query = torch.randn(2, hq, 260, 40, device="cuda", dtype=dtype)
    key, value = torch.randn(2, hk, 300, 40, device="cuda", dtype=dtype), torch.randn(2, hv, 300, 24, device="cuda", dtype=dtype)
    rows, sums = 2 * hq * 2 * 260 * 4, 300 * (40 + 24) * 4  # two numbers of each row, what is carried of one key head
    cap = int(matrices * 2 * 260 * 304 * dtype.itemsize) + rows + sums
    got, again = (backward(query, key, value, causal, workspace_bytes=cap) for _ in range(2))
    limit = (4 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps
    for a, b, want in zip(got, again, float64_gradients(query, key, value, causal), strict=True):
        assert torch.equal(a, b)
        assert (a.double() - want).norm() <= limit * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_few_key_heads_and_many_rows(dtype: torch.dtype, heads: tuple[int, int], causal: bool, poison_all: None) -> None:
    """Too few tiles for a card: CTAs share the rows of a query head, some of which see no key of a tile."""
    query = torch.randn(1, heads[0], 3000, 24, device="cuda", dtype=dtype)
    key, value = (torch.randn(1, heads[1], 1030, 24, device="cuda", dtype=dtype) for _ in range(2))
    got, again = (backward(query, key, value, causal) for _ in range(2))
    limit = (4 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps
    for a, b, want in zip(got, again, float64_gradients(query, key, value, causal), strict=True):
        assert torch.equal(a, b)
        assert (a.double() - want).norm() <= limit * want.norm()
