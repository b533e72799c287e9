"""explain says what sdpa would run and why, in one sentence, without running it; preferred is its verdict."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from helpers import FLOATS, leaves, normal, qkv

import attention_ext

CALLS = {
    "plain": ({}, {}, "torch"),
    "causal": ({}, {"is_causal": True}, "torch"),
    "dropout": ({}, {"dropout_p": 0.5}, "torch"),
    "grouped": ({"heads": (4, 2)}, {"enable_gqa": True}, "torch"),
    "large head dim": ({"E": 512}, {}, "torch"),
    "no keys": ({"S": 0}, {}, "torch"),
    "negative scale": ({}, {"is_causal": True, "scale": -1.0}, "torch_math"),
    "scale 0": ({}, {"is_causal": True, "scale": 0.0}, "torch_math"),
    "no head dim": ({"E": 0, "Ev": 4}, {}, "torch_math"),
}


def check(explanation: attention_ext.Explanation) -> None:
    assert isinstance(explanation, attention_ext.Explanation)
    assert isinstance(explanation.kernel, str) and explanation.kernel
    assert isinstance(explanation.reason, str) and explanation.reason
    assert type(explanation.workspace) is int and explanation.workspace >= 0
    assert type(explanation.preferred) is bool
    text = str(explanation)
    assert explanation.kernel in text and explanation.reason in text
    assert "\n" not in text and text.endswith(".") and ". " not in text, text


@pytest.mark.parametrize("name", CALLS)
def test_cpu(name: str) -> None:
    sizes, options, kernel = CALLS[name]
    explanation = attention_ext.explain(*qkv(**sizes), **options)
    check(explanation)
    assert explanation.kernel == kernel and explanation.workspace == 0 and not explanation.preferred


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("E", [64, 512, 1024])
@pytest.mark.parametrize("masked", [False, True])
def test_any_device(device: str, dtype: torch.dtype, E: int, masked: bool) -> None:
    q, k, v = qkv(E=E, dtype=dtype, device=device)
    mask = normal(19, 19, dtype=dtype, device=device) if masked else None
    check(attention_ext.explain(q, k, v, mask))
    assert attention_ext.preferred(q, k, v, mask) is attention_ext.explain(q, k, v, mask).preferred


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_ranks(device: str, rank: int) -> None:
    batch, heads = {2: ((), ()), 3: ((), (3,)), 5: ((2, 2), (3,))}[rank]
    check(attention_ext.explain(*qkv(batch, heads, device=device), is_causal=True))


def test_runs_nothing(device: str) -> None:
    """No random numbers, no gradient graph, no look at the values: meta tensors do as well."""
    q, k, v = leaves(*qkv(device=device))
    before = torch.get_rng_state()
    assert attention_ext.explain(q, k, v, None, 0.5) == attention_ext.explain(q.detach(), k.detach(), v.detach(), None, 0.5)
    assert torch.equal(before, torch.get_rng_state())
    check(attention_ext.explain(*(t.detach().to("meta") for t in (q, k, v))))


def test_refuses_what_sdpa_refuses(device: str) -> None:
    q, k, v = qkv(device=device)
    mask = torch.zeros(19, 19, device=device)
    for call in (attention_ext.explain, attention_ext.preferred, attention_ext.sdpa):
        with pytest.raises(RuntimeError, match=r"^attention_ext: attn_mask: expected "):
            call(q, k, v, mask, 0.0, True)
        with pytest.raises(RuntimeError, match=r"^attention_ext: key: expected "):
            call(q, k[:, :2], v[:, :2], enable_gqa=True)
        with pytest.raises(RuntimeError, match=r"^attention_ext: dropout_p: expected "):
            call(q, k, v, None, 2.0)


def test_transforms_are_named(device: str) -> None:
    q, k, v = qkv(device=device)
    seen: list[attention_ext.Explanation] = []

    def f(t: torch.Tensor) -> torch.Tensor:
        seen.append(attention_ext.explain(t, k, v))
        return attention_ext.sdpa(t, k, v)

    torch.func.jvp(f, (q,), (q,))
    torch.func.grad(lambda t: f(t).sum())(q)
    for explanation in seen:
        check(explanation)
    assert seen[0].kernel == "torch_math" and seen[1].kernel in ("torch", "torch_math")


def test_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv()
    explanation = attention_ext.explain(q, k, v)
    with caplog.at_level(logging.INFO, "attention_ext"):
        attention_ext.sdpa(q, k, v)
    texts = [r.getMessage() for r in caplog.records if r.name.split(".")[0] == "attention_ext" and r.levelno == logging.INFO]
    assert any(explanation.kernel in text and explanation.reason in text for text in texts), texts
    caplog.clear()
    with caplog.at_level(logging.WARNING, "attention_ext"):
        attention_ext.sdpa(q, k, v)
    assert not caplog.records


def test_public_function_is_the_operator(device: str) -> None:
    q, k, v = qkv(heads=(4, 2), device=device)
    got = attention_ext.sdpa(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.equal(got, torch.ops.attention_ext.sdpa(q, k, v, None, 0.0, True, scale=0.3, enable_gqa=True))


def test_explanation_is_a_value() -> None:
    explanation = attention_ext.explain(*qkv())
    assert {f.name for f in dataclasses.fields(explanation)} == {"kernel", "reason", "workspace", "preferred"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.kernel = "other"
