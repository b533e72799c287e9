"""attention_ext.nn.LinearBatchNormSoftmax: the modules it wraps, in training and evaluation, and what a module has to do."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from helpers import HALVES, close, normal
from nn_pairs import SCALES, check_buffers, pair, switches
from torch import Tensor, nn

import attention_ext
from attention_ext.nn import LinearBatchNormSoftmax


def train(ours: nn.Module, own: nn.Module, batches: tuple[int, ...], dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    """Steps of both, with outputs, buffers and in the end parameters compared."""
    optimisers = [torch.optim.SGD(module.parameters(), 0.5) for module in (ours, own)]
    for rows in batches:
        x = normal(rows, 8, dtype=dtype, device=own.linear.weight.device)
        outputs = []
        for module, optimiser in zip((ours, own), optimisers, strict=True):
            optimiser.zero_grad()
            outputs.append(module(x))
            outputs[-1].square().sum().backward()
            optimiser.step()
        torch.testing.assert_close(*outputs, **tolerance)
        check_buffers(ours, own, **tolerance)
    right = dict(own.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, right[name], **tolerance)


@switches
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bias", [True, False])
def test_training_then_evaluation(device: str, switch: str, scale: str, bias: bool) -> None:
    """A step of training in float32, four in float64 with batches of different sizes, one of them empty, then evaluation."""
    ours, own = pair(device, switch, scale, bias)
    train(ours, own, (8,), torch.float32, {"rtol": 1e-3, "atol": 1e-4})
    exact = {"rtol": 1e-9, "atol": 1e-10}
    ours, own = (module.double() for module in pair(device, switch, scale, bias))
    train(ours, own, (5, 0, 9, 4), torch.float64, exact)
    ours.eval(), own.eval()
    before = copy.deepcopy(ours.state_dict())
    for rows in (7, 2, 0, *([1] if ours.bn.running_mean is not None else [])):
        x = normal(rows, 8, dtype=torch.float64, device=device)
        torch.testing.assert_close(ours(x), own(x), **exact)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items()), "evaluation changes nothing"


@pytest.mark.parametrize("switch", ["no statistics", "default"])
def test_one_row_for_batch_statistics_is_a_value_error(device: str, switch: str) -> None:
    ours, own = pair(device, switch)
    if switch == "no statistics":
        ours.eval(), own.eval()
    before = copy.deepcopy(ours.state_dict())
    for module in (ours, own):
        with pytest.raises(ValueError, match="more than 1 value per channel when training"):
            module(normal(1, 8, device=device))
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


@switches
def test_an_empty_batch(device: str, switch: str) -> None:
    """It is counted; nothing else changes, also where the first batch of a cumulative average is empty."""
    ours, own = pair(device, switch)
    before = {name: t.clone() for name, t in ours.bn.named_buffers()}
    for rows in (0, 0, 5):
        x = normal(rows, 8, device=device)
        torch.testing.assert_close(ours(x), own(x), rtol=1e-3, atol=1e-4)
        check_buffers(ours, own)
        for name, tensor in ours.bn.named_buffers() if rows == 0 else ():
            assert name == "num_batches_tracked" or torch.equal(tensor, before[name])


def test_the_mode_is_that_of_bn(device: str) -> None:
    ours, own = pair(device)
    x = normal(5, 8, device=device)
    ours.bn.eval()
    assert ours.training and torch.equal(ours(x), ours.eval()(x))
    torch.testing.assert_close(ours(x), own.eval()(x), rtol=1e-4, atol=1e-5)
    ours.train().bn.eval()
    own.bn.eval()
    check_buffers(ours, own)
    assert ours.train().bn.training


def test_statistics_switched_off_later(device: str) -> None:
    """bn.track_running_stats = False with buffers there: training leaves them alone, evaluation still uses them."""
    ours, own = pair(device)
    x = normal(5, 8, device=device)
    for module in (ours, own):
        module(x)
        module.bn.track_running_stats = False
    for _ in range(2):
        torch.testing.assert_close(ours(x), own(x), rtol=1e-4, atol=1e-5)
        check_buffers(ours, own)
        ours.eval(), own.eval()


def test_the_three_are_shared(device: str) -> None:
    linear, bn, scale = nn.Linear(8, 6).to(device), nn.BatchNorm1d(6).to(device), nn.Parameter(torch.ones(1, device=device))
    module = LinearBatchNormSoftmax(linear, bn, scale)
    assert module.linear is linear and module.bn is bn and module.scale is scale
    assert {id(p) for p in module.parameters()} == {id(p) for p in (*linear.parameters(), *bn.parameters(), scale)}
    with torch.no_grad():
        linear.weight.zero_(), linear.bias.zero_(), scale.fill_(3.0)
    bn.eval()
    bn.bias.data[2] = 1.0
    close(module(normal(4, 8, device=device)), torch.softmax(3 * bn.bias, 0).expand(4, 6), 1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_state(scale: str) -> None:
    ours, _ = pair(scale=scale)
    bn = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert sorted(ours.state_dict()) == sorted(["scale", "linear.weight", "linear.bias", *(f"bn.{name}" for name in bn)])
    assert ("scale" in dict(ours.named_parameters())) == (scale in ("parameter", "per feature"))
    x = normal(5, 8)
    ours(x)
    other, _ = pair(scale=scale)
    other.load_state_dict(ours.state_dict())
    stored = io.BytesIO()
    torch.save(ours, stored)
    stored.seek(0)
    copies = [other, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(stored, weights_only=False)]
    want = ours.eval()(x)
    for module in copies:
        assert torch.equal(module.eval()(x), want)
        module.linear.weight.data.zero_()
    assert torch.equal(ours(x), want), "a copy shares nothing"
    assert "linear" in repr(ours) and "bn" in repr(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "scale", [torch.tensor(3), torch.arange(6), torch.tensor([True]), torch.tensor(2.5, dtype=torch.float64)], ids=str
)
def test_scales_that_decide_no_dtype(device: str, scale: Tensor, dtype: torch.dtype) -> None:
    """Integers, and rank 0 of another dtype or on the CPU, as PyTorch's type promotion takes them."""
    ours, own = pair(device)
    linear, bn, x = ours.linear.to(dtype), ours.bn.to(dtype), normal(5, 8, dtype=dtype, device=device)
    placed = scale.to(device) if scale.dim() else scale
    module = LinearBatchNormSoftmax(linear, bn, placed)
    assert module.scale.dtype in (torch.float32, torch.float64) and module.scale.device.type == device
    assert copy.deepcopy(module).half().scale.dtype == torch.float16, "a buffer that is cast with the rest"
    own.to(dtype)
    right = torch.softmax(placed * own.bn(own.linear(x)), 1)
    functional = attention_ext.linear_batchnorm_softmax(
        x, linear.weight, linear.bias, bn_weight=bn.weight, bn_bias=bn.bias, scale=placed, training=True
    )
    tolerance = {"rtol": 0.0, "atol": 0.02 if dtype == torch.float16 else 1e-4}
    for out in (module(x), functional):
        assert out.dtype == right.dtype
        torch.testing.assert_close(out, right, **tolerance)


