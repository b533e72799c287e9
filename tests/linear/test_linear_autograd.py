"""Derivatives of the linear operators: of every input, to second order, forward mode, torch.func, vmap."""

from __future__ import annotations

import itertools
import logging
import warnings
from dataclasses import replace
from typing import Any

import error_rule
import pytest
import torch
import torch.nn.functional as F
from helpers import FLOATS, HALVES, close, leaves, normal
from linear_reference import DIFFERENTIABLE, Layer, gradients, layer64, make, ours, own_layer, own_product, tf32
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attention_ext

linear_float32 = torch.ops.attention_ext.linear_float32
fused = torch.ops.attention_ext.linear_batchnorm_softmax
F64 = torch.float64
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def differentiate(call: Any, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(call(*tensors), tensors, grad.to(tensors[0].device)))


@pytest.mark.parametrize("allowed", [False, True], ids=["", "TF32"])
@pytest.mark.parametrize("leading", [(), (33,), (2, 0), (3, 1, 5)], ids=str)
def test_gradient_of_linear_float32(device: str, leading: tuple[int, ...], allowed: bool, poison: None) -> None:
    def trial() -> None:
        inputs = [normal(*leading, 40, device=device), normal(17, 40, device=device), normal(17, device=device)]
        grad = normal(*leading, 17)
        want = differentiate(F.linear, leaves(*(t.cpu().double() for t in inputs)), grad.double())
        own = differentiate(own_product, leaves(*inputs), grad)
        with tf32(allowed):
            got = differentiate(linear_float32, leaves(*inputs), grad)
        for name, *of in zip(("input", "weight", "bias"), got, want, own, strict=True):
            assert of[0].shape == of[2].shape
            error_rule.check_error(name, *of)

    error_rule.settle(trial)


def test_second_order_of_linear_float32(device: str) -> None:
    def second(call: Any, *tensors: Tensor) -> list[Tensor]:
        x, w, b = leaves(*tensors)
        first = torch.autograd.grad(call(x, w, b).square().sum(), (x, w, b), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), (x, w, b)))

    inputs = normal(5, 8, device=device), normal(6, 8, device=device), normal(6, device=device)
    want = second(F.linear, *(t.cpu().double() for t in inputs))
    for got, right in zip(second(linear_float32, *inputs), want, strict=True):
        close(got, right, 1e-5)


@modes
@pytest.mark.parametrize("scale", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize("form", [{}, {"affine": False}, {"bias": False, "stats": None}], ids=str)
def test_gradcheck(device: str, form: dict, scale: tuple[int, ...], training: bool) -> None:
    """First and second derivatives of all results in every input."""
    form = {**form, "stats": True} if "stats" in form and not training else form
    layer = make(5, 4, 3, dtype=F64, scale=scale, training=training, device=device, **{"eps": 1e-2, **form})
    names = [n for n in DIFFERENTIABLE if getattr(layer, n) is not None]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t for t in fused(*replace(layer, **dict(zip(names, tensors, strict=True))).args()) if t.requires_grad)

    tensors = leaves(*(getattr(layer, n) for n in names))
    assert len(call(*tensors)) == (4 if training else 2)
    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


def check_gradients(layer: Layer) -> None:
    grad = normal(layer.input.size(0), layer.weight.size(0), dtype=layer.input.dtype)
    want = gradients(lambda a: layer64(a)[0], layer.map(lambda t: t.cpu().double()), grad)
    base, got = gradients(own_layer, layer, grad), gradients(ours, layer, grad)
    among = error_rule.largest(*want.values())
    for name, gradient in got.items():
        assert gradient.dtype == getattr(layer, name).dtype and gradient.shape == getattr(layer, name).shape
        extra, dtype = 0.0, layer.input.dtype
        if gradient.dim() < 2:  # few sums over all rows: PyTorch's own error may be next to nothing by luck
            extra = 1e-13 * among if dtype == F64 else 16 * error_rule.ulp(torch.float32, among)
            extra += torch.finfo(dtype).eps * among if dtype in HALVES else 0.0
        error_rule.check_error(name, gradient, want[name], base[name], among, dtype, extra)


@modes
@pytest.mark.parametrize(("dtype", "bn_dtype"), [(d, d) for d in FLOATS] + [(d, torch.float32) for d in HALVES], ids=str)
def test_gradients_in_every_dtype(device: str, dtype: torch.dtype, bn_dtype: torch.dtype, training: bool, poison: None) -> None:
    error_rule.settle(lambda: check_gradients(make(33, 40, 17, dtype=dtype, bn_dtype=bn_dtype, training=training, device=device)))


