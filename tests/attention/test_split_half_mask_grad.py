"""The gradient of a float32 mask by half terms, forced by name: sums of dS over whatever the mask broadcasts along.

What two half terms are not enough for is made anew before it is summed, as far as a slice knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import normal, sdpa_backward, sdpa_forward, tf32
from kernels import KERNELS, needs_the_card
from launches import launches
from mask_gradients import score_gradients
from torch import Tensor

pytestmark = pytest.mark.gpu
KERNEL = next(kernel for kernel in KERNELS if kernel.name == "sm90_split_half")
B, H, L, S = 2, 4, 200, 333
SHAPES = [(L, S), (1, S), (L, 1), (1, 1), (1, H, L, S), (B, 1, L, S), (B, H, L, S), (B, 1, 1, S), (1, 1, L, 1), (B, H, 1, 1)]
CAPS = {"one slice": 1 << 27, "matrices": 4 << 20, "rows": 900_000, "least": 1}
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    needs_the_card(KERNEL)
    with tf32(False):
        yield


def draw(E: int = 64, Ev: int = 72, key_heads: int = H // 2) -> Operands:
    """query, key, value, grad_out; two query heads a key head."""
    sizes = ((H, L, E), (key_heads, S, E), (key_heads, S, Ev), (H, L, Ev))
    q, k, v, grad = (normal(B, *size, device="cuda") for size in sizes)
    return q, k, v, grad


def gradients(tensors: Operands, mask: Tensor, kernel: str = KERNEL.name, **options) -> tuple[Tensor, ...]:
    """Of query, key, value and mask."""
    q, k, v, grad = tensors
    seed, p, lengths = options.pop("seed", None), options.pop("p", 0.0), options.pop("key_lengths", None)
    call = {"enable_gqa": True, "key_lengths": lengths}
    out, lse = sdpa_forward(q, k, v, mask, seed, p, False, **call)
    call |= {"kernel_name": kernel, "mask_grad": True} | options
    return sdpa_backward(grad, None, q, k, v, mask, out, lse, seed, p, False, **call)


def hold(got: Tensor, tensors: Operands, mask: Tensor, key_lengths: Tensor | None = None) -> None:
    """16 units of float32 of the largest sum of magnitudes, as the pipeline's."""
    score_grads = score_gradients(tensors, mask, key_lengths)
    want, largest = score_grads.sum_to_size(mask.shape), score_grads.abs().sum_to_size(mask.shape).max()
    assert got.shape == mask.shape and got.dtype == torch.float32
    assert (got.double() - want).abs().max() <= 16 * torch.finfo(torch.float32).eps * largest


@pytest.mark.parametrize("room", CAPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, ...], room: str, poison_all: None) -> None:
    """The same bits every time, and those of the other gradients as without it."""
    tensors, mask = draw(), normal(*shape, device="cuda")
    grads, again = (gradients(tensors, mask, workspace_bytes=CAPS[room]) for _ in range(2))
    hold(grads[3], tensors, mask)
    without = gradients(tensors, mask, workspace_bytes=CAPS[room], mask_grad=False)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads[:3], without[:3], strict=True))


@pytest.mark.parametrize("room", CAPS)
@pytest.mark.parametrize("shape", [(L, S), (1, S), (L, 1), (B, H, L, S)], ids=str)
def test_hidden_keys(shape: tuple[int, ...], room: str, poison_all: None) -> None:
    """Tiles that no row of a batch row sees are never written, nor read; a row that sees nothing adds nothing."""
    tensors, mask = draw(136, 264), normal(*shape, device="cuda")
    lengths = torch.tensor([0, 137], dtype=torch.int32, device="cuda")
    hold(gradients(tensors, mask, key_lengths=lengths, workspace_bytes=CAPS[room])[3], tensors, mask, lengths)