def test_a_scale_that_needs_another_dtype_is_refused(device: str) -> None:
    ours, _ = pair(device)
    x = normal(5, 8, device=device)
    for scale in (torch.ones(1, dtype=torch.float64), torch.ones(6, dtype=torch.float16), torch.tensor(1j)):
        module = LinearBatchNormSoftmax(ours.linear, ours.bn, scale.to(device))
        with pytest.raises(RuntimeError, match=r"^attention_ext: scale: expected dtype torch\.float32, got"):
            module(x)


def test_the_gradient_of_a_scale_of_rank_0_in_float64(device: str) -> None:
    ours, own = pair(device)
    x = normal(5, 8, device=device)
    for module in (ours, own):
        module.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        module(x).square().sum().backward()
    assert ours.scale.grad.dtype == torch.float64 and ours.scale.grad.device.type == "cpu"
    torch.testing.assert_close(ours.scale.grad, own.scale.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("training", [True, False])
def test_dtypes(device: str, dtype: torch.dtype, scale: str, training: bool) -> None:
    ours, _ = pair(device, scale=scale)
    right = copy.deepcopy(ours).double().train(training)
    ours.to(dtype).train(training)
    right.load_state_dict(ours.state_dict())
    x = normal(9, 8, dtype=dtype, device=device)
    out = ours(x)
    assert out.dtype == dtype and ours.bn.running_mean.dtype == dtype and ours.scale.dtype == dtype
    close(out, right(x.double()), 8 * torch.finfo(dtype).eps)
    close(ours.bn.running_var, right.bn.running_var, 2 * torch.finfo(dtype).eps)


def test_half_operands_with_the_rest_in_float32(device: str) -> None:
    ours, _ = pair(device)
    ours.linear.half()
    out = ours(normal(9, 8, dtype=torch.float16, device=device))
    assert out.dtype == torch.float16 and ours.bn.running_mean.dtype == torch.float32 and out.isfinite().all()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked(kind: str) -> LinearBatchNormSoftmax:
    module, _ = pair()
    if kind == "instance":
        module.linear.forward = lambda x: x
    elif kind == "bn":
        module.bn.register_forward_hook(lambda *_: None)
    else:
        getattr(module.linear, f"register_{kind}")(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "instance", "bn"]
)
def test_hooks_that_would_not_run(kind: str) -> None:
    module = hooked(kind)
    name = "bn" if kind == "bn" else "linear"
    with pytest.raises(
        RuntimeError, match=f"^attention_ext: {name}: expected a module without hooks, since its forward is not called"
    ):
        module(normal(4, 8))


