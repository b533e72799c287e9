"""The gradient of a mask by sm90_256 by name: tiles' edges, every way to broadcast, dropout, lengths, shares of a tile's terms."""

from __future__ import annotations

import error_rule
import pytest
import torch
from helpers import HALVES, oracle_with_grads, sdpa_backward, sdpa_forward, torch_own
from kernels import needs_the_card
from row_cases import KERNEL, NEG_INF, draw, normal
from torch import Tensor

DIMS = ((64, 64), (128, 128), (256, 256), (16, 72), (192, 128), (40, 256))  # (E, Ev)
LENGTHS = ((1, 1), (1, 200), (127, 129), (128, 256), (129, 127), (300, 1), (300, 520))
# Of a mask for (B, H, L, S), a letter each dim that it has.
KINDS = ("BHLS", "HLS", "BLS", "LS", "BHS", "BS", "HS", "S", "BHL", "L", "BH", "")


@pytest.fixture(autouse=True)
def hopper() -> None:
    needs_the_card(KERNEL)


def shape_of(kind: str, *sizes: int) -> tuple[int, ...]:
    return tuple(size if name in kind else 1 for name, size in zip("BHLS", sizes, strict=True))


def gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor, p: float = 0.0, name: str = KERNEL.name, **more
) -> tuple[Tensor, ...]:
    """Of query, key, value and mask. more: key_lengths, for both; workspace_bytes and grad_lse, for the backward."""
    both = {"enable_gqa": q.size(1) != k.size(1), "key_lengths": more.pop("key_lengths", None)}
    seed = torch.tensor([7], device="cuda") if p else None
    out, lse = sdpa_forward(q, k, v, mask, seed, p, False, **both)
    grad_lse = more.pop("grad_lse", None)
    more |= both | {"mask_grad": True, "kernel_name": name}
    return sdpa_backward(grad, grad_lse, q, k, v, mask, out, lse, seed, p, False, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_lengths(dims: tuple[int, int], dtype: torch.dtype, poison_all: None) -> None:
    for L, S in LENGTHS:

        def trial() -> None:
            q, k, v = draw(2, (4, 2), L, S, dims, dtype)  # noqa: B023
            mask, grad = normal(1, 4, L, S, dtype=dtype), normal(2, 4, L, dims[1], dtype=dtype)  # noqa: B023
            inputs = [q, k, v, mask]
            want, _, want_grads = oracle_with_grads(inputs, grad, False, None, True)
            _, own_grads = torch_own(inputs, grad, want, False, None, True)
            error_rule.check_gradients(gradients(q, k, v, mask, grad), want_grads, own_grads, dtype)

        error_rule.settle(trial)


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("of", ["half", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast(kind: str, of: str, p: float, poison_all: None) -> None:
    """As the pipeline's for every card has them in float32, of the same elements that dropout keeps; the same bits again."""
    for number, (L, S, heads) in enumerate([(200, 320, (4, 4)), (129, 333, (6, 2)), (300, 64, (2, 2))]):
        dtype, dims = HALVES[number % 2], DIMS[number]
        q, k, v = draw(3, heads, L, S, dims, dtype)
        grad = normal(3, heads[0], L, dims[1], dtype=dtype)
        mask = normal(*shape_of(kind, 3, heads[0], L, S), dtype=dtype if of == "half" else torch.float32)
        got, again = (gradients(q, k, v, mask, grad, p)[3] for _ in range(2))
        assert torch.equal(got, again) and got.shape == mask.shape and got.dtype == mask.dtype
        want = gradients(q.float(), k.float(), v.float(), mask.float(), grad.float(), p, name="pipeline")[3]
        # What is summed along all of a row is 0 but for rounding.
        terms = gradients(*(t.float() for t in (q, k, v, mask.expand(3, heads[0], L, S), grad)), p, name="pipeline")[3]
        top = terms.abs().sum_to_size(mask.shape).norm()
        assert (got.double() - want.double()).norm() <= 4e-3 * top, (L, S)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["HLS", "LS", "BS", "L", ""])
def test_shares_of_terms(kind: str) -> None:
    """One CTA a tile, as without room for what several leave, and as many as fill the card: sums in float, in another order."""
    q, k, v = draw(16, (4, 4), 200, 257, (64, 64), torch.bfloat16)
    grad, mask = normal(16, 4, 200, 64, dtype=torch.bfloat16), normal(*shape_of(kind, 16, 4, 200, 257))
    shared, alone = (gradients(q, k, v, mask, grad, workspace_bytes=cap)[3] for cap in (1 << 27, 1))
    terms = gradients(q, k, v, mask.expand(16, 4, 200, 257).contiguous(), grad)[3]
    top = terms.abs().sum_to_size(mask.shape).max()
    assert (shared - alone).abs().max() <= 64 * torch.finfo(torch.float32).eps * top


@pytest.mark.gpu
@pytest.mark.parametrize("of", ["half", "float32"])
def test_nothing_seen_is_zero(of: str, poison_all: None) -> None:
    """Hidden by -inf, after a batch row's last key, whatever lies there, and in rows that see no key."""
    dtype, lengths = torch.float16, torch.tensor([0, 130, 300], dtype=torch.int32, device="cuda")
    q, k, v = draw(3, (2, 2), 260, 300, (64, 64), dtype)
    hidden = torch.arange(300, device="cuda") >= lengths.view(-1, 1, 1, 1)
    k, v = (t.masked_fill(hidden.mT, float("nan")) for t in (k, v))
    mask = normal(3, 2, 260, 300, dtype=dtype if of == "half" else torch.float32)
    mask[:, :, 128:] = mask[:, :, 128:].masked_fill(torch.rand(3, 2, 132, 300, device="cuda") < 0.3, NEG_INF)
    mask[:, :, 200] = NEG_INF
    got = gradients(q, k, v, mask, normal(3, 2, 260, 64, dtype=dtype), key_lengths=lengths)[3]
    nothing = hidden | (mask == NEG_INF)
    assert bool(got.isfinite().all()) and not got.masked_select(nothing).any() and bool(got.any())


@pytest.mark.gpu
def test_strided_mask_and_grad_lse(poison_all: None) -> None:
    """A transposed view, an expanded one, whose gradient has a matrix for each, and a gradient of the log-sum-exp."""
    q, k, v = draw(2, (3, 3), 140, 150, (64, 64), torch.bfloat16)
    grad, grad_lse = normal(2, 3, 140, 64, dtype=torch.bfloat16), normal(2, 3, 140)
    for mask in (normal(2, 3, 150, 140).mT, normal(1, 3, 140, 150).expand(2, 3, 140, 150), normal(140, 301)[:, 1::2]):
        got = gradients(q, k, v, mask, grad, grad_lse=grad_lse)[3]
        floats = (t.float() for t in (q, k, v, mask, grad))
        want = gradients(*floats, grad_lse=grad_lse, name="pipeline")[3]
        assert got.shape == mask.shape
        assert (got - want).norm() <= 4e-3 * want.norm()
