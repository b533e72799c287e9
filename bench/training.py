#!/usr/bin/env python3
"""A small transformer with 512-wide heads trained three times from one seed: JSON on stdout, progress on stderr.

    python bench/training.py [--steps 300] [--device cuda] [--small] > bench/results/training_<card>.json

Three layers of two heads of 512, sequences of 512 tokens, batches of 8, float32 weights under autocast to bfloat16, AdamW. The
task: each sequence is an affine walk, x[t + 1] = (a x[t] + b) mod 61 with a and b of its own, which has to be found out from what
came before. Attention is causal, by attention_ext, by PyTorch's formula ("math") and by PyTorch's memory-efficient operator
("efficient").

Per implementation: the loss of every step and the milliseconds of a step, median, without the first ten. "distance" is the mean of
|loss - loss of math| over the steps. Training carries every rounding on, so two correct implementations drift apart: ours is to
differ from math by at most twice what PyTorch's efficient operator does.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from common import log
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_ext
from attention_ext._libraries import BUILD

__all__ = ["distances", "train"]

WORDS, SKIPPED = 61, 10  # SKIPPED: steps that are not timed
IMPLEMENTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "math": lambda: sdpa_kernel([SDPBackend.MATH]),
    "efficient": lambda: sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]),
    "attention_ext": nullcontext,
}


class Block(nn.Module):
    def __init__(self, heads: int, head_dim: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads, self.attend = heads, attend
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def walks(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """(batch, length + 1) words."""
    a, b, x = (torch.randint(1, WORDS, (batch,), generator=generator) for _ in range(3))
    words = [x]
    for _ in range(length):
        words.append((a * words[-1] + b) % WORDS)
    return torch.stack(words, 1)


def train(implementation: str, steps: int, device: torch.device, small: bool) -> dict[str, Any]:
    """Losses of all steps, and milliseconds of one."""
    heads, head_dim, length, batch = (2, 8, 16, 4) if small else (2, 512, 512, 8)
    torch.manual_seed(1)
    attend = torch.ops.attention_ext.sdpa if implementation == "attention_ext" else F.scaled_dot_product_attention
    width = heads * head_dim
    blocks = [Block(heads, head_dim, attend) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.LayerNorm(width), nn.Linear(width, WORDS)).to(device)
    places = nn.Parameter(torch.randn(length, width, device=device) * 0.02)
    optimiser = torch.optim.AdamW([*model.parameters(), places], lr=3e-4)
    generator = torch.Generator().manual_seed(2)
    batches = [walks(batch, length, generator).to(device) for _ in range(steps)]
    losses, times = [], []
    with IMPLEMENTATIONS[implementation]() if device.type == "cuda" else nullcontext():  # a CPU has one way
        for words in batches:
            begin = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                logits = model[1:](model[0](words[:, :-1]) + places)
            loss = F.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())  # waits for the device
            times.append((time.perf_counter() - begin) * 1e3)
    ms = statistics.median(times[SKIPPED:] or times)
    log(f"{implementation:14} loss {losses[0]:.3f} to {losses[-1]:.4f}, {ms:.2f} ms a step")
    return {"losses": losses, "ms_per_step": ms}


def distances(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Mean |loss - loss of math|, by implementation."""
    math = runs["math"]["losses"]
    others = [name for name in runs if name != "math"]
    return {name: statistics.fmean(abs(x - y) for x, y in zip(runs[name]["losses"], math, strict=True)) for name in others}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try whether everything runs")
    args = parser.parse_args()
    device = torch.device(args.device)
    runs = {name: train(name, args.steps, device, args.small) for name in IMPLEMENTATIONS}
    record = {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "torch": torch.__version__.partition("+")[0],
        "attention_ext": attention_ext.__version__,
        "csrc_tree": BUILD.csrc,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "small": args.small,
        "training": runs,
        "distance": distances(runs),
    }
    json.dump(record, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
