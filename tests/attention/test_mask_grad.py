"""The gradient of a float mask: gradients of scores, summed over whatever the mask broadcasts along, from slice to slice."""

from __future__ import annotations

import pytest
import reference
import torch
from helpers import FLOATS, HALVES, normal
from kernels import KERNELS, Kernel, needs_the_card
from mask_gradients import score_gradients
from torch import Tensor

OPS = torch.ops.attention_ext
CAP = 128 << 20
B, H, L, S, E = 3, 4, 300, 700, 16
SHAPES = [
    (L, S),
    (1, S),
    (L, 1),
    (1, 1),
    (1, H, L, S),
    (B, 1, L, S),
    (B, H, L, S),
    (B, 1, 1, S),
    (1, H, 1, S),
    (B, H, 1, S),
    (1, 1, L, 1),
    (B, H, L, 1),
    (B, H, 1, 1),
]
OF_HALVES = [kernel for kernel in KERNELS if kernel.name in ("pipeline", "sm90_256", "sm90_pipeline")]
CAPS = {"one slice": 1000, "matrices": 5.5, "one matrix": 1.5, "rows": 0.4}  # room, in score matrices


def cap(room: str, dtype: torch.dtype) -> int:
    """Bytes that hold so many matrices of P and of dS, and next to them two numbers of each row."""
    return int(CAPS[room] * 2 * L * (S + 4) * dtype.itemsize) + 2 * B * H * L * max(dtype.itemsize, 4)


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and the gradient of the output; two query heads a key head."""
    heads = (H, H // 2, H // 2, H)
    sizes = zip(heads, (L, S, S, L), strict=True)
    query, key, value, grad = (normal(B, h, rows, E, dtype=dtype, device="cuda") for h, rows in sizes)
    return query, key, value, grad


def mask_grad(
    tensors: tuple[Tensor, ...], mask: Tensor, workspace_bytes: int = CAP, key_lengths: Tensor | None = None, name: str = "auto"
) -> Tensor:
    query, key, value, grad = tensors
    out, lse = OPS.sdpa_forward(query, key, value, mask, None, 0.0, False, enable_gqa=True, key_lengths=key_lengths)
    more = {"enable_gqa": True, "mask_grad": True, "workspace_bytes": workspace_bytes, "key_lengths": key_lengths}
    more["kernel_name"] = name
    return OPS.sdpa_backward(grad, None, query, key, value, mask, out, lse, None, 0.0, False, **more)[3]


@pytest.mark.gpu
@pytest.mark.parametrize("room", CAPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, ...], dtype: torch.dtype, room: str, poison_all: None) -> None:
    tensors, mask = operands(dtype), normal(*shape, dtype=dtype, device="cuda")
    got = mask_grad(tensors, mask, cap(room, dtype))
    scores = score_gradients(tensors, mask)
    want, largest = scores.sum_to_size(shape), scores.abs().sum_to_size(shape).max()
    assert got.shape == shape and got.dtype == dtype
    assert (got.double() - want).abs().max() <= 16 * torch.finfo(dtype).eps * largest


@pytest.mark.gpu
@pytest.mark.parametrize("room", [room for room in CAPS if room != "one slice"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.name in ("pipeline", "sm90_256", "sm90_pipeline")], ids=lambda k: k.name
)
def test_sums_are_float32(kernel: Kernel, shape: tuple[int, ...], dtype: torch.dtype, room: str) -> None:
    """However the scores are sliced: a float32 mask's gradient shows what the sums of half types' terms are made in.

    By one kernel both times, as one makes sums of rounded terms and another one does not.
    """
    needs_the_card(kernel)
    tensors, mask = operands(dtype), normal(*shape, device="cuda")
    whole, sliced = (mask_grad(tensors, mask, most, name=kernel.name) for most in (CAP, cap(room, dtype)))
    largest = score_gradients(tensors, mask).abs().sum_to_size(shape).max()
    assert whole.dtype == sliced.dtype == torch.float32
    assert (whole.double() - sliced.double()).abs().max() <= 64 * torch.finfo(torch.float32).eps * largest


@pytest.mark.gpu
@pytest.mark.parametrize("room", CAPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_every_time(shape: tuple[int, ...], room: str, poison_all: None) -> None:
    tensors, mask = operands(torch.bfloat16), normal(*shape, device="cuda")
    first, second = (mask_grad(tensors, mask, cap(room, torch.bfloat16)) for _ in range(2))
    assert torch.equal(first, second) and first.count_nonzero() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("room", CAPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hidden_keys(shape: tuple[int, ...], room: str, poison_all: None) -> None:
    """Tiles that no row of a batch row sees are never written, nor read."""
    tensors, mask = operands(torch.float32), normal(*shape, device="cuda")
    lengths = torch.tensor([0, 37, 650], dtype=torch.int32, device="cuda")
    got = mask_grad(tensors, mask, cap(room, torch.float32), lengths)
    scores = score_gradients(tensors, mask, lengths)
    want, largest = scores.sum_to_size(shape), scores.abs().sum_to_size(shape).max()
    assert (got.double() - want).abs().max() <= 16 * torch.finfo(torch.float32).eps * largest


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "shape"),
    [((4096, 1), (7, 7)), ((4096, 1), (1, 7)), ((2, 3, 5, 2), (2, 1, 5, 1, 1, 9)), ((2, 3, 5, 2), (3, 1, 2, 7, 9))],
    ids=str,
)
def test_many_small_matrices(batch: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """More terms of an element than rows: warps and CTAs share them."""
    rows, keys = 7, shape[-1]
    query, grad = (normal(*batch, rows, 8, device="cuda") for _ in range(2))
    key, value = (normal(*batch, keys, 8, device="cuda") for _ in range(2))
    mask = normal(*shape, device="cuda")
    got = mask_grad((query, key, value, grad), mask)
    wide = mask.double().expand(*batch, rows, keys).contiguous().requires_grad_()
    out, _ = reference.attention(query, key, value, wide, device="cuda")
    (scores,) = torch.autograd.grad(out, wide, grad.double())
    largest = scores.abs().sum_to_size(shape).max()
    assert (got.double() - scores.sum_to_size(shape)).abs().max() <= 16 * torch.finfo(torch.float32).eps * largest


@pytest.mark.gpu
def test_a_mask_of_all_scores_has_no_float32_copy() -> None:
    query, key, value, grad = (normal(2, 8, 1024, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    mask = normal(2, 8, 1024, 1024, dtype=torch.bfloat16, device="cuda")
    out, lse = OPS.sdpa_forward(query, key, value, mask, None, 0.0, False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    small = 16 << 20
    grads = OPS.sdpa_backward(
        grad, None, query, key, value, mask, out, lse, None, 0.0, False, mask_grad=True, workspace_bytes=small
    )
    extra = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in grads)
    assert extra <= small
