"""The problems that are timed, by name: KernelBench's and those of the models that need large head dims."""

from dataclasses import dataclass

import torch

__all__ = ["CASES", "SMALL", "Case"]


@dataclass(frozen=True)
class Case:
    """q (B, Hq, L, E), k and v (B, Hk, S, E)."""

    name: str
    B: int
    Hq: int
    Hk: int
    L: int
    S: int
    E: int
    dtype: torch.dtype
    causal: bool = False

    @property
    def flop(self) -> float:
        """4 B Hq L S E, half of it when causal."""
        return 4.0 * self.B * self.Hq * self.L * self.S * self.E * (0.5 if self.causal else 1.0)

    def inputs(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """N(0, 1), the same for every run."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = ((self.B, self.Hq, self.L, self.E), (self.B, self.Hk, self.S, self.E), (self.B, self.Hk, self.S, self.E))
        q, k, v = (torch.randn(s, device=device, dtype=self.dtype, generator=generator) for s in shapes)
        return q, k, v


CASES = [
    Case("kb97", 32, 32, 32, 512, 512, 1024, torch.float16),
    Case("d1024", 1, 16, 16, 4096, 4096, 1024, torch.bfloat16),
    Case("g512", 1, 32, 32, 8192, 8192, 512, torch.bfloat16),
    Case("g512c", 1, 32, 32, 8192, 8192, 512, torch.bfloat16, causal=True),
    Case("g512cgqa", 1, 32, 4, 8192, 8192, 512, torch.bfloat16, causal=True),
    Case("d384", 1, 32, 32, 8192, 8192, 384, torch.bfloat16),
    Case("vae1024", 1, 1, 1, 16384, 16384, 512, torch.float16),
    Case("vae1024_f32", 1, 1, 1, 16384, 16384, 512, torch.float32),
    Case("kb97_f32", 8, 32, 32, 512, 512, 1024, torch.float32),
]

SMALL = [
    Case("small_f32", 1, 2, 2, 256, 256, 128, torch.float32),
    Case("small_bf16_causal", 1, 2, 2, 256, 256, 128, torch.bfloat16, causal=True),
    Case("small_gqa", 1, 4, 2, 128, 128, 64, torch.float32),
    Case("tiny", 1, 1, 1, 4, 4, 8, torch.float32),
]