@modes
@pytest.mark.parametrize("names", [s for n in (1, 2) for s in itertools.combinations(DIFFERENTIABLE, n)], ids="+".join)
def test_subsets_of_requires_grad(device: str, names: tuple[str, ...], training: bool) -> None:
    layer, grad = make(9, 8, 11, scale=(11,), training=training, device=device), normal(9, 11)
    everything = gradients(ours, layer, grad)
    for name, gradient in gradients(ours, layer, grad, names).items():
        torch.testing.assert_close(gradient, everything[name], rtol=1e-6, atol=1e-6)


@modes
def test_running_statistics_have_no_gradient(device: str, training: bool) -> None:
    layer = make(training=training, device=device)
    layer.running_mean.requires_grad_()
    layer.running_var.requires_grad_()
    assert not any(t.requires_grad for t in fused(*layer.args()))
    layer.input.requires_grad_()
    out, mean, var, linear = fused(*layer.args())
    assert out.requires_grad and linear.requires_grad and mean.requires_grad == var.requires_grad == training
    out.sum().backward()
    assert layer.running_mean.grad is None and layer.running_var.grad is None and layer.input.grad is not None


def test_nothing_needs_a_gradient(device: str) -> None:
    layer = make(device=device)
    assert not fused(*layer.args())[0].requires_grad and not linear_float32(layer.input, layer.weight).requires_grad
    layer.weight.requires_grad_()
    with torch.no_grad():
        assert not fused(*layer.args())[0].requires_grad and not linear_float32(layer.input, layer.weight).requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device: str, reentrant: bool) -> None:
    layer = make(device=device)
    x, w = leaves(layer.input, layer.weight)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return attention_ext.linear_batchnorm_softmax(
            linear_float32(x, w), layer.bn_weight[:, None] * w[:, :10], scale=2.0, training=True
        )

    want = torch.autograd.grad(call(x, w).square().sum(), (x, w))
    checkpoint(call, x, w, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, want[0]) and torch.equal(w.grad, want[1])


def test_an_input_changed_before_backward_is_noticed(device: str) -> None:
    layer = make(device=device)
    weight = layer.weight.requires_grad_() * 1
    out = fused(*replace(layer, input=layer.input.requires_grad_(), weight=weight).args())[0]
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_input_that_no_gradient_needs_is_not_kept(device: str) -> None:
    layer = make(device=device)
    for name in ("input", "weight"):
        wanted = getattr(layer, name).clone().requires_grad_()
        operand = wanted * 1
        out = fused(*replace(layer, **{name: operand}).args())[0]
        (want,) = torch.autograd.grad(out.square().sum(), wanted, retain_graph=True)
        with torch.no_grad():
            operand.mul_(2)
        (got,) = torch.autograd.grad(out.square().sum(), wanted)
        assert torch.equal(got, want) and got.any()


