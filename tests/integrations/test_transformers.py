"""attention_ext in models of transformers: logits, gradients and tokens are those of transformers' own functions."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers is not installed, or older: pip install 'attention_ext[transformers]'"
)

from small_models import CAUSAL, MODELS, inputs, make
from torch import Tensor, nn

import attention_ext
from attention_ext.integrations import transformers as integration

SUPPORTED = [name for name in MODELS if name != "gemma2"]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call by this package's kernels or its reference, not by PyTorch's operator, which sdpa is on the CPU."""
    monkeypatch.setattr(integration, "sdpa", lambda *args, **options: attention_ext.sdpa_with_lse(*args, **options)[0])
    with integration.register(when="always"):
        yield


def shown(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    """Where there is a token. The others see no key: here and with "sdpa" they get 0, with "eager" the mean of the values."""
    mask = batch.get("attention_mask")
    return torch.ones(logits.shape[:2], dtype=torch.bool) if mask is None or "decoder_input_ids" in batch else mask.bool()


def same(got: Tensor, want: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, rtol=0.0, atol=tolerance * max(0.1, float(want.abs().max())))


def results(name: str, padding: int, implementation: str, noise: float = 0.0) -> dict[str, Tensor]:
    """The logits where there is a token, and the gradient of every parameter that has one."""
    batch, model = inputs(name, padding), make(name, implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + noise * torch.randn_like(parameter))
    logits = model(**batch).logits
    logits = logits[shown(batch, logits)]
    logits.square().mean().backward()
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("name", SUPPORTED)
def test_logits_and_gradients(name: str, padding: int, own: None) -> None:
    """The difference from eager attention is one of rounding: within three times what an error of an ulp in the weights makes."""
    want, got = (results(name, padding, of) for of in ("eager", "attention_ext"))
    moved = results(name, padding, "eager", noise=torch.finfo(torch.float32).eps)
    assert got.keys() == want.keys() and len(want) > 10
    largest = max(float(grad.norm()) for key, grad in want.items() if key != "logits")
    for key, right in want.items():
        scale = max(float(right.norm()), 0.01 * largest)  # gradients of keys' biases are 0 but for rounding
        errors = [float((of[key] - right).norm()) / scale for of in (moved, got)]
        assert errors[1] <= 3.0 * errors[0] + 1e-6, (key, errors)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*CAUSAL, "t5", "whisper"])
def test_generation(name: str, cache: str, own: None) -> None:
    if name == "deepseek_v4" and cache == "static":
        pytest.skip("DeepSeek-V4 has a cache of its own")
    batch = inputs(name, 7)
    if name == "whisper":
        batch = {"input_features": batch["input_features"]}
    if name == "t5":
        del batch["decoder_input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    want, got = (make(name, of).generate(**batch, **options) for of in ("eager", "attention_ext"))
    assert torch.equal(got, want) and got.shape[1] >= 8


@pytest.mark.parametrize("name", ["llama", "gemma4", "t5", "bert"])
def test_preferred_leaves_the_cpu_to_transformers(name: str) -> None:
    batch = inputs(name, 7)
    with integration.register():
        assert torch.equal(make(name, "attention_ext")(**batch).logits, make(name, "sdpa")(**batch).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma4", "gpt_oss"])
def test_half_types_are_as_accurate_as_eager(name: str, dtype: torch.dtype, own: None) -> None:
    batch = inputs(name)
    want = make(name)(**batch).logits
    errors = [float((make(name, of).to(dtype)(**batch).logits.float() - want).norm()) for of in ("eager", "attention_ext")]
    assert 0.0 < errors[1] < 2.0 * errors[0]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma4", "gemma4_shared"])
def test_packed_sequences_are_as_separate_ones(name: str, own: None) -> None:
    model, ids = make(name, "attention_ext"), inputs(name)["input_ids"][:1]
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    apart = [model(input_ids=part, use_cache=False).logits for part in ids.split([10, 14], 1)]
    same(packed, torch.cat(apart, 1))


@pytest.mark.parametrize("name", ["llama", "gemma4", "gpt_oss", "t5"])
def test_compiled_in_one_graph(name: str, own: None) -> None:
    torch._dynamo.reset()
    batch, model = inputs(name, 7), make(name, "attention_ext")
    with torch.no_grad():
        want = model(**batch, use_cache=False).logits
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch, use_cache=False).logits
    same(got, want)


def test_compiled_decoding_with_a_static_cache(own: None) -> None:
    torch._dynamo.reset()
    batch, model = inputs("llama", 7), make("llama", "attention_ext")
    want = model.generate(**batch, max_new_tokens=6, do_sample=False)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(model.generate(**batch, max_new_tokens=6, do_sample=False, cache_implementation="static"), want)


def test_export_with_a_dynamic_length() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make("llama", "attention_ext")

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, use_cache=False).logits

    with integration.register(when="always"):
        module, ids = Logits(), inputs("llama")["input_ids"]
        program = torch.export.export(module, (ids,), dynamic_shapes=({1: torch.export.Dim("length", min=2, max=64)},))
        assert "attention_ext.sdpa.default" in program.graph_module.code
        same(program.module()(ids[:, :13]), module(ids[:, :13]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, own: None) -> None:
    grads = []
    for checkpoints in (False, True):
        model = make("llama", "attention_ext").train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(**inputs("llama"), use_cache=False).logits.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for got, want in zip(*grads, strict=True):
        same(got, want, 1e-5)


def test_dropout_is_applied_in_training_alone(own: None) -> None:
    model, batch = make("llama", "attention_ext", attention_dropout=0.3), inputs("llama")
    plain = model(**batch).logits
    model.train()
    torch.manual_seed(5)
    one = model(**batch).logits
    torch.manual_seed(5)
    assert torch.equal(model(**batch).logits, one) and not torch.allclose(one, plain, atol=1e-2)


@torch.no_grad()
def test_what_tokenizers_give_and_a_model_does_not_name_is_passed_by(own: None) -> None:
    model, batch = make("llama", "attention_ext"), inputs("llama", 7)
    more = {"token_type_ids": torch.zeros_like(batch["input_ids"]), "cache_position": torch.arange(24)}
    assert torch.equal(model(**batch, **more).logits, model(**batch).logits)


@pytest.mark.gpu
@torch.no_grad()
def test_head_dim_512_here_and_256_there(caplog: pytest.LogCaptureFixture) -> None:
    """ "preferred" on a card: the full layers of Gemma 4 by attention_ext on Hopper, the others by transformers."""
    batch, model = {"input_ids": inputs("gemma4", length=96)["input_ids"].cuda()}, make("gemma4").cuda()
    exact = model(**batch).logits
    model.to(torch.bfloat16)
    want = model(**batch).logits
    with integration.register(), caplog.at_level(logging.INFO, logger="attention_ext"):
        model.set_attn_implementation("attention_ext")
        got = model(**batch).logits
    errors = [float((logits.float() - exact).norm()) for logits in (want, got)]
    assert errors[1] < 2.0 * errors[0]
    ours = sum(said.startswith("sdpa on cuda") for said in caplog.messages)
    assert (ours, len(caplog.messages)) == ((2 if torch.cuda.get_device_capability() == (9, 0) else 0), 4)


def test_parts_of_a_model_may_differ(own: None) -> None:
    model, batch = make("llama"), inputs("llama", 7)
    want = model(**batch).logits
    model.set_attn_implementation("attention_ext")
    assert model.config._attn_implementation == "attention_ext"
    same(model(**batch).logits[0], want[0])
