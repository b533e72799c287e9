"""linear_float32's errors on operands of every kind of magnitudes beside PyTorch's own, and what the rules for them refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import normal
from linear_kinds import BY_NAME, FEW_ROUNDINGS, KINDS, REMADE, SIZE, by, inputs, size_on
from linear_reference import check_float32, check_products, own_product, product64, rounded_to_tf32, tf32
from torch import Tensor

linear_float32 = torch.ops.attention_ext.linear_float32
gpu = pytest.mark.gpu


def check_kind(kind: str, out: Tensor, want: Tensor, base: Tensor) -> None:
    """The rule of 1.05 or, of few roundings, that of products. At this size PyTorch's sums are no better than those of plain cores:
    what is made anew needs no units beside twice its error (elsewhere it may cut a sum into many)."""
    if kind in FEW_ROUNDINGS:
        check_products(out, want, base, units=0.0 if kind in REMADE else 4.0)
    else:
        check_float32(out, want, base)


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy(device: str, kind: str, poison: None) -> None:
    x, w = inputs(kind, device, *size_on(device))
    with tf32(True):
        out = linear_float32(x, w)
    check_kind(kind, out, product64(x, w), own_product(x, w))
    with tf32(False):
        assert torch.equal(out, linear_float32(x, w)), "torch's TF32 setting does not matter"


@pytest.mark.parametrize("kind", ["normal", "uniform", "columns of opposite scales", "one-hot", "rows of two scales"])
@pytest.mark.parametrize("sizes", [(1, 512, 64), (17, 100, 33), (100, 4096, 72), (1000, 64, 1000)], ids=str)
@gpu
def test_accuracy_at_other_sizes(kind: str, sizes: tuple[int, int, int]) -> None:
    """Where PyTorch may split a sum among processors, or has few roundings."""
    x, w = inputs(kind, "cuda", *sizes)
    check_products(linear_float32(x, w), product64(x, w), own_product(x, w))


@gpu
def test_accuracy_where_terms_begin() -> None:
    """The rule of 1.05 just past the sums of plain cores, with tiles enough that PyTorch has no reason to cut its sums."""
    x, w = normal(1024, 520, device="cuda"), normal(2048, 520, device="cuda")
    check_float32(linear_float32(x, w), product64(x, w), own_product(x, w))


WITHOUT_BIAS = ("zeros", "1e-20", "scales within a row", "rows of two scales", "rows of two scales in both")  # it would hide them


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1, 8, 64), (33, 100, 1000), (130, 600, 257), SIZE], ids=str)
@pytest.mark.parametrize("kernel", BY_NAME)
@gpu
def test_accuracy_of_each_kernel(kernel: str, sizes: tuple[int, int, int], kind: str, poison_all: None) -> None:
    x, w = inputs(kind, "cuda", *sizes)
    bias = None if kind in WITHOUT_BIAS else normal(sizes[2], device="cuda")
    out, want, base = by(kernel, x, w, bias), product64(x, w, bias), own_product(x, w, bias)
    check_products(out, want, base)
    if sizes == SIZE and (kernel != "tiled" or kind in FEW_ROUNDINGS):
        check_kind(kind, out, want, base)
    assert torch.equal(out, by(kernel, x, w, bias)), "the same product twice"


@pytest.mark.parametrize("sizes", [(1, 8192, 64), (16, 8192, 3), (40, 8192, 140)], ids=str)
@pytest.mark.parametrize("kind", ["small and alike", "small, alike but for signs"])
@pytest.mark.parametrize("kernel", BY_NAME)
@gpu
def test_errors_that_add_up(kernel: str, kind: str, sizes: tuple[int, int, int]) -> None:
    """Thousands of small elements, off by the same: 150 units, unless the tile is marked and made anew by plain cores.

    Those add 512 steps of one sign in a chain, which may take a quarter of a unit each, PyTorch's in shorter ones.
    """
    x, w = inputs(kind, "cuda", *sizes)
    check_products(by(kernel, x, w), product64(x, w), own_product(x, w), units=16.0)


@pytest.mark.parametrize("outlier", [3e6, 6e6])
@pytest.mark.parametrize("N", [1, 3, 17])
@pytest.mark.parametrize("M", [1, 3, 17])
@pytest.mark.parametrize("kernel", BY_NAME)
@gpu
def test_few_sums_and_an_outlier_that_meets_zeros(kernel: str, M: int, N: int, outlier: float) -> None:
    """On either side. Of few sums all may be small by chance: twenty draws, each sum beside the norm of its products, are a row."""
    check_few_sums(kernel, M, N, outlier, "cuda")


def check_few_sums(kernel: str, M: int, N: int, outlier: float, device: str) -> None:
    for side in range(2):
        draws = []
        for _ in range(20):
            x, w = normal(M, 1000, device=device), normal(N, 1000, device=device)
            (x, w)[side][:, 0], (x, w)[1 - side][:, 0] = outlier, 0.0
            size = product64(x.square(), w.square()).sqrt()
            draws.append([t.cpu().double() / size for t in (by(kernel, x, w), product64(x, w), own_product(x, w))])
        check_products(*(torch.cat([t.flatten() for t in of])[None] for of in zip(*draws, strict=True)))


def wrong_products(x: Tensor, w: Tensor, base: Tensor) -> Iterator[tuple[str, Tensor]]:
    """PyTorch's product with something wrong: what, and the result."""
    if x.is_cuda:
        with tf32(True):
            yield "TF32", F.linear(x, w)
    yield "operands rounded to TF32", own_product(rounded_to_tf32(x), rounded_to_tf32(w))
    row, column = (t.abs().amax(1, keepdim=True).clamp(min=1e-38) for t in (x, w))
    yield "operands rounded to half", own_product((x / row).half().float(), (w / column).half().float()) * row * column.mT
    yield "zeros", torch.zeros_like(base)
    for name, change in WRONG_PARTS.items():
        bad = base.clone()
        change(bad)
        yield name, bad


