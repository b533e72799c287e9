"""This package's functions in the place of PyTorch's: neither ever calls what stands there at the time of the call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import close, leaves, normal, qkv
from torch import nn

import attention_ext


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return attention_ext.linear_float32(input, weight, bias)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_ext.sdpa)
    monkeypatch.setattr(F, "linear", linear)


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of PyTorch's functions by that name are gone."""

    def gone(*args: object, **options: object) -> None:
        raise AssertionError("looked up at the time of the call")

    for name in ("scaled_dot_product_attention", "linear", "dropout", "softmax", "batch_norm"):
        monkeypatch.setattr(F, name, gone)


def results(device: str) -> list[torch.Tensor]:
    """Every path that may end in PyTorch's operators, with gradients."""
    q, k, v = leaves(*qkv(L=5, S=7, device=device))
    x, weight, bias = leaves(normal(6, 8, device=device), normal(4, 8, device=device), normal(4, device=device))
    bool_mask = torch.rand(5, 7, device=device) < 0.7
    outs, transformed = [], []
    for call in (attention_ext.sdpa, lambda *args, **options: attention_ext.sdpa_with_lse(*args, **options)[0]):
        outs += [call(q, k, v), call(q, k, v, bool_mask), call(q, k, v, None, 0.0, True, scale=-1.0), call(q, k, v, None, 1.0)]
        outs += [torch.vmap(lambda t, call=call: call(t, k, v, None, 0.0, True))(q[None])]
        transformed += [torch.func.grad(lambda t, call=call: call(t, k, v).sum())(q)]
        transformed += [torch.func.jvp(lambda t, call=call: call(t, k, v), (q,), (q,))[1]]
    linear, layer = attention_ext.linear_float32, attention_ext.linear_batchnorm_softmax
    outs += [linear(x, weight, bias), layer(x, weight, bias, scale=2.0, training=True)]
    transformed += [torch.func.grad(lambda t: linear(t, weight).sum())(x)]
    transformed += [torch.func.jvp(lambda t: layer(t, weight, scale=2.0, training=True), (x,), (x,))[1]]
    grads = torch.autograd.grad(sum(out.sum() for out in outs), (q, k, v, x, weight, bias))
    return [t.detach() for t in (*outs, *transformed, *grads)]


@pytest.mark.parametrize("by", ["replaced", "forbidden"])
def test_bound_at_import(device: str, by: str, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    want = results(device)
    request.getfixturevalue(by)
    torch.manual_seed(0)
    for got, right in zip(results(device), want, strict=True):
        close(got, right)


@pytest.mark.parametrize("training", [False, True])
def test_multi_head_attention(device: str, training: bool, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=True).to(device).train(training)
    x, mask = normal(2, 9, 32, device=device), torch.rand(9, 9, device=device) < 0.2
    want = module(x, x, x, attn_mask=mask, need_weights=False)[0]
    request.getfixturevalue("replaced")
    out = module(x, x, x, attn_mask=mask, need_weights=False)[0]
    close(out, want)
    out.sum().backward()
    assert module.in_proj_weight.grad is not None and module.in_proj_weight.grad.isfinite().all()


def test_transformer_layer(device: str, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(device)
    x = normal(2, 9, 32, device=device)
    want = module(x)
    request.getfixturevalue("replaced")
    close(module(x), want)
    close(torch.compile(module, backend="aot_eager", fullgraph=True)(x), want)
