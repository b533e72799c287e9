"""linear_float32: a float32 product on every shape, layout and magnitude, whatever torch's settings for float32 products."""

from __future__ import annotations

import math

import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import normal
from linear_reference import check_float32, check_nonfinite, own_product, product64, rounded_to_tf32, surrounded, tf32
from torch import Tensor

import attention_ext

linear_float32 = torch.ops.attention_ext.linear_float32
gpu = pytest.mark.gpu
INF, NAN = math.inf, math.nan


def compare(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Within twice PyTorch's own error and a unit in the last place."""
    out = linear_float32(input, weight, bias)
    assert out.is_contiguous() and out.dtype == torch.float32 and out.device == input.device
    reference.check_error("out", out, product64(input, weight, bias), own_product(input, weight, bias))
    return out


LEADING = [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (0, 3), (3, 0)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_ranks(device: str, leading: tuple[int, ...], bias: bool, poison: None) -> None:
    def trial() -> None:
        out = compare(normal(*leading, 9, device=device), normal(6, 9, device=device), normal(6, device=device) if bias else None)
        assert out.shape == (*leading, 6)

    reference.settle(trial)


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
    reference.settle(
        lambda: compare(normal(M, K, device=device), normal(N, K, device=device), normal(N, device=device) if bias else None)
    )


@pytest.mark.parametrize(("M", "K", "N"), [(4, 0, 5), (0, 0, 5), (4, 6, 0), (4, 0, 0)])
def test_empty(device: str, M: int, K: int, N: int, poison: None) -> None:
    input, weight, bias = normal(M, K, device=device), normal(N, K, device=device), normal(N, device=device)
    assert torch.equal(linear_float32(input, weight, bias), F.linear(input, weight, bias))
    assert torch.equal(linear_float32(input, weight), torch.zeros(M, N, device=device))


@pytest.mark.parametrize(("M", "K", "N"), [(70_000, 8, 3), (3, 8, 70_000), (3, 70_000, 5)])
def test_more_than_65535_of_each(device: str, M: int, K: int, N: int, poison: None) -> None:
    reference.settle(lambda: compare(normal(M, K, device=device), normal(N, K, device=device)))


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
        reference.check_error("out", out, product64(input, weight, bias), own_product(input, weight, bias))

    reference.settle(trial)


def test_leading_dims_in_another_order(device: str) -> None:
    def trial() -> None:
        input, weight = normal(3, 4, 5, 8, device=device).permute(2, 0, 1, 3), normal(6, 8, device=device)
        assert compare(input, weight).shape == (5, 3, 4, 6)

    reference.settle(trial)


SAME = {
    "input": lambda few, row: (row.expand(70, 8), few),
    "weight": lambda few, row: (few, row.expand(40, 8)),
    "input of one number, bias": lambda few, row: (row[:, :1].expand(70, 8), few, row[0, :1].expand(6)),
}


@pytest.mark.parametrize("same", SAME)
def test_rows_that_are_one_and_the_same(device: str, same: str) -> None:
    reference.settle(lambda: compare(*SAME[same](normal(6, 8, device=device), normal(1, 8, device=device))))


def test_inputs_are_left_alone(device: str) -> None:
    tensors = normal(33, 40, device=device), normal(29, 40, device=device), normal(29, device=device)
    before = [t.clone() for t in tensors]
    out = linear_float32(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert torch.equal(out, linear_float32(*tensors)), "the same product twice"
    assert torch.equal(out, attention_ext.linear_float32(*tensors))


SIZE = (256, 2048, 512)  # M, K, N of the tests of accuracy


def inputs(kind: str, device: str, M: int, K: int, N: int) -> tuple[Tensor, Tensor]:
    """input (M, K) and weight (N, K)."""
    x, w = (torch.rand if kind == "uniform" else torch.randn)(M, K), (torch.rand if kind == "uniform" else torch.randn)(N, K)
    columns = torch.logspace(-15, 15, K)[torch.randperm(K)]
    rows, rows_of_weight = (torch.where(torch.arange(size) % 2 == 0, 1e-20, 1e15)[:, None] for size in (M, N))
    outlier = (torch.arange(N)[:, None] == N // 2) & (torch.arange(K) == 0)  # of one feature: the others hide it in their rows
    scaled = {
        "1e-20": lambda: (x * 1e-20, w),
        "1e15": lambda: (x * 1e15, w),
        "both 1e15": lambda: (x * 1e15, w * 1e15),
        "1e-20 and 1e15": lambda: (x * 1e-20, w * 1e15),
        "rows of two scales": lambda: (x * rows, w),
        "rows of two scales in both": lambda: (x * rows, w * rows_of_weight),
        "scales within a row": lambda: (x * torch.where(torch.rand(M, K) < 0.5, 1e-20, 1e15), w),
        "columns of opposite scales": lambda: (x * columns, w / columns),
        "one large column": lambda: (torch.where(torch.arange(K) == 3, x * 1e10, x), w),
        "one-hot": lambda: (F.one_hot(torch.arange(M) % K, K).float(), w),
        "rows of zeros": lambda: (x * (torch.arange(M) % 3 > 0).float()[:, None], w),
        "zeros": lambda: (x * 0.0, w),
        "integers": lambda: ((x * 8).round(), (w * 8).round()),
        "outlier against zeros": lambda: (x * (torch.arange(K) > 0), torch.where(outlier, w * 1e12, w)),
        "outlier against small": lambda: (torch.where(torch.arange(K) == 0, x * 1e-8, x), torch.where(outlier, w * 1e8, w)),
        "cancelling": lambda: (torch.cat([x[:, : K // 2], -x[:, : K // 2] * (1 + 2**-20)], 1), torch.cat([w[:, : K // 2]] * 2, 1)),
    }.get(kind, lambda: (x, w))()
    return scaled[0].to(device), scaled[1].to(device)


KINDS = ["normal", "uniform", "1e-20", "1e15", "both 1e15", "1e-20 and 1e15", "rows of two scales", "rows of two scales in both"]
KINDS += ["scales within a row", "columns of opposite scales", "one large column", "one-hot", "rows of zeros", "zeros", "integers"]
KINDS += ["cancelling", "outlier against zeros", "outlier against small"]


# One product makes a sum, or all have one sign: PyTorch's error is next to nothing, and that of a product of split numbers shows.
FEW_ROUNDINGS = ("uniform", "columns of opposite scales", "one large column", "one-hot")
FEW_ROUNDINGS += ("outlier against zeros", "outlier against small")  # what is made anew has other roundings than PyTorch's


def check_products(got: Tensor, want: Tensor, base: Tensor) -> None:
    """Within twice PyTorch's error and four units in the last place, three roundings of operands and terms and one of the sum."""
    error, bound = reference.errors(got, want)[0], reference.errors(base, want)[0]
    limit = 2 * bound + 4 * reference.ulp(torch.float32, reference.largest(want))
    assert error <= limit, f"error {error:.3e}, PyTorch's {bound:.3e}, limit {limit:.3e}"


def size_on(device: str) -> tuple[int, int, int]:
    return SIZE if device == "cuda" else (32, 256, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy(device: str, kind: str, poison: None) -> None:
    x, w = inputs(kind, device, *size_on(device))
    with tf32(True):
        out = linear_float32(x, w)
    if kind in FEW_ROUNDINGS:
        check_products(out, product64(x, w), own_product(x, w))
    else:
        check_float32(out, product64(x, w), own_product(x, w))
    with tf32(False):
        assert torch.equal(out, linear_float32(x, w)), "torch's TF32 setting does not matter"


@pytest.mark.parametrize("kind", ["normal", "uniform", "columns of opposite scales", "one-hot", "rows of two scales"])
@pytest.mark.parametrize("sizes", [(1, 512, 64), (17, 100, 33), (100, 4096, 72), (1000, 64, 1000)], ids=str)
@gpu
def test_accuracy_at_other_sizes(kind: str, sizes: tuple[int, int, int]) -> None:
    """Where PyTorch may split a sum among processors, or has few roundings."""
    x, w = inputs(kind, "cuda", *sizes)
    check_products(linear_float32(x, w), product64(x, w), own_product(x, w))


def by(kernel: str, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    if kernel == "sm90_split" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it needs compute capability 9.0")
    out: Tensor = torch.ops.attention_ext._linear_float32_by(x, w, bias, kernel)
    return out


BY_NAME = ["tiled", "split", "sm90_split"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1, 8, 64), (33, 100, 1000), (130, 600, 257), SIZE], ids=str)
@pytest.mark.parametrize("kernel", BY_NAME)
@gpu
def test_accuracy_of_each_kernel(kernel: str, sizes: tuple[int, int, int], kind: str, poison_all: None) -> None:
    x, w = inputs(kind, "cuda", *sizes)
    bias = None if kind in ("zeros", "1e-20", "scales within a row") else normal(sizes[2], device="cuda")
    out, want, base = by(kernel, x, w, bias), product64(x, w, bias), own_product(x, w, bias)
    check_products(out, want, base)
    if kernel != "tiled" and sizes == SIZE and kind not in FEW_ROUNDINGS:
        check_float32(out, want, base)
    assert torch.equal(out, by(kernel, x, w, bias)), "the same product twice"


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
    for kernel in ("fast", "split"):  # the second takes no empty sums
        with pytest.raises(RuntimeError, match=r"^attention_ext: kernel_name: expected .*, got "):
            by(kernel, x, w)


@pytest.mark.parametrize("wrong", ["TF32", "zeros", "one element", "one row", "float16"])
@pytest.mark.parametrize("kind", ["normal", "uniform", "1e15", "rows of two scales"])
def test_the_rule_of_accuracy_refuses_what_is_not_float32(device: str, kind: str, wrong: str) -> None:
    """The control: plain TF32 is past the limit; so are zeros, an element off by 1 % of its row, a row of zeros, half operands."""
    x, w = inputs(kind, device, *size_on(device))
    base, want = own_product(x, w), product64(x, w)
    check_float32(base, want, base)
    bad = base.clone()
    if wrong == "TF32" and device == "cuda":
        with tf32(True):
            bad = F.linear(x, w)
    elif wrong == "TF32":
        bad = F.linear(rounded_to_tf32(x), rounded_to_tf32(w))
    elif wrong == "zeros":
        bad.zero_()
    elif wrong == "one element":
        bad[3, 5] += 0.01 * base[3].norm()
    elif wrong == "one row":
        bad[4] = 0.0
    else:
        row, column = x.abs().amax(1, keepdim=True), w.abs().amax(1, keepdim=True)
        bad = ((x / row).half().float() @ (w / column).half().float().mT) * row * column.mT
    with pytest.raises(AssertionError, match="error"):
        check_float32(bad, want, base)


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


def test_overflow(device: str) -> None:
    """Products past float32's largest number are infinite; those that come near it are not."""
    x, w = torch.ones(64, 40, device=device), torch.ones(48, 40, device=device)
    x[::2] = 3e38
    w[::3] = -3.0
    check_nonfinite(linear_float32(x, w), own_product(x, w), product64(x, w))
    x = torch.zeros(64, 40, device=device)
    x[:, 3], w[:] = 3.3e38, 1.0
    assert torch.equal(linear_float32(x, w), x[:, 3:4].expand(64, 48))


def test_infinite_bias(device: str) -> None:
    x, w = inputs("normal", device, 16, 32, 8)
    out = linear_float32(x, w, torch.tensor([INF, -INF, NAN, 0, 0, 0, 0, 1e38], device=device))
    assert (out[:, 0] == INF).all() and (out[:, 1] == -INF).all() and out[:, 2].isnan().all() and out[:, 3:].isfinite().all()


@pytest.mark.parametrize("factors", [(1e-20, 1e-20), (1e-38, 1e-3), (1e-44, 1.0), (1e-42, 1e30)], ids=str)
def test_denormals(device: str, factors: tuple[float, float]) -> None:
    """Operands or results below float32's smallest normal number, each to within one quantum of 2^-149 beside PyTorch's error."""
    x, w = inputs("normal", device, *size_on(device))
    x, w = (x.double() * factors[0]).float(), (w.double() * factors[1]).float()
    want = product64(x, w)
    check_float32(linear_float32(x, w), want, own_product(x, w), quantum=2.0**-149)
    assert (want != 0).any()
