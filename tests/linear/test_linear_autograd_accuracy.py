"""Gradients of the linear operators whose products are made by terms on Tensor Cores: errors beside PyTorch's, and a control."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import leaves, normal
from linear_reference import (
    Layer,
    check_float32,
    gradients,
    layer64,
    make,
    norm_errors,
    ours,
    own_layer,
    own_product,
    rounded_to_tf32,
    tf32,
)
from torch import Tensor

from attention_ext.linear import softmax

pytestmark = pytest.mark.gpu
SIZE = (640, 1024, 768)  # M, K, F: the products of the backward sum 768 and 640, past what plain cores do
PRODUCTS = ("input", "weight")  # whose gradients are products


def test_gradient_of_linear_float32() -> None:
    M, K, N = SIZE
    x, w, grad = normal(M, K, device="cuda"), normal(N, K, device="cuda"), normal(M, N)

    def differentiate(call, x: Tensor, w: Tensor) -> list[Tensor]:
        tensors = leaves(x, w)
        return list(torch.autograd.grad(call(*tensors), tensors, grad.to(x)))

    want = differentiate(F.linear, x.cpu().double(), w.cpu().double())
    with tf32(True):
        got = differentiate(torch.ops.attention_ext.linear_float32, x, w)
    with tf32(False):
        own = differentiate(F.linear, x, w)
    for of in zip(got, want, own, strict=True):
        check_float32(*of)


def beyond_rounding(got: Tensor, want: Tensor) -> Tensor:
    """`got` as near to `want` as rounding to its dtype allows: what is left is an error of what was rounded."""
    got, dtype = got.detach().cpu().double(), got.dtype
    if dtype == torch.float32:
        return got
    info = torch.finfo(dtype)
    half_a_unit = torch.maximum(want.abs() * info.eps, torch.full_like(want, info.tiny * info.eps)) / 2
    difference = got - want
    return want + difference.sign() * (difference.abs() - half_a_unit).clamp(min=0.0)


def check(got: dict[str, Tensor], want: dict[str, Tensor], base: dict[str, Tensor], factor: float) -> None:
    """As norms of all and of the worst row at most `factor` times the errors of PyTorch's float32 gradients, one rounding aside."""
    for name in PRODUCTS:
        assert got[name].isfinite().all()
        errors, own = norm_errors(beyond_rounding(got[name], want[name]), want[name]), norm_errors(base[name], want[name])
        for kind, error, of_torch in zip(("Frobenius", "worst row"), errors, own, strict=True):
            assert error <= factor * of_torch, f"{name}: {kind} error {error:.3e}, PyTorch's {of_torch:.3e}"


def large_layer(dtype: torch.dtype, training: bool, device: str) -> Layer:
    layer = make(*SIZE, dtype=dtype, bn_dtype=torch.float32, training=training, device=device)
    return replace(layer, scale=torch.full((1,), 0.5, device=device))  # no row that one feature rules: its gradient would cancel


def check_and_control(dtype: torch.dtype, training: bool, device: str, patch: pytest.MonkeyPatch) -> None:
    layer = large_layer(dtype, training, device)
    grad = 1024 * normal(SIZE[0], SIZE[2], dtype=dtype)  # gradients of half's normal range
    want = gradients(lambda a: layer64(a)[0], layer.map(lambda t: t.cpu().double()), grad, PRODUCTS)
    base = gradients(own_layer, layer.map(lambda t: t.float()), grad, PRODUCTS)
    # Half products of the forward run over all of K on Tensor Cores, which cut off what they add (docs/kernels/linear.md).
    factor = 2.0 if dtype == torch.float32 else 8.0
    with tf32(True):
        got = gradients(ours, layer, grad, PRODUCTS)
    assert all(got[name].dtype == dtype for name in PRODUCTS)
    check(got, want, base, factor)
    patch.setattr(softmax, "product", lambda *operands: own_product(*(rounded_to_tf32(t) for t in operands)))
    with pytest.raises(AssertionError, match="error"):
        check(gradients(ours, layer, grad, PRODUCTS), want, base, factor)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_of_the_layer(dtype: torch.dtype, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the control: a backward whose operands are rounded to TF32."""
    check_and_control(dtype, training, "cuda", monkeypatch)
