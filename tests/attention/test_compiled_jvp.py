"""Forward-mode derivatives inside compiled functions are those of eager ones."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import close, normal, qkv
from torch import Tensor
from torch.autograd import forward_ad

import attention_ext


def operators(device: str) -> dict:
    """name: a function of a query (2, 3, 5, 8)."""
    _, k, v = qkv(L=5, S=7, E=8, device=device)
    mask, weight, bias = normal(5, 7, device=device), normal(4, 8, device=device), normal(4, device=device)
    layer = attention_ext.linear_batchnorm_softmax
    return {
        "sdpa": lambda t: attention_ext.sdpa(t, k, v, mask),
        "sdpa, causal": lambda t: torch.ops.attention_ext.sdpa(t, k, v, None, 0.0, True, scale=0.3),
        "sdpa, of the value": lambda t: attention_ext.sdpa(k[:, :, :5], k, k + t[:, :, :1]),
        "sdpa, of the mask": lambda t: attention_ext.sdpa(v[:, :, :5], k, v, mask + t[:, :, :, :1]),
        "out": lambda t: attention_ext.sdpa_with_lse(t, k, v, mask)[0],
        "lse": lambda t: attention_ext.sdpa_with_lse(t, k, v, mask)[1],
        "linear_float32": lambda t: attention_ext.linear_float32(t, weight, bias),
        "training": lambda t: layer(t[0, 0], weight, bias, scale=2.0, training=True),
        "evaluation": lambda t: layer(t[0, 0], weight, running_mean=bias, running_var=bias**2, scale=2.0),
    }


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", operators("cpu"))
def test_jvp(device: str, name: str, backend: str) -> None:
    q, tangent = normal(2, 3, 5, 8, device=device), normal(2, 3, 5, 8, device=device)
    function = operators(device)[name]

    def jvp(t: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(function, (t,), (direction,))

    def over_reverse(t: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(torch.func.grad(lambda u: function(u).cos().sum()), (t,), (direction,))

    for derivative in (jvp, over_reverse):
        torch._dynamo.reset()
        for got, want in zip(torch.compile(derivative, backend=backend)(q, tangent), derivative(q, tangent), strict=True):
            close(got, want)


@functools.cache
def keeps_tangents(device: str) -> bool:
    """Whether this release of PyTorch has the tangents of a level that a graph opens."""

    def of_pytorch(t: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(torch.softmax(forward_ad.make_dual(t, t), -1)).tangent

    torch._dynamo.reset()
    return torch.compile(of_pytorch, backend="aot_eager")(normal(2, 3, device=device)) is not None


@pytest.mark.parametrize("name", operators("cpu"))
def test_dual_level_in_the_graph(device: str, name: str) -> None:
    """A level that the graph opens itself, of which PyTorch's Python knows nothing when it runs."""
    q, tangent = normal(2, 3, 5, 8, device=device), normal(2, 3, 5, 8, device=device)
    function = operators(device)[name]

    def derivative(t: Tensor, direction: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(t, direction))).tangent

    if not keeps_tangents(device):
        pytest.skip("this release of PyTorch loses the tangents of a level that a graph opens")
    want = derivative(q, tangent)
    assert want is not None
    torch._dynamo.reset()
    close(torch.compile(derivative, backend="aot_eager")(q, tangent), want)


def test_a_forced_kernel_refuses_it(device: str) -> None:
    """sdpa_forward has no forward-mode derivative and says so, compiled as well."""
    q, k, v = qkv(L=5, S=7, E=8, device=device)

    def derivative(t: Tensor) -> Tensor:
        return torch.func.jvp(lambda u: torch.ops.attention_ext.sdpa_forward(u, k, v, None, None, 0.0, False)[0], (t,), (t,))[1]

    with pytest.raises(RuntimeError, match="sdpa_forward has no forward-mode derivative"):
        derivative(q)
    with pytest.raises(Exception, match="sdpa_forward has no forward-mode derivative"):
        torch.compile(derivative, backend="aot_eager")(q)
