"""What goes wrong in transformers without an error where an attention function does not know of it: each has its right value here.

Each test also runs the plain function that does not know, so that a case which would not show the error is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers is not installed, or older: pip install 'attention_ext[transformers]'"
)

from helpers import close, leaves, normal, qkv
from small_models import inputs, make
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import attention_ext
from attention_ext.integrations import transformers as integration
from attention_ext.integrations.transformers import attention_forward


def plain(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling=None, **kwargs):
    """What anyone would write first."""
    causal = mask is None and query.size(2) > 1 and kwargs.get("is_causal", getattr(module, "is_causal", True))
    out = attention_ext.sdpa(query, key, value, mask, is_causal=bool(causal), scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture(params=["own path", "PyTorch's operator", "preferred"])
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "own path":
        monkeypatch.setattr(integration, "sdpa", lambda *args, **options: attention_ext.sdpa_with_lse(*args, **options)[0])
    AttentionInterface.register("plain", plain)
    AttentionMaskInterface.register("plain", sdpa_mask)
    with integration.register(when="preferred" if request.param == "preferred" else "always"):
        yield
    AttentionInterface._global_mapping.pop("plain")
    AttentionMaskInterface._global_mapping.pop("plain", None)


@torch.no_grad()
def check(name: str, padding: int = 0, call: Callable[..., Tensor] | None = None, **changes) -> None:
    """Ours is as eager, and the plain function far from it."""
    batch = inputs(name, padding)
    call = call or (lambda model, **batch: model(**batch).logits)
    want, got, wrong = (call(make(name, of, **changes), **batch) for of in ("eager", "attention_ext", "plain"))
    if padding:  # at padding rows eager attention has the mean of the values, and they are not tokens
        want, got, wrong = (torch.cat([t[0], t[1, padding:]]) for t in (want, got, wrong))
    size = float(want.abs().max())
    assert float((got - want).abs().max()) < 1e-4 * size
    assert float((wrong - want).abs().max()) > 1e-2 * size


@pytest.mark.parametrize(("name", "padding"), [("llama", 7), ("mistral", 0)])
def test_masks_are_made(name: str, padding: int, ours: None) -> None:
    """Without a mask function of the same name there are none."""
    del AttentionMaskInterface._global_mapping["plain"]
    check(name, padding)


def test_position_bias(ours: None) -> None:
    check("t5")


def test_sinks(ours: None) -> None:
    check("gpt_oss")


def test_softcap_is_refused(ours: None) -> None:
    model, batch = make("gemma2", "attention_ext"), inputs("gemma2")
    with pytest.raises(ValueError, match=r"softcap: expected None, got 50.0; choose attn_implementation='eager'"):
        model(**batch)


def test_indices_of_sparse_attention(ours: None) -> None:
    check("deepseek_v32")
    check("deepseek_v32", 7)


def test_shared_keys_with_few_logits_kept(ours: None) -> None:
    """As in assisted decoding: the last layers have two query rows, after the mask was made."""
    check("gemma4_shared", call=lambda model, **batch: model(**batch, logits_to_keep=2).logits)


def test_bias_of_compressed_keys(ours: None) -> None:
    check("deepseek_v4")
    check("deepseek_v4", 7)


@pytest.mark.parametrize("kind", ["s_aux", "sinks"])
def test_sinks_and_their_gradients(kind: str, device: str) -> None:
    q, k, v = qkv(heads=(4, 2), L=5, S=7, E=16, device=device)
    sink = normal(4, device=device) if kind == "s_aux" else normal(2, 4, 5, 1, device=device)
    mask = torch.rand(2, 1, 5, 7, device=device) < 0.7
    mask[1, 0, 2] = False

    def formula(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = (q @ k.mT * 0.3).masked_fill(~mask, -1e30)
        column = sink.view(1, 4, 1, 1).expand(2, 4, 5, 1) if kind == "s_aux" else sink
        return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)

    def ours(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return attention_forward(nn.Module(), q, k, v, mask, scaling=0.3, **{kind: sink})[0]

    inputs, grad = leaves(q, k, v, sink), normal(2, 5, 4, 16, device=device)
    want, got = formula(*inputs), ours(*inputs)
    close(got, want)
    for one, other in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
        close(one, other)


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("block_indices", torch.zeros(1, 1, 1), r"register\(name='sdpa'\)"),
        ("output_attentions", True, "attn_implementation='eager'"),
        ("alibi_slopes", torch.zeros(4), "not known whether attention depends on it"),
    ],
)
def test_arguments_that_would_change_the_result(argument: str, value: object, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"attention_ext: {argument}: expected None, got .*{remedy}"):
        attention_forward(nn.Module(), *qkv(), None, **{argument: value})
    attention_forward(nn.Module(), *qkv(), None, **{argument: None})


def test_a_row_without_a_visible_key_is_zero_with_a_bias_too() -> None:
    q, k, v = qkv(L=5, S=5)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, 0, 3] = False
    out, _ = attention_forward(nn.Module(), q, k, v, mask, position_bias=normal(1, 3, 5, 5), when="always")
    assert not out[0, 3].any() and out[0, 2].all() and out.is_contiguous()


def test_an_empty_static_cache_sees_no_key_behind() -> None:
    q, k, v = qkv(L=5, S=9)
    bias = normal(1, 3, 5, 9)
    want, _ = attention_forward(nn.Module(), q, k[:, :, :5], v[:, :, :5], None, position_bias=bias[..., :5], when="always")
    got, _ = attention_forward(nn.Module(), q, k, v, None, position_bias=bias, when="always")
    close(got, want)
    plain, _ = attention_forward(nn.Module(), q, k, v, None, when="always")
    close(plain, attention_forward(nn.Module(), q, k[:, :, :5], v[:, :, :5], None, when="always")[0])
