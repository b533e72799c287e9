"""register and undo; the name "sdpa"; and what the installed transformers does for that name alone, or passes to attention."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers is not installed, or older: pip install 'attention_ext[transformers]'"
)

import transformers
from small_models import inputs, make
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attention_ext.integrations import check_tested
from attention_ext.integrations import transformers as integration

SOURCES = Path(transformers.__file__).parent


def registered(name: str) -> tuple[object, object]:
    return AttentionInterface._global_mapping.get(name), AttentionMaskInterface._global_mapping.get(name)


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    yield
    assert registered("attention_ext") == (None, None) and registered("sdpa") == (sdpa_attention_forward, sdpa_mask)


@pytest.mark.parametrize("name", ["attention_ext", "sdpa"])
def test_register_and_undo(name: str) -> None:
    first, second = integration.register(name), integration.register(name, "always")
    attention, mask = registered(name)
    assert attention.keywords["when"] == "always" and mask is (sdpa_mask if name == "sdpa" else integration.make_mask)
    second.undo()
    second.undo()
    first.undo()
    with integration.register(name) as one:
        assert one.name == name and registered(name)[0].keywords["when"] == "preferred"


@pytest.mark.parametrize("name", ["flash", "attention_ext/kernel", "eager", None])
def test_refuses_another_name(name: object) -> None:
    with pytest.raises(ValueError, match="name: expected 'attention_ext' or 'sdpa', got"):
        integration.register(name)
    with pytest.raises(ValueError, match="when: expected"):
        integration.register(when="sometimes")


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma4_shared", "deepseek_v32", "t5"])
def test_in_the_place_of_sdpa(name: str) -> None:
    model, batch = make(name, "sdpa"), inputs(name)
    if name == "gemma4_shared":
        batch["logits_to_keep"] = 2
    want = model(**batch).logits
    with integration.register("sdpa", "always"):
        torch.testing.assert_close(model(**batch).logits, want, rtol=0.0, atol=2e-5)


def test_continuous_batching_in_the_place_of_sdpa() -> None:
    pytest.importorskip("accelerate", reason="continuous batching needs accelerate")
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    alone = [make("llama").generate(torch.tensor([prompt]), generation_config=config)[0].tolist() for prompt in prompts]
    calls = []
    with integration.register("sdpa", lambda query, key, value: not calls.append(query.shape)):
        small = transformers.ContinuousBatchingConfig(num_blocks=8, block_size=16, max_batch_tokens=16)
        options = {"generation_config": config, "continuous_batching_config": small, "progress_bar": False}
        results = make("llama", "sdpa").generate_batch(prompts, **options).values()
    assert sorted([*result.prompt_ids, *result.generated_tokens] for result in results) == alone and calls


@pytest.mark.parametrize("version", ["5.23.0", "5.25.1", "6.0.0.dev0"])
def test_refuses_versions_that_are_not_tested(version: str) -> None:
    with pytest.raises(
        ImportError, match=rf"tested with transformers 5\.24 and this is {version}: pip install 'transformers==5\.24"
    ):
        check_tested("transformers", version, "5.24")
    check_tested("transformers", "5.24.3", "5.24")


def trees(word: str) -> dict[str, ast.Module]:
    """Of the installed files that hold a word."""
    files = [path for path in SOURCES.rglob("*.py") if not path.name.startswith("modular_")]
    return {str(path.relative_to(SOURCES)): ast.parse(text) for path in files if word in (text := path.read_text())}


# The files that compare a name with "sdpa", and why a name of our own is right there.
COMPARE = {
    "generation/continuous_batching/continuous_api.py": "refuses another name: register('sdpa')",
    "generation/continuous_batching/utils.py": "only reached through the one above",
    "modeling_utils.py": "whether a model supports the name",
    "trainer.py": "context parallelism refuses another name",
    "models/axk2/modeling_axk2.py": "indices",
    "models/deepseek_v32/modeling_deepseek_v32.py": "indices",
    "models/dots3_note/modeling_dots3_note.py": "indices",
    "models/falcon/modeling_falcon.py": "does not use the interface: override()",
    "models/gemma4/modeling_gemma4.py": "make_mask always makes one for shared keys",
    "models/gemma4_unified/modeling_gemma4_unified.py": "the same",
    "models/glm5_next/modeling_glm5_next.py": "makes a float mask for other names",
    "models/glm_moe_dsa/modeling_glm_moe_dsa.py": "indices",
    "models/hy_v4/modeling_hy_v4.py": "indices",
    "models/hy_v4_vl/modeling_hy_v4_vl.py": "indices",
    "models/minimax_m3_vl/modeling_minimax_m3_vl.py": "block_indices are refused",
    "models/mistral_large4/modeling_mistral_large4.py": "indices",
}


def test_no_other_file_compares_a_name_with_sdpa() -> None:
    def compares(tree: ast.Module) -> bool:
        nodes = [part for node in ast.walk(tree) if isinstance(node, ast.Compare) for part in ast.walk(node)]
        return any(isinstance(node, ast.Constant) and node.value == "sdpa" for node in nodes)

    assert sorted(name for name, tree in trees('"sdpa"').items() if compares(tree)) == sorted(COMPARE)


def test_every_argument_that_models_pass_to_attention_is_known() -> None:
    passed = set()
    for tree in trees("attention_interface(").values():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        ours = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "attention_interface"]
        passed |= {keyword.arg for call in ours for keyword in call.keywords if keyword.arg is not None}
    known = set(integration.attention_forward.__code__.co_varnames[: integration.attention_forward.__code__.co_argcount])
    refused = {"softcap", "block_indices", "output_attentions"}
    assert len(passed) > 15 and passed - known - refused <= integration._PASSED_BY
    through = set(transformers.utils.generic.TransformersKwargs.__annotations__)
    assert through - known - refused <= integration._PASSED_BY


def test_no_other_model_adds_to_masks() -> None:
    """A boolean mask that is made of a bias, or a bias that is cast to a mask's dtype, is the error of DeepSeek-V4."""
    found = [path.parent.name for path in SOURCES.rglob("modeling_*.py") if "bias.to(attention_mask.dtype)" in path.read_text()]
    assert tuple(found) == integration._ADD_TO_MASKS
