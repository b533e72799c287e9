"""A Python number that changes from call to call of a compiled function: never the first one for ever.

Each function uses the number twice, once as an argument that is made of it and once as a factor of a tensor. PyTorch's own
operators keep such an argument (pytorch/pytorch#197889) where a graph comes out of AOTAutograd's cache, which only inductor has.
"""

from __future__ import annotations

import pytest
import torch
from helpers import close, normal, qkv
from torch import Tensor

import attention_ext

NUMBERS = (0.5, 1.0, 2.0, 3.0, 4.0)


def functions(device: str) -> dict:
    q, k, v = qkv(L=5, S=7, E=8, device=device)
    x, weight, mean, var = (normal(*shape, device=device) for shape in ((6, 8), (4, 8), (4,), (4,)))
    layer = attention_ext.nn.LinearBatchNormSoftmax(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), 1.0).to(device)

    def normed(**options) -> Tensor:
        return attention_ext.linear_batchnorm_softmax(x, weight, training=True, **{"scale": 1.0} | options)

    def running(momentum: float) -> Tensor:
        m, s = mean.clone(), var.clone()
        return normed(running_mean=m, running_var=s, momentum=momentum) + m + s

    def module(eps: float) -> Tensor:
        layer.bn.eps = eps
        return layer(x)

    return {
        "sdpa, scale": lambda s: attention_ext.sdpa(q, k, v, scale=1 / s) * s,
        "sdpa, causal, scale": lambda s: attention_ext.sdpa(q, k, v, None, 0.0, True, scale=1 - s) * s,
        "sdpa_with_lse, scale": lambda s: torch.cat([t.flatten() for t in attention_ext.sdpa_with_lse(q, k, v, scale=1 / s)]) * s,
        "linear_batchnorm_softmax, scale": lambda s: normed(scale=1 / s) * s,
        "linear_batchnorm_softmax, eps": lambda s: normed(eps=1 / s) * s,
        "linear_batchnorm_softmax, momentum": lambda s: running(1 / (4 * s)) * s,
        "LinearBatchNormSoftmax, eps": lambda s: module(1 / s) * s,
    }


@pytest.mark.parametrize("name", functions("cpu"))
def test_series(device: str, name: str) -> None:
    torch._dynamo.reset()
    function = functions(device)[name]
    compiled = torch.compile(function, fullgraph=True)
    for number in NUMBERS:
        close(compiled(number), function(number))


def test_dropout(device: str) -> None:
    """The share of the weights that are dropped, of values that are all 1, follows the number."""
    q, k, _ = qkv((8,), (8,), L=64, S=64, E=8, device=device)
    ones = torch.ones_like(k)
    torch._dynamo.reset()
    compiled = torch.compile(lambda s: attention_ext.sdpa(q * 0.0 + s, k * 0.0, ones, None, s / 8), fullgraph=True)
    for number in NUMBERS:
        sums = compiled(number)[..., 0]  # each of 64 weights of a row is 1 / 64 / (1 - p) with probability 1 - p
        p = number / 8
        assert abs(sums.mean().item() - 1.0) < 0.02
        assert abs(sums.var().item() / (p / (1.0 - p) / 64) - 1.0) < 0.15


@pytest.mark.parametrize("name", ["sdpa_forward", "qk_scores"])
def test_operators_take_a_number_as_it_is(device: str, name: str) -> None:
    """The operators themselves, where the number is the argument: PyTorch then compiles anew."""
    q, k, v = qkv(L=5, S=7, E=8, device=device)
    operators = torch.ops.attention_ext
    function = {
        "sdpa_forward": lambda s: operators.sdpa_forward(q, k, v, None, None, 0.0, False, scale=s)[0] * s,
        "qk_scores": lambda s: operators.qk_scores(q, k, scale=s) * s,
    }[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for number in NUMBERS:
        close(compiled(number), function(number))
