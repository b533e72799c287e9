"""linear_batchnorm_softmax on numbers that batch norm, softmax and Tensor Cores get wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import error_rule
import pytest
import torch
import torch.nn.functional as F
from helpers import HALVES, close
from linear_reference import Layer, check_float32, check_layer, layer64, make, own_layer, rounded_to_tf32, tf32
from torch import Tensor

fused = torch.ops.attention_ext.linear_batchnorm_softmax
INF, NAN = math.inf, math.nan
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@pytest.mark.parametrize("M", [2, 3, 1000, 5000])
def test_large_mean_with_small_variance(device: str, M: int) -> None:
    """Features 1e4 +- 1e-2, exact in float32: a mean of squares less the square of the mean has no digit of the variance right."""
    steps = torch.randint(-20, 21, (M, 1)).float()
    steps[0], steps[1] = 20.0, -20.0
    layer = make(M, 1, 7, bias=True, device=device)
    layer = replace(layer, input=steps.to(device), weight=torch.full((7, 1), 2.0**-10, device=device))
    layer = replace(layer, bias=torch.full((7,), 1e4, device=device))
    out, mean, var, linear = fused(*layer.args())
    _, want_mean, want_var, want_linear = layer64(layer)
    assert torch.equal(linear.cpu().double(), want_linear)
    torch.testing.assert_close(mean.cpu().double(), want_mean, rtol=2e-7, atol=0.0)  # two units in the last place
    torch.testing.assert_close(var.cpu().double(), want_var, rtol=2e-2, atol=0.0)
    naive = linear.cpu().square().mean(0) - linear.cpu().mean(0).square()
    assert ((naive.double() - want_var).abs() > 0.1 * want_var).all(), "the control: this is what must not be done"
    given = layer.map(lambda t: t.cpu().double())
    normalised = (want_linear - mean.cpu().double()) / (var.cpu().double() + layer.eps).sqrt()
    close(out, torch.softmax(given.scale * (normalised * given.bn_weight + given.bn_bias), -1), 1e-5)


def test_constant_columns(device: str) -> None:
    """No variance in some features: normalised they are 0, and the output knows bn_bias alone of them."""

    def trial() -> None:
        layer = make(19, 12, 10, device=device)
        layer.weight[::3] = 0.0
        out = check_layer(layer)
        assert torch.isfinite(out).all() and (fused(*layer.args())[2][::3] < 1e-12).all()
        equal = replace(layer, input=layer.input[:1].expand(19, 12).contiguous())
        x = (equal.scale * equal.bn_bias).expand(19, 10)
        torch.testing.assert_close(fused(*equal.args())[0], torch.softmax(x, -1), rtol=1e-3, atol=1e-3)

    error_rule.settle(trial)


@pytest.mark.parametrize("var", [0.0, 1e-12, -5e-6, 1e12, INF])
def test_values_of_the_running_variance(device: str, var: float) -> None:
    def trial() -> None:
        layer = make(training=False, device=device)
        layer.running_var[2] = var
        check_layer(layer)

    error_rule.settle(trial)


@pytest.mark.parametrize(
    ("name", "value"), [("running_var", -1.0), ("running_var", NAN), ("running_mean", NAN), ("running_mean", INF)]
)
def test_statistics_without_a_result_are_nan(device: str, name: str, value: float) -> None:
    """One feature that is NaN makes NaN of every row, as in PyTorch."""
    layer = make(training=False, device=device)
    layer.tensors()[name][2] = value
    out, own = fused(*layer.args())[0], own_layer(layer)
    assert torch.equal(out.isnan(), own.isnan())
    torch.testing.assert_close(out, own, equal_nan=True)


def test_zero_variance_and_zero_eps_is_nan(device: str) -> None:
    layer = make(training=False, eps=0.0, device=device)
    layer.running_var[2] = 0.0
    layer.input[1] = 0.0
    layer.bias[2] = layer.running_mean[2]
    out, want = fused(*layer.args())[0].cpu(), layer64(layer)[0]
    assert out[1].isnan().all() and torch.equal(out.isnan(), want.isnan())


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@modes
def test_infinite_inputs(device: str, value: float, training: bool) -> None:
    layer = make(training=training, device=device)
    layer.input[3, 4] = value
    out, own = fused(*layer.args())[0], own_layer(layer)
    assert torch.equal(out.isnan(), own.isnan()) and out[3].isnan().all()


@modes
def test_an_infinite_scale_of_a_feature(device: str, training: bool) -> None:
    """As PyTorch's chain: what batch norm gives times -inf, which hides the feature in a row or makes the row NaN."""
    layer = make(9, scale=(10,), training=training, device=device)
    layer.scale[2], layer.bn_bias[2] = -INF, 0.0
    out, want = fused(*layer.args())[0].cpu(), layer64(layer)[0]
    nan = want.isnan()
    assert torch.equal(out.isnan(), nan) and nan.any() and (want[:, 2] == 0).any()
    close(out[~nan], want[~nan], 1e-5)


