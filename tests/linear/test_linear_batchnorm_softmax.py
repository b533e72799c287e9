"""linear_batchnorm_softmax: values in training and evaluation, dtypes, shapes, layouts, switches, the functional form."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import error_rule
import pytest
import torch
import torch.nn.functional as F
from helpers import FLOATS, HALVES, close
from linear_kinds import BY_NAME, layer_by
from linear_reference import check_form, check_layer, layer64, make, rounded_to_tf32, surrounded
from torch import Tensor

import attention_ext

fused = torch.ops.attention_ext.linear_batchnorm_softmax
INF, NAN = math.inf, math.nan
gpu = pytest.mark.gpu
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
MIXED = [(d, d) for d in FLOATS] + [(d, torch.float32) for d in HALVES]  # of the operands, of scale and batch norm
dtypes = pytest.mark.parametrize(("dtype", "bn_dtype"), MIXED, ids=str)


def settled(*args, **options) -> None:
    error_rule.settle(lambda: check_layer(make(*args, **options)))


@modes
@dtypes
@pytest.mark.parametrize("scale", [(), (1,), (10,)], ids=str)
def test_dtypes_and_shapes_of_scale(
    device: str, scale: tuple[int, ...], dtype: torch.dtype, bn_dtype: torch.dtype, training: bool, poison: None
) -> None:
    settled(dtype=dtype, bn_dtype=bn_dtype, scale=scale, training=training, device=device)


@modes
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-30, 1e-5, 1e-3, 2.0])
def test_switches(device: str, bias: bool, affine: bool, eps: float, training: bool) -> None:
    settled(bias=bias, affine=affine, stats=not training or affine, eps=eps, training=training, device=device)


@modes
@pytest.mark.parametrize("which", ["bn_weight", "bn_bias"])
def test_one_of_weight_and_bias_alone(device: str, which: str, training: bool) -> None:
    layer = make(training=training, device=device)
    without = replace(layer, **{which: None})
    neutral = torch.full_like(layer.bn_weight, float(which == "bn_weight"))
    torch.testing.assert_close(fused(*without.args()), fused(*replace(layer, **{which: neutral}).args()))


WIDTHS = [(5, 1, 1), (2, 3, 33), (33, 1, 3), (3, 33, 1), (65, 1000, 33), (7, 33, 1000), (9, 12, 8191), (9, 8191, 5), (64, 128, 256)]


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "K", "F"), WIDTHS)
def test_odd_sizes(device: str, M: int, K: int, F: int, dtype: torch.dtype, training: bool, poison: None) -> None:
    settled(M, K, F, dtype=dtype, training=training, device=device)


@modes
@pytest.mark.parametrize(("M", "K", "F"), [(70_000, 8, 3), (3, 4, 40_000), (4, 70_000, 5)])
def test_large_sizes(device: str, M: int, K: int, F: int, training: bool, poison: None) -> None:
    settled(M, K, F, training=training, device=device)


@pytest.mark.parametrize(("M", "K", "F"), [(0, 5, 4), (0, 0, 4), (3, 5, 0), (0, 5, 0), (3, 0, 4)])
def test_empty(device: str, M: int, K: int, F: int, poison: None) -> None:
    layer = make(M, K, F, training=False, device=device)
    results = fused(*layer.args())
    check_form(results, layer)
    close(results[0], layer64(layer)[0])


@pytest.mark.parametrize(("dtype", "bn_dtype"), MIXED, ids=str)
def test_an_empty_batch_when_training(device: str, dtype: torch.dtype, bn_dtype: torch.dtype, poison: None) -> None:
    """As nn.BatchNorm1d has it: an empty result, gradients of zero, running statistics that stay. The mean of nothing is NaN."""
    layer = make(0, 5, 4, dtype=dtype, bn_dtype=bn_dtype, device=device)
    for given in (layer, replace(layer, running_mean=None, running_var=None), replace(layer, weight=layer.weight[:, :0])):
        given = replace(given, input=given.input[:, : given.weight.size(1)])
        results = fused(*given.args())
        check_form(results, given)
        assert results[1].isnan().all() and results[2].isnan().all()
    leaves = {n: t.clone().requires_grad_() for n, t in layer.tensors().items() if not n.startswith("running")}
    results = fused(*replace(layer, **leaves).args())
    for gradient in torch.autograd.grad(sum(t.sum() for t in results), list(leaves.values())):
        assert not gradient.any()
    before = layer.running_mean.clone(), layer.running_var.clone()
    named = {n: getattr(layer, n) for n in ("running_mean", "running_var", "bn_weight", "bn_bias", "scale")}
    out = attention_ext.linear_batchnorm_softmax(layer.input, layer.weight, layer.bias, **named, training=True)
    assert out.shape == (0, 4) and out.dtype == dtype
    assert torch.equal(before[0], layer.running_mean) and torch.equal(before[1], layer.running_var)


def test_no_columns_when_training(device: str) -> None:
    """K = 0: every feature is its bias, without variance."""
    settled(4, 0, 6, device=device)


def test_one_row_of_evaluation(device: str) -> None:
    settled(1, training=False, device=device)


LAYOUTS = {
    "surrounded by NaN": surrounded,
    "transposed": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
    "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t,
    "offset by one": lambda t: torch.cat([t.new_full((1,), NAN), t.flatten()])[1:].view(t.shape),
}


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("K", [40, 1001])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device: str, layout: str, K: int, dtype: torch.dtype, training: bool) -> None:
    def trial() -> None:
        layer = make(37, K, 29, dtype=dtype, training=training, scale=(29,), device=device)
        moved = layer.map(LAYOUTS[layout])
        check_layer(moved)
        assert all(torch.equal(t, layer.tensors()[name]) for name, t in moved.tensors().items()), "an input has changed"

    error_rule.settle(trial)


@gpu
@modes
@pytest.mark.parametrize("kernel", BY_NAME)
def test_each_kernel(kernel: str, training: bool, poison_all: None) -> None:
    by = layer_by(kernel)
    error_rule.settle(lambda: check_layer(make(200, 1000, 130, training=training, device="cuda"), by))


def repeated(operator, *args) -> tuple[Tensor, ...]:
    """The operator on a hundred times the rows, all of them alike; the statistics, and of the rows the last copy."""
    rows, features = args[0].size(0), args[1].size(0)
    out, mean, var, linear = operator(args[0].repeat(100, 1), *args[1:])
    out, linear = (t.view(100, rows, features) for t in (out, linear))
    assert all(torch.equal(t, t[:1].expand_as(t)) for t in (out, linear))
    return out[-1], mean, var, linear[-1]


@gpu
@modes
@pytest.mark.parametrize(
    ("kernel", "dtype"), [(k, d) for k in BY_NAME for d in (torch.float32, *(() if k == "split_half" else HALVES))]
)
def test_more_than_65535_rows_by_each_kernel(kernel: str, dtype: torch.dtype, training: bool, poison_all: None) -> None:
    by = partial(repeated, layer_by(kernel))
    error_rule.settle(lambda: check_layer(make(700, 520, 5, dtype=dtype, training=training, device="cuda"), by))


@gpu
@pytest.mark.parametrize("which", ["input", "weight"])
@pytest.mark.parametrize("kernel", BY_NAME[1:])
def test_nan_in_the_last_of_several_parts(kernel: str, which: str, poison_all: None) -> None:
    """Terms of 128 rows of K = 70 000 fit into the workspace at once: 3 parts of rows by 2 of features, with statistics each."""
    layer = make(260, 70_000, 140, scale=(), device="cuda")
    getattr(layer, which)[-2, -1] = NAN
    out, *results = layer_by(kernel)(*layer.args())
    assert out.isnan().all()  # every row has a feature that is NaN
    _, *want = layer64(layer)
    for got, right in zip(results, want, strict=True):
        assert torch.equal(got.isnan().cpu(), right.isnan()) and right.isnan().any()
        close(got.cpu()[~right.isnan()], right[~right.isnan()], 2e-5)  # four times a chain of 70 000 additions' own error


def lowered(*args) -> tuple[Tensor, ...]:
    return fused(rounded_to_tf32(args[0]), rounded_to_tf32(args[1]), *args[2:])


def one_feature_off(*args) -> tuple[Tensor, ...]:
    out, mean, var, linear = fused(*args)
    linear[:, int(linear.abs().amax(0).argmax())] *= 1 + 2**-12
    return out, mean, var, linear


def product_kept_in_half(*args) -> tuple[Tensor, ...]:
    out, mean, var, linear = fused(*args)
    return out, mean, var, linear.to(args[0].dtype).float()


def one_mean_off(*args) -> tuple[Tensor, ...]:
    out, mean, var, linear = fused(*args)
    mean[int(mean.abs().argmax())] *= 1 + 2**-9
    return out, mean, var, linear


def largest_of_out_off(*args) -> tuple[Tensor, ...]:
    out, mean, var, linear = fused(*args)
    out[:, int(out.amax(0).argmax())] *= 1.2
    return out, mean, var, linear


@modes
@pytest.mark.parametrize("wrong", [lowered, one_feature_off])
@pytest.mark.parametrize(("M", "K", "F"), [(7, 12, 10), (33, 40, 17), (200, 1000, 130)])
def test_the_rule_refuses_what_is_not_float32(device: str, M: int, K: int, F: int, wrong, training: bool) -> None:
    """The control: operands rounded to TF32, and a column of the product off by as much, are no close call."""
    with pytest.raises(AssertionError, match="error") as caught:
        check_layer(make(M, K, F, training=training, device=device), wrong)
    assert caught.type is AssertionError


@modes
@pytest.mark.parametrize("wrong", [one_feature_off, product_kept_in_half, one_mean_off, largest_of_out_off])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("M", "K", "F"), [(33, 40, 17), (200, 1000, 130)])
def test_the_rule_refuses_what_is_not_of_half_types(
    device: str, M: int, K: int, F: int, dtype: torch.dtype, wrong, training: bool
) -> None:
    """The control of half types: sums and statistics are float32's, the result is off by roundings alone."""
    with pytest.raises(AssertionError) as caught:
        check_layer(make(M, K, F, dtype=dtype, training=training, device=device), wrong)
    assert caught.type is AssertionError


