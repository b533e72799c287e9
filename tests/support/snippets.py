"""The Python blocks of README.md and docs/: what each is, and how they run.

A fence says with run="..." what its block needs: "cuda" a card, "integrations" transformers and diffusers, "torchrun" several
processes, which is not run. The blocks of a page run one after another in one namespace, which begins with NAMES.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from paths import ROOT
from torch import Tensor, nn

import attention_ext

FENCE = re.compile(r'^```python(?: run="(\w*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = ("", "cuda", "integrations", "torchrun")


class Block(NamedTuple):
    needs: str
    line: int
    code: str


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(x, x, x)


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(found[1] or "", text[: found.start(2)].count("\n"), found[2]) for found in FENCE.finditer(text)]


def pages(needs: str) -> list[str]:
    """Those that have such a block."""
    return [str(page.relative_to(ROOT)) for page in PAGES if any(block.needs == needs for block in blocks(page))]


def names(device: str) -> dict[str, object]:
    """What the pages take for granted."""
    query, key, value = (torch.randn(2, 4, 16, 8, device=device) for _ in range(3))
    linear, bn = nn.Linear(20, 12).to(device), nn.BatchNorm1d(12).to(device)
    given: dict[str, object] = {"attention_ext": attention_ext, "torch": torch, "F": F, "query": query, "key": key, "value": value}
    given |= {f"{name}_blhe": torch.randn(2, 16, 4, 8, device=device) for name in "qkv"} | {"n": 5}
    given |= {"x": torch.randn(2, 4, 16, 8, device=device, requires_grad=True), "model": Attention(), "block": Attention()}
    given |= {"input": torch.randn(6, 20, device=device), "weight": linear.weight, "bias": linear.bias, "scale": 1.5}
    return given | {"linear": linear, "bn": bn, "mean": torch.zeros(12, device=device), "var": torch.ones(12, device=device)}


def run(page: str, needs: str, given: dict[str, object]) -> None:
    """The page's blocks that need nothing and those that need this, in order."""
    for block in blocks(ROOT / page):
        if block.needs in ("", needs):
            exec(compile("\n" * block.line + block.code, page, "exec"), given)