def off(bad: Tensor, row: int, column: int) -> None:
    bad[row, column] += 0.01 * bad[row].norm() + torch.finfo(torch.float32).tiny


WRONG_PARTS = {
    "an element off by 1 % of its row": lambda bad: off(bad, 4, 5),
    "a row of zeros": lambda bad: bad[4].zero_(),
    "every second row of zeros": lambda bad: bad[::2].zero_(),
    "a feature off by as much as TF32": lambda bad: bad[:, bad.size(1) // 2].mul_(1 + 2**-12),
}
# Right all the same, or no worse than PyTorch's own, which has no digit right of sums that cancel.
TAKEN = {
    "zeros": {"operands rounded to half", "operands rounded to TF32", "TF32", "zeros", *list(WRONG_PARTS)[1:]},
    "integers": {"operands rounded to TF32", "TF32"},
    "cancelling": {"zeros", *WRONG_PARTS},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_of_products_refuses_what_is_not_float32(device: str, kind: str) -> None:
    """The control, on every kind."""
    x, w = inputs(kind, device, *size_on(device))
    base, want = own_product(x, w), product64(x, w)
    check_products(base, want, base, units=0.0)
    taken = set()
    for wrong, bad in wrong_products(x, w, base):
        try:
            check_products(bad, want, base)
        except AssertionError as refusal:
            assert "error" in str(refusal)
        else:
            taken.add(wrong)
    assert taken <= TAKEN.get(kind, set())


@pytest.mark.parametrize("kind", ["normal", "uniform", "1e15", "rows of two scales"])
def test_the_rule_of_accuracy_refuses_what_is_not_float32(device: str, kind: str) -> None:
    x, w = inputs(kind, device, *size_on(device))
    base, want = own_product(x, w), product64(x, w)
    check_float32(base, want, base)
    for wrong, bad in wrong_products(x, w, base):
        with pytest.raises(AssertionError, match="error"):
            check_float32(bad, want, base)
            raise RuntimeError(f"{wrong} passes")