def test_modules_that_it_does_not_compute() -> None:
    linear, bn, scale, narrow = nn.Linear(8, 6), nn.BatchNorm1d(6), 1.0, nn.BatchNorm1d(7)
    refusals: list[tuple[type[Exception], str, tuple]] = [
        (ValueError, "bn: expected num_features = linear.out_features = 6, got num_features = 7", (linear, narrow, scale)),
        (TypeError, "bn: expected an nn.BatchNorm1d or a .*, got SyncBatchNorm", (linear, nn.SyncBatchNorm(6), scale)),
        (TypeError, "bn: expected an nn.BatchNorm1d or a .*, got BatchNorm2d", (linear, nn.BatchNorm2d(6), scale)),
        (TypeError, "bn: expected an nn.BatchNorm1d or a .*, got LazyBatchNorm1d", (linear, nn.LazyBatchNorm1d(), scale)),
        (TypeError, "linear: expected an nn.Linear or a .*, got Bilinear", (nn.Bilinear(8, 8, 6), bn, scale)),
        (TypeError, "linear: expected an nn.Linear or a .*, got Doubled", (Doubled(8, 6), bn, scale)),
        (TypeError, "linear: expected initialised parameters, got a lazy module", (nn.LazyLinear(6), bn, scale)),
        (ValueError, r"scale: expected a number or shape \(\), \(1,\) or \(6,\), got shape \(5,\)", (linear, bn, torch.ones(5))),
        (ValueError, r"scale: expected a number or shape .*, got shape \(1, 6\)", (linear, bn, torch.ones(1, 6))),
    ]
    for error, words, arguments in refusals:
        with pytest.raises(error, match=f"^attention_ext: {words}"):
            LinearBatchNormSoftmax(*arguments)
    module = LinearBatchNormSoftmax(linear, bn, scale)
    module.linear = Doubled(8, 6)
    with pytest.raises(TypeError, match="got Doubled"):
        module(normal(4, 8))
    for shape in ((8,), (2, 4, 8)):
        with pytest.raises(RuntimeError, match=r"^attention_ext: input: expected a matrix \(rows, K\), got shape"):
            LinearBatchNormSoftmax(linear, bn, scale)(normal(*shape))
    module = nn.SyncBatchNorm.convert_sync_batchnorm(LinearBatchNormSoftmax(linear, bn, scale))
    with pytest.raises(TypeError, match="got SyncBatchNorm"):
        module(normal(4, 8))