def test_a_row_of_minus_infinity_is_nan(device: str) -> None:
    """As torch.softmax has it: unlike attention, there is nothing here that is not visible."""
    layer = make(training=False, device=device)
    layer = replace(layer, bn_bias=torch.full_like(layer.bn_bias, -INF), scale=torch.ones(1, device=device))
    assert fused(*layer.args())[0].isnan().all()
    layer.bn_bias[4] = 0.0
    assert torch.equal(fused(*layer.args())[0], F.one_hot(torch.tensor(4), 10).float().expand(7, 10).to(device))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_logits_past_the_half_range(device: str, dtype: torch.dtype) -> None:
    """The product is kept in float32: 1e5 is no infinity."""
    layer = make(16, 64, 12, dtype=dtype, training=False, affine=False, device=device)
    layer = replace(layer, input=layer.input * 500, weight=layer.weight * 500, running_var=torch.full((12,), 6e4, device=device))
    layer = replace(layer, running_mean=torch.zeros(12, device=device), scale=torch.full((), 0.01, device=device))
    out, _, _, linear = fused(*layer.args())
    assert linear.abs().max() > 66_000 and torch.isfinite(out).all()
    close(out, layer64(layer)[0], 4 * torch.finfo(dtype).eps)


def accurate(layer: Layer, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    with tf32(True):
        out = fused(*layer.args())[0]
    want, own = layer64(layer)[0], own_layer(layer)
    check_float32(out, want, own, factor)
    return out, want, own


@modes
@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("wrong", ["TF32", "zeros"])
def test_float32_accuracy_and_its_control(device: str, kind: str, wrong: str, training: bool) -> None:
    """Errors at most 1.05 times PyTorch's (2 on the CPU, at small sizes); plain TF32 and zeros are past that."""
    M, K, features = (256, 1024, 1024) if device == "cuda" else (32, 256, 96)
    layer = make(M, K, features, training=training, scale=(), device=device)
    if kind == "uniform":  # KernelBench's own inputs, nn.Linear's own weights
        weight = (torch.rand(features, K) * 2 - 1).to(device) * K**-0.5
        layer = replace(layer, input=torch.rand(M, K).to(device), weight=weight, scale=torch.ones(1, device=device))
    factor = 1.05 if device == "cuda" else 2.0
    _, want, own = accurate(layer, factor)
    lowered = replace(layer, input=rounded_to_tf32(layer.input), weight=rounded_to_tf32(layer.weight))
    bad = own_layer(lowered) if wrong == "TF32" else torch.zeros_like(own)
    with pytest.raises(AssertionError, match="error"):
        check_float32(bad, want, own, factor)


@pytest.mark.parametrize("training", [True, False])
def test_an_outlier_that_meets_zeros(device: str, training: bool) -> None:
    """A feature is normalised by itself: what the outlier hides of it in its row shows."""
    layer = make(200, 1000, 130, training=training, device=device)
    layer.input[:, 0] = 0.0
    layer.weight[5, 0] = 1e12
    out, want = fused(*layer.args())[0], layer64(layer)[0]
    close(out, want, 1e-4)
