"""The private operator _batch_norm on the CPU next to float64, and operators by name next to their overloads."""

from __future__ import annotations

import pytest
import torch

import attention_ext
from attention_ext import operators
from attention_ext.linear import checks

ops = torch.ops.attention_ext


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (128, 300), (129, 7), (9001, 4), (130, 0)], ids=str)
def test_columns(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(sizes, dtype=dtype) * 3 + 1000
    rows, cols = sizes
    weight, bias, scale = torch.randn(2 * cols, dtype=dtype)[::2], torch.randn(cols, dtype=dtype), torch.randn(cols, dtype=dtype)
    out, mean, var = ops._batch_norm(x, weight, bias, None, None, scale, 1e-5)
    wide = x.double()
    tolerance = 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(mean.double(), wide.mean(0), rtol=tolerance, atol=0)
    sums = tolerance + 3 * rows * torch.finfo(torch.float64).eps  # summed in double, rounded once
    torch.testing.assert_close(var.double(), (wide - wide.mean(0)).square().mean(0), rtol=sums, atol=0)
    near = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, ((x - mean) * torch.rsqrt(var + 1e-5) * weight + bias) * scale, rtol=near, atol=near)
    again = ops._batch_norm(x, weight, bias, mean, var, scale, 1e-5)
    assert torch.equal(again[0], out) and torch.equal(again[1], mean) and torch.equal(again[2], var)


def test_what_is_not_finite() -> None:
    x, one = torch.randn(300, 4), torch.ones(())
    x[0, 0], x[299, 1], x[5, 2] = float("inf"), float("-inf"), float("nan")
    _, mean, var = ops._batch_norm(x, None, None, None, None, one, 1e-5)
    assert mean[0] == float("inf") and mean[1] == float("-inf") and mean[2].isnan() and mean[3].isfinite()
    assert var[:3].isnan().all() and var[3].isfinite()
    constant = torch.full((300, 2), 0.1)
    assert ops._batch_norm(constant, None, None, None, None, one, 1e-5)[2].max() < 1e-30


def test_refusals() -> None:
    x, one = torch.randn(4, 3), torch.ones(())
    for bad in (x.t(), x.half(), x[0]):
        with pytest.raises(RuntimeError, match="input"):
            ops._batch_norm(bad, None, None, None, None, one, 1e-5)
    with pytest.raises(RuntimeError, match="weight"):
        ops._batch_norm(x, torch.ones(4), None, None, None, one, 1e-5)
    with pytest.raises(RuntimeError, match="var"):
        ops._batch_norm(x, None, None, torch.ones(3), None, one, 1e-5)


@pytest.mark.parametrize("name", ["sdpa", "linear_float32", "linear_batchnorm_softmax"])
def test_operators_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results and refusals as by the overload, for calls that are known and for those that are not."""
    packet = getattr(ops, name)
    assert isinstance(packet, torch._ops.OpOverloadPacket) and packet is getattr(operators, name)
    x, w = torch.randn(6, 5), torch.randn(4, 5)
    arguments = {
        "sdpa": (x, w, w),
        "linear_float32": (x, w),
        "linear_batchnorm_softmax": (x, w, None, None, None, None, None, torch.ones(()), True, 1e-5),
    }[name]
    for _ in range(3):
        mine, other = packet(*arguments), packet.default(*arguments)
        pairs = zip(mine, other, strict=True) if isinstance(mine, tuple | list) else [(mine, other)]
        assert all(torch.equal(a, b) for a, b in pairs)
    with monkeypatch.context() as patch:
        patch.setattr(packet, "_op", None)  # its way to the dispatcher, which a known call does not take
        assert packet(*arguments) is not None
    for refused in (arguments[:1], (*arguments, *[None] * 9), (None, *arguments[1:])):
        with pytest.raises((RuntimeError, TypeError)) as by_name:
            packet(*refused)
        with pytest.raises(type(by_name.value)):
            packet.default(*refused)


def test_a_number_stays_a_number() -> None:
    """What is kept of a scale is no wrapper of a transform, and no trace sees that something is kept."""
    x, w = torch.randn(6, 5), torch.randn(4, 5)

    def call(x: torch.Tensor, scale: float) -> torch.Tensor:
        return attention_ext.linear_batchnorm_softmax(x, w, training=True, scale=scale)

    torch.jit.trace(lambda x: call(x, 0.8125), (x,))  # raises where two traces differ
    torch.func.grad(lambda x: call(x, 0.7125)[:, 0].sum())(x)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(checks._number(0.7125, torch.float32, False))