def test_expanded_inputs(device: str) -> None:
    def trial() -> None:
        layer = make(6, 8, 10, training=False, device=device)
        bias, bn_bias = layer.bias[:1].expand(10), layer.bn_bias[:1].expand(10)
        check_layer(replace(layer, input=layer.input[:1].expand(6, 8), bias=bias, bn_bias=bn_bias))

    error_rule.settle(trial)


@pytest.mark.parametrize("scale", [0.0, -1.0, -3.5, 1e-3, 50.0])
@modes
def test_values_of_scale(device: str, scale: float, training: bool) -> None:
    def trial() -> None:
        layer = replace(make(200, 40, 170, training=training, device=device), scale=torch.tensor([scale], device=device))
        out = check_layer(layer)
        assert scale != 0.0 or torch.equal(out, torch.full_like(out, 1 / 170))

    error_rule.settle(trial)


def test_scale_per_feature_of_both_signs(device: str) -> None:
    settled(33, 40, 17, scale=(17,), device=device)


@modes
def test_statistics_that_do_not_matter(device: str, training: bool) -> None:
    """Training looks at the batch alone, evaluation at the running statistics alone."""
    layer = make(8, 12, 10, training=training, device=device)
    if training:
        other = replace(layer, running_mean=torch.full_like(layer.running_mean, NAN), running_var=layer.running_var * 9)
        assert all(torch.equal(a, b) for a, b in zip(fused(*layer.args()), fused(*other.args()), strict=True))
        other = replace(layer, running_mean=None, running_var=None)
        assert all(torch.equal(a, b) for a, b in zip(fused(*layer.args()), fused(*other.args()), strict=True))
    else:
        torch.testing.assert_close(fused(*replace(layer, input=layer.input[:3]).args())[0], fused(*layer.args())[0][:3])


