"""KernelBench level 1 problem 97, scaled dot-product attention, as a ModelNew: same inputs and interface as the benchmark's Model.

    python examples/kernelbench/level1_problem97.py [float16 | float32]

The problem was first published with float16 inputs; its harness now casts everything to float32 by default. Both run here.
"""

import sys

import torch
import torch.nn as nn

import attention_ext

batch_size = 32
num_heads = 32
sequence_length = 512
embedding_dimension = 1024


class ModelNew(nn.Module):
    """Q, K, V of (batch_size, num_heads, sequence_length, embedding_dimension) -> the same shape."""

    def forward(self, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
        return attention_ext.sdpa(Q, K, V)


def get_inputs(dtype: torch.dtype = torch.float16, device: str | None = None) -> list[torch.Tensor]:
    """Uniform in [0, 1), as the benchmark draws them; on a CPU a batch of 1."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    batch = batch_size if device == "cuda" else 1
    shape = (batch, num_heads, sequence_length, embedding_dimension)
    return [torch.rand(*shape, device=device, dtype=dtype) for _ in range(3)]


def get_init_inputs() -> list[object]:
    return []


if __name__ == "__main__":
    dtype = getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "float16")
    inputs = get_inputs(dtype)
    with torch.no_grad():
        out = ModelNew(*get_init_inputs())(*inputs)
        want = torch.nn.functional.scaled_dot_product_attention(*inputs)
    print(f"{attention_ext.explain(*inputs)}\nlargest difference from PyTorch's: {(out - want).abs().max().item():.2e}")
