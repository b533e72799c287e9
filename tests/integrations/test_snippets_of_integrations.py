"""The Python blocks of README.md and docs/ that use transformers or diffusers run, with small models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers is not installed, or older: pip install 'attention_ext[transformers]'"
)
pytest.importorskip(
    "diffusers", minversion="0.42", reason="diffusers is not installed, or older: pip install 'attention_ext[diffusers]'"
)

import snippets
from diffusers import AutoencoderKL
from small_models import inputs, make

from attention_ext.integrations import transformers as integration


class Pipe:
    """What a page uses of a pipeline of diffusers: a VAE, which a call decodes with."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
        self.vae = AutoencoderKL(**blocks, block_out_channels=[32, 64], layers_per_block=1, norm_num_groups=8).eval()

    def __call__(self, prompt: str) -> SimpleNamespace:
        return SimpleNamespace(images=[self.vae.decode(torch.randn(1, 4, 8, 8)).sample])


@pytest.mark.parametrize("page", snippets.pages("integrations"))
def test_blocks_run(page: str, tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    given = snippets.names("cpu") | {"path": tmp_path, "pipe": Pipe(), "prompt": "a small house"}
    try:
        snippets.run(page, "integrations", given)
        if page == "docs/transformers.md":
            assert given["model"].config._attn_implementation == "attention_ext"
            assert given["model"](**inputs("llama")).logits.isfinite().all()
        if page == "docs/diffusers.md":
            assert given["use"].override.left > 0 and given["image"].isfinite().all()
    finally:
        integration.Registration("attention_ext").undo()
