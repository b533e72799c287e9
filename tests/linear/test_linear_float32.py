"""linear_float32: a float32 product on every shape, layout and magnitude, whatever torch's settings for float32 products."""

from __future__ import annotations

import math

import error_rule
import pytest
import torch
import torch.nn.functional as F
from helpers import normal
from linear_kinds import BY_NAME, EVERYWHERE, SIZE, by, inputs, on, size_on
from linear_reference import check_float32, check_nonfinite, check_products, own_product, product64, surrounded
from torch import Tensor

import attention_ext

linear_float32 = torch.ops.attention_ext.linear_float32
gpu = pytest.mark.gpu
long_and_short = pytest.mark.parametrize("K", [40, 600])  # sums by terms, where a card has them, and on plain cores
INF, NAN = math.inf, math.nan


def compare(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Within twice PyTorch's own error and a unit in the last place."""
    out = linear_float32(input, weight, bias)
    assert out.is_contiguous() and out.dtype == torch.float32 and out.device == input.device
    error_rule.check_error("out", out, product64(input, weight, bias), own_product(input, weight, bias))
    return out


LEADING = [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (0, 3), (3, 0)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_ranks(device: str, leading: tuple[int, ...], bias: bool, poison: None) -> None:
    def trial() -> None:
        out = compare(normal(*leading, 9, device=device), normal(6, 9, device=device), normal(6, device=device) if bias else None)
        assert out.shape == (*leading, 6)

    error_rule.settle(trial)


WIDTHS = [
    (1, 1, 1),
    (1, 3, 33),
    (33, 1, 3),
    (3, 33, 1),
    (65, 1000, 33),
    (7, 33, 1000),
    (129, 8191, 3),
    (3, 5, 8191),
    (128, 128, 256),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("M", "K", "N"), WIDTHS)
def test_odd_sizes(device: str, M: int, K: int, N: int, bias: bool, poison: None) -> None:
    error_rule.settle(
        lambda: compare(normal(M, K, device=device), normal(N, K, device=device), normal(N, device=device) if bias else None)
    )


@pytest.mark.parametrize(("M", "K", "N"), [(4, 0, 5), (0, 0, 5), (4, 6, 0), (4, 0, 0)])
def test_empty(device: str, M: int, K: int, N: int, poison: None) -> None:
    input, weight, bias = normal(M, K, device=device), normal(N, K, device=device), normal(N, device=device)
    assert torch.equal(linear_float32(input, weight, bias), F.linear(input, weight, bias))
    assert torch.equal(linear_float32(input, weight), torch.zeros(M, N, device=device))


@pytest.mark.parametrize(("M", "K", "N"), [(70_000, 8, 3), (3, 8, 70_000), (3, 70_000, 5)])
def test_more_than_65535_of_each(device: str, M: int, K: int, N: int, poison: None) -> None:
    error_rule.settle(lambda: compare(normal(M, K, device=device), normal(N, K, device=device)))


@pytest.mark.parametrize("kernel", BY_NAME)
@gpu
def test_more_than_65535_rows_by_each_kernel(kernel: str, poison_all: None) -> None:
    """A hundred times the same 700 rows, in tiles of other rows each time."""

    def trial() -> None:
        few, weight, bias = normal(700, 520, device="cuda"), normal(5, 520, device="cuda"), normal(5, device="cuda")
        out = by(kernel, few.repeat(100, 1), weight, bias).view(100, 700, 5)
        assert torch.equal(out, out[:1].expand_as(out))
        error_rule.check_error("out", out[-1], product64(few, weight, bias), own_product(few, weight, bias))

    error_rule.settle(trial)


LAYOUTS = {
    "plain": lambda t: t,
    "surrounded": surrounded,
    "transposed": lambda t: t.t().contiguous().t(),
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "offset by one": lambda t: torch.cat([t.new_full((1,), NAN), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("K", [40, 1001])
@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("of_input", LAYOUTS)
def test_layouts(device: str, of_input: str, of_weight: str, K: int) -> None:
    def trial() -> None:
        input, weight, bias = normal(37, K, device=device), normal(29, K, device=device), normal(29, device=device)
        out = linear_float32(LAYOUTS[of_input](input), LAYOUTS[of_weight](weight), surrounded(bias))
        error_rule.check_error("out", out, product64(input, weight, bias), own_product(input, weight, bias))

    error_rule.settle(trial)


def test_leading_dims_in_another_order(device: str) -> None:
    def trial() -> None:
        input, weight = normal(3, 4, 5, 8, device=device).permute(2, 0, 1, 3), normal(6, 8, device=device)
        assert compare(input, weight).shape == (5, 3, 4, 6)

    error_rule.settle(trial)


SAME = {
    "input": lambda few, row: (row.expand(70, 8), few),
    "weight": lambda few, row: (few, row.expand(40, 8)),
    "input of one number, bias": lambda few, row: (row[:, :1].expand(70, 8), few, row[0, :1].expand(6)),
}


@pytest.mark.parametrize("same", SAME)
def test_rows_that_are_one_and_the_same(device: str, same: str) -> None:
    error_rule.settle(lambda: compare(*SAME[same](normal(6, 8, device=device), normal(1, 8, device=device))))


def test_inputs_are_left_alone(device: str) -> None:
    tensors = normal(33, 40, device=device), normal(29, 40, device=device), normal(29, device=device)
    before = [t.clone() for t in tensors]
    out = linear_float32(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert torch.equal(out, linear_float32(*tensors)), "the same product twice"
    assert torch.equal(out, attention_ext.linear_float32(*tensors))


@pytest.mark.parametrize("kernel", BY_NAME[1:])
@gpu
def test_several_parts(kernel: str, poison_all: None) -> None:
    """More rows and features than the terms of which fit into the workspace at once."""
    x, w, bias = normal(260, 70_000, device="cuda"), normal(140, 70_000, device="cuda"), normal(140, device="cuda")
    check_products(by(kernel, x, w, bias), product64(x, w, bias), own_product(x, w, bias))


@pytest.mark.parametrize("kernel", BY_NAME[1:])
@gpu
def test_infinities_and_nan_of_each_kernel(kernel: str) -> None:
    for changes in SPECIAL.values():
        x, w = inputs("normal", "cuda", *SIZE)
        for tensor, points in zip((x, w), changes, strict=True):
            for row, column, value in points:
                tensor[row, column] = value
        check_nonfinite(by(kernel, x, w), own_product(x, w), product64(x, w))


@gpu
def test_kernels_that_are_none() -> None:
    x, w = normal(4, 0, device="cuda"), normal(5, 0, device="cuda")
    for kernel in ("fast", "split_half"):  # the second takes no empty sums
        with pytest.raises(RuntimeError, match=r"^attention_ext: kernel_name: expected .*, got "):
            by(kernel, x, w)


SPECIAL = {
    "inf in the input": ([(3, 7, INF), (4, 0, -INF)], []),
    "inf in the weight": ([], [(2, 5, INF), (9, 9, -INF)]),
    "inf in both": ([(3, 5, INF)], [(2, 5, INF), (4, 5, -INF)]),
    "inf against 0": ([(3, 5, INF)], [(2, 5, 0.0)]),
    "two infs of a row": ([(3, 5, INF), (3, 6, -INF)], []),
    "nan in the input": ([(0, 0, NAN)], []),
    "nan in the weight": ([], [(2, 5, NAN)]),
    "nan in the last column": ([(31, 255, NAN)], [(47, 255, INF)]),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_infinities_and_nan(device: str, case: str) -> None:
    x, w = inputs("normal", device, *size_on(device))
    for tensor, changes in zip((x, w), SPECIAL[case], strict=True):
        for row, column, value in changes:
            tensor[row, column] = value
    check_nonfinite(linear_float32(x, w), own_product(x, w), product64(x, w))


@long_and_short
@pytest.mark.parametrize("where", EVERYWHERE)
def test_overflow(where: str, K: int) -> None:
    """Products past float32's largest number are infinite; those that come near it are not."""
    device, product = on(where)
    x, w = torch.ones(64, K, device=device), torch.ones(48, K, device=device)
    x[::2] = 3e38
    w[::3] = -3.0
    check_nonfinite(product(x, w), own_product(x, w), product64(x, w))
    x = torch.zeros(64, K, device=device)
    x[:, 3], w[:] = (2 - 2**-20) * 2.0**127, 1.0  # 21 significant bits, which two half terms hold
    assert torch.equal(product(x, w), x[:, 3:4].expand(64, 48))


@long_and_short
@pytest.mark.parametrize("where", EVERYWHERE)
def test_infinite_bias(where: str, K: int) -> None:
    device, product = on(where)
    x, w = inputs("normal", device, 16, K, 8)
    out = product(x, w, torch.tensor([INF, -INF, NAN, 0, 0, 0, 0, 1e38], device=device))
    assert (out[:, 0] == INF).all() and (out[:, 1] == -INF).all() and out[:, 2].isnan().all() and out[:, 3:].isfinite().all()


@pytest.mark.parametrize("factors", [(1e-20, 1e-20), (1e-38, 1e-3), (1e-44, 1.0), (1e-42, 1e30)], ids=str)
def test_denormals(device: str, factors: tuple[float, float]) -> None:
    """Operands or results below float32's smallest normal number, each to within one quantum of 2^-149 beside PyTorch's error."""
    x, w = inputs("normal", device, *size_on(device))
    x, w = (x.double() * factors[0]).float(), (w.double() * factors[1]).float()
    want = product64(x, w)
    check_float32(linear_float32(x, w), want, own_product(x, w), quantum=2.0**-149)
    assert (want != 0).any()