def test_deterministic(device: str) -> None:
    layer = make(300, 64, 513, device=device)
    runs = [fused(*layer.args()) for _ in range(10 if device == "cuda" else 2)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@modes
def test_functional_form(device: str, training: bool) -> None:
    """The keywords are those of linear and batch_norm, the running statistics are updated in place as by batch_norm."""
    layer = make(9, training=training, eps=1e-3, device=device)
    own = layer.map(torch.clone)
    names = ("input", "weight", "bias", "bn_weight", "bn_bias", "running_mean", "running_var", "scale", "training", "eps")
    out = attention_ext.linear_batchnorm_softmax(**{n: getattr(layer, n) for n in names}, momentum=0.3)
    x = F.linear(own.input, own.weight, own.bias)
    x = F.batch_norm(x, own.running_mean, own.running_var, own.bn_weight, own.bn_bias, training, 0.3, 1e-3)
    torch.testing.assert_close(out, torch.softmax(own.scale * x, -1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close((layer.running_mean, layer.running_var), (own.running_mean, own.running_var), rtol=1e-5, atol=1e-6)
    number = attention_ext.linear_batchnorm_softmax(layer.input, layer.weight, scale=-2, training=True)
    x = F.batch_norm(F.linear(layer.input, layer.weight), None, None, training=True)
    torch.testing.assert_close(number, torch.softmax(-2 * x, -1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dtype", "bn_dtype"), [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)], ids=str)
def test_running_statistics_of_other_dtypes(device: str, dtype: torch.dtype, bn_dtype: torch.dtype) -> None:
    layer = make(9, dtype=dtype, bn_dtype=bn_dtype, device=device)
    _, mean, var, _ = layer64(layer)
    want = [0.5 * r.cpu().double() + 0.5 * b for r, b in ((layer.running_mean, mean), (layer.running_var, var * 9 / 8))]
    of_bn = {n: getattr(layer, n) for n in ("running_mean", "running_var", "bn_weight", "bn_bias", "scale")}
    attention_ext.linear_batchnorm_softmax(layer.input, layer.weight, layer.bias, **of_bn, training=True, momentum=0.5)
    close(layer.running_mean, want[0], 2 * torch.finfo(bn_dtype).eps)
    close(layer.running_var, want[1], 2 * torch.finfo(bn_dtype).eps)
    assert layer.running_mean.dtype == layer.running_var.dtype == bn_dtype