def oracle(layer: Layer, x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return layer64(replace(layer, input=x, weight=w, scale=s))[0]


def doubles(device: str, training: bool) -> tuple[Layer, Layer, Any, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A layer, the same on the CPU, the operator as a function of input, weight and scale, these, these on the CPU."""
    layer = make(5, 4, 3, dtype=F64, scale=(3,), training=training, eps=1e-2, device=device)
    cpu = layer.map(lambda t: t.cpu())
    call = lambda x, w, s: ours(replace(layer, input=x, weight=w, scale=s))  # noqa: E731
    return layer, cpu, call, (layer.input, layer.weight, layer.scale), (cpu.input, cpu.weight, cpu.scale)


@modes
def test_forward_mode(device: str, training: bool) -> None:
    _, cpu, call, primals, on_cpu = doubles(device, training)
    tangents = [normal(*t.shape, dtype=F64) for t in on_cpu]
    out, tangent = torch.func.jvp(call, primals, tuple(t.to(device) for t in tangents))
    want = torch.func.jvp(lambda *t: oracle(cpu, *t), on_cpu, tuple(tangents))
    close(out, want[0], 1e-12)
    close(tangent, want[1], 1e-12)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(primals[0], tangents[0].to(device))
        tangent = torch.autograd.forward_ad.unpack_dual(call(dual, *primals[1:])).tangent
    close(tangent, torch.func.jvp(lambda x: oracle(cpu, x, *on_cpu[1:]), on_cpu[:1], tuple(tangents[:1]))[1], 1e-12)


@modes
def test_torch_func(device: str, training: bool) -> None:
    _, cpu, call, primals, on_cpu = doubles(device, training)
    arguments = (0, 1, 2)
    got = torch.func.grad(lambda *t: call(*t).square().sum(), arguments)(*primals)
    want = torch.func.grad(lambda *t: oracle(cpu, *t).square().sum(), arguments)(*on_cpu)
    jacobian = torch.func.jacrev(lambda *t: oracle(cpu, *t), arguments)(*on_cpu)
    hessian = torch.func.hessian(lambda w: oracle(cpu, on_cpu[0], w, on_cpu[2]).square().sum())(on_cpu[1])
    close(torch.func.hessian(lambda w: call(primals[0], w, primals[2]).square().sum())(primals[1]), hessian, 1e-11)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        got, want = (*got, *transform(call, arguments)(*primals)), (*want, *jacobian)
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-12)


@pytest.mark.parametrize("allowed", [False, True], ids=["", "TF32"])
def test_torch_func_of_linear_float32(device: str, allowed: bool) -> None:
    x, w, b = normal(9, 200, device=device), normal(5, 200, device=device), normal(5, device=device)
    with tf32(allowed):
        out, tangent = torch.func.jvp(linear_float32, (x, w, b), (w[:1].expand(9, 200), x[:5], b))
        grads = torch.func.grad(lambda *t: linear_float32(*t).square().sum(), (0, 1, 2))(x, w, b)
    x, w, b = (t.cpu().double() for t in (x, w, b))
    want = torch.func.jvp(F.linear, (x, w, b), (w[:1].expand(9, 200), x[:5], b))
    right = torch.func.grad(lambda *t: F.linear(*t).square().sum(), (0, 1, 2))(x, w, b)
    for got, of in zip((out, tangent, *grads), (*want, *right), strict=True):
        close(got, of, 2e-6)


@pytest.mark.parametrize("dims", [d for d in itertools.product((None, 0, 1), repeat=3) if d != (None,) * 3], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_vmap_of_linear_float32(device: str, rank: int, dims: tuple) -> None:
    shapes = ((*(2, 3)[: rank - 1], 8), (6, 8), (6,))
    tensors = [normal(*s, device=device) for s in shapes]
    mapped = [t if d is None else torch.stack([t + n for n in range(4)], d) for t, d in zip(tensors, dims, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(linear_float32, in_dims=dims)(*mapped)
    loop = [linear_float32(*(t if d is None else t.select(d, n) for t, d in zip(mapped, dims, strict=True))) for n in range(4)]
    torch.testing.assert_close(got, torch.stack(loop), rtol=1e-5, atol=1e-5)


@modes
@pytest.mark.parametrize(
    "mapped", [("input",), ("weight", "scale"), ("input", "bn_weight"), ("running_mean", "bias"), ("scale",)], ids=str
)
def test_vmap(device: str, mapped: tuple[str, ...], training: bool) -> None:
    layer = make(training=training, device=device)
    stacks = [torch.stack([getattr(layer, n) + 0.1 * i for i in range(3)]) for n in mapped]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return fused(*replace(layer, **dict(zip(mapped, tensors, strict=True))).args())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(call)(*stacks)
        torch.vmap(torch.func.grad(lambda *t: call(*t)[0].square().sum()))(*stacks)
    for i in range(3):
        torch.testing.assert_close([t[i] for t in got], list(call(*(s[i] for s in stacks))), rtol=1e-5, atol=1e-5)


def test_the_log_says_what_is_composed(device: str, caplog: pytest.LogCaptureFixture) -> None:
    layer = make(device=device)
    with caplog.at_level(logging.INFO, "attention_ext"):
        ours(layer)
        assert len(caplog.messages) == 1 and "transform" not in caplog.messages[0]
        caplog.clear()
        torch.func.grad(lambda x: ours(replace(layer, input=x)).sum())(layer.input)
        torch.vmap(lambda w: linear_float32(layer.input, w))(layer.weight[None])
    assert [m.split(" on ")[0] for m in caplog.messages] == ["linear_batchnorm_softmax", "linear_float32"]
    assert "transform" in caplog.messages[0] and "vmap" in caplog.messages[1]