@pytest.mark.parametrize("room", CAPS)
@pytest.mark.parametrize("shape", [(L, S), (1, S), (B, H, L, S)], ids=str)
@pytest.mark.parametrize("kind", ["columns", "columns of value", "a small row of value"])
def test_what_is_made_anew(kind: str, shape: tuple[int, ...], room: str) -> None:
    q, k, v, grad = draw(72, 72)
    scales = torch.exp2(torch.randint(-16, 17, (72,), device="cuda").float())
    if kind == "columns":
        q, k = q * scales, k / scales
    elif kind == "columns of value":
        v, grad = v * scales, grad / scales
    else:
        v[..., 5, :] *= 2.0**-20
    tensors, mask = (q, k, v, grad), normal(*shape, device="cuda")
    hold(gradients(tensors, mask, workspace_bytes=CAPS[room])[3], tensors, mask)


@pytest.mark.parametrize("room", CAPS)
@pytest.mark.parametrize("shape", [(L, S), (1, H, L, S), (B, 1, L, S), (B, H, L, S)], ids=str)
@pytest.mark.parametrize("dims", [(32, 32), (64, 48)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "lengths", "columns"])
def test_without_scores_in_memory(kind: str, dims: tuple[int, int], shape: tuple[int, ...], room: str, poison_all: None) -> None:
    """Narrow heads and whole matrices of the mask: dS is made anew for their sum, on CUDA cores where terms will not do."""
    (q, k, v, grad), mask = draw(*dims), normal(*shape, device="cuda")
    lengths = torch.tensor([0, 137], dtype=torch.int32, device="cuda") if kind == "lengths" else None
    if kind == "columns":
        scales = torch.exp2(torch.randint(-16, 17, dims[:1], device="cuda").float())
        q, k = q * scales, k / scales
    call = {"workspace_bytes": CAPS[room], "key_lengths": lengths}
    grads, again = (gradients((q, k, v, grad), mask, **call) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    hold(grads[3], (q, k, v, grad), mask, lengths)


@pytest.mark.parametrize("room", CAPS)
@pytest.mark.parametrize("shape", [(L, S), (1, H, L, S), (B, 1, L, S), (1, H, 1, S)], ids=str)
@pytest.mark.parametrize("dims", [(32, 24), (64, 48), (72, 128), (136, 72)], ids=str)
def test_order_of_matrices(dims: tuple[int, int], shape: tuple[int, ...], room: str, poison_all: None) -> None:
    """Without groups of heads, matrices that share one of the mask follow each other in slices; every gradient is its own.

    With the mask's gradient those of the others have the bits that they have without it, if the same kernels make them. Narrow
    heads have two kinds: one of them cannot sum a mask of one row, and of others the estimate counts what the sums take.
    """
    tensors, mask = draw(*dims, key_heads=H), normal(*shape, device="cuda")

    def ours(mask_grad: bool) -> tuple[Tensor, ...]:
        return gradients(tensors, mask, workspace_bytes=CAPS[room], mask_grad=mask_grad)

    grads, again, without = ours(True), ours(True), ours(False)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    hold(grads[3], tensors, mask)
    in_registers = [any("split_half_fused_rows" in name for name in launches(lambda w=w: ours(w))) for w in (True, False)]
    assert not any(in_registers) or (max(dims) <= 64 and room != "least")
    if in_registers[0] == in_registers[1]:
        assert all(torch.equal(a, b) for a, b in zip(grads[:3], without[:3], strict=True))
    right = gradients(tensors, mask, "pipeline")
    for one, other, want in zip(grads[:3], without[:3], right[:3], strict=True):
        assert max((one - want).norm(), (other - want).norm()) <= 2e-6 * want.norm()


def test_not_finite() -> None:
    """A NaN is in the rows of its head alone."""
    tensors, mask = draw(), normal(B, H, L, S, device="cuda")
    before = gradients(tensors, mask)[3]
    tensors[0][0, 0, 3, 5] = float("nan")
    got = gradients(tensors, mask)[3]
    assert got[0, 0, 3].isnan().all() and torch.equal(got[0, 2:], before[0, 2:]) and torch.equal(got[1], before[1])
    assert not got[0, :2].isnan().any(-1)[torch.arange(2 * L, device="cuda").view(2, L) != 3].any()


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout(p: float) -> None:
    tensors, mask, seed = draw(), normal(L, S, device="cuda"), torch.tensor([7], device="cuda")
    got, want = (gradients(tensors, mask, name, seed=seed, p=p)[3].double() for name in (KERNEL.name, "pipeline"))
    assert (got - want).norm() <= 2e-6 * want.norm()
