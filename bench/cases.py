"""The problems that are timed, by name: KernelBench's, those of the models that need large head dims, and the usual small ones."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["BACKWARD", "BIAS_GRADIENTS", "BOOL_MASKS", "CASES", "MASKS", "MOST_BACK_END", "SETS", "SMALL", "Case", "choose"]

MASKS = {
    "pad": "bool (B, 1, 1, S): a tail of each sequence's keys is hidden",
    "keep": "bool (1, 1, L, S): seven of ten positions take part",
    "band": "bool (B, 1, L, S): keys within an eighth of S beside the diagonal",
    "bias": "query's dtype (B, 1, L, S)",
    "keybias": "query's dtype (1, 1, 1, S)",
    "headbias": "query's dtype (1, Hq, L, S)",
}
MOST_BACK_END = 256  # head dim up to which sdpa may run PyTorch's back ends
FUSED = ("torch_flash", "torch_cudnn")  # PyTorch's fastest back ends, of half precision up to that head dim: names of common.py
BOOL_MASKS = [name for name, what in MASKS.items() if what.startswith("bool")]


@dataclass(frozen=True)
class Case:
    """query (B, Hq, L, E), key (B, Hk, S, E), value (B, Hk, S, Ev), mask one of MASKS. cold_l2: L2 is overwritten before a call."""

    name: str
    B: int
    Hq: int
    Hk: int
    L: int
    S: int
    E: int
    dtype: torch.dtype
    causal: bool = False
    Ev: int = 0  # E where 0
    mask: str | None = None
    cold_l2: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "Ev", self.Ev or self.E)

    @property
    def flop(self) -> float:
        """2 B Hq L S (E + Ev), half of it when causal."""
        return 2.0 * self.B * self.Hq * self.L * self.S * (self.E + self.Ev) * (0.5 if self.causal else 1.0)

    @property
    def fused_back_ends(self) -> tuple[str, ...]:
        """Those of FUSED that may take the case."""
        return FUSED if self.dtype != torch.float32 and self.E <= MOST_BACK_END else ()

    @property
    def scores(self) -> int:
        """How many scores there are: B Hq L S."""
        return self.B * self.Hq * self.L * self.S

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """N(0, 1), the same for every run."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = ((self.B, self.Hq, self.L, self.E), (self.B, self.Hk, self.S, self.E), (self.B, self.Hk, self.S, self.Ev))
        q, k, v = (torch.randn(s, device=device, dtype=self.dtype, generator=generator) for s in shapes)
        return q, k, v

    def attn_mask(self, device: str) -> Tensor | None:
        """The mask, the same for every run; every row sees key 0."""
        generator = torch.Generator(device).manual_seed(1)
        sizes = {"bias": (self.B, 1, self.L, self.S), "keybias": (1, 1, 1, self.S), "headbias": (1, self.Hq, self.L, self.S)}
        if self.mask is None:
            return None
        if self.mask in sizes:
            return torch.randn(sizes[self.mask], device=device, dtype=self.dtype, generator=generator)
        keys = torch.arange(self.S, device=device)
        if self.mask == "pad":
            lengths = self.S - torch.arange(1, self.B + 1, device=device) * self.S // (2 * self.B)
            return (keys < lengths[:, None])[:, None, None, :]
        if self.mask == "keep":
            keep = torch.rand(1, 1, self.L, self.S, device=device, generator=generator) < 0.7
        else:
            centre = torch.arange(self.L, device=device)[:, None] * self.S // self.L
            keep = ((keys - centre).abs() <= self.S // 8).expand(self.B, 1, self.L, self.S).contiguous()
        keep[..., 0] = True
        return keep

    def options(self, device: str) -> dict[str, Any]:
        """The keyword arguments of the call."""
        return {"attn_mask": self.attn_mask(device), "is_causal": self.causal, "enable_gqa": self.Hk != self.Hq}


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = [
    Case("kb97", 32, 32, 32, 512, 512, 1024, FP16),
    Case("d1024", 1, 16, 16, 4096, 4096, 1024, BF16),
    Case("d896", 1, 16, 16, 4096, 4096, 896, BF16),
    Case("d768", 1, 16, 16, 4096, 4096, 768, BF16),
    Case("d640", 1, 16, 16, 4096, 4096, 640, BF16),
    Case("d576", 1, 16, 16, 4096, 4096, 576, BF16),
    Case("g512", 1, 32, 32, 8192, 8192, 512, BF16),
    Case("g512c", 1, 32, 32, 8192, 8192, 512, BF16, causal=True),
    Case("g512cgqa", 1, 32, 4, 8192, 8192, 512, BF16, causal=True),
    Case("d384", 1, 32, 32, 8192, 8192, 384, BF16),
    Case("vae1024", 1, 1, 1, 16384, 16384, 512, FP16),
    Case("vae512", 1, 1, 1, 4096, 4096, 512, FP16),
    Case("vae1024_f32", 1, 1, 1, 16384, 16384, 512, FP32),
    Case("kb97_f32", 8, 32, 32, 512, 512, 1024, FP32),
    Case("kb97_f32_b32", 32, 32, 32, 512, 512, 1024, FP32),
    Case("d128_f32", 4, 16, 16, 2048, 2048, 128, FP32),
    Case("d64_f32", 4, 16, 16, 2048, 2048, 64, FP32),
    Case("d256", 1, 16, 16, 8192, 8192, 256, BF16),
    Case("d256c", 1, 16, 16, 8192, 8192, 256, BF16, causal=True),
    Case("d192", 1, 16, 16, 8192, 8192, 192, BF16),
    Case("d192v128", 1, 16, 16, 8192, 8192, 192, BF16, Ev=128),
    Case("d128c", 2, 32, 8, 8192, 8192, 128, BF16, causal=True),
    Case("d128c_mha", 2, 16, 16, 8192, 8192, 128, BF16, causal=True),
    Case("d128", 2, 16, 16, 8192, 8192, 128, BF16),
    Case("d64", 4, 16, 16, 4096, 4096, 64, FP16),
    Case("dec512", 8, 32, 4, 1, 8192, 512, BF16, cold_l2=True),
    Case("dec128", 32, 32, 8, 1, 8192, 128, BF16, cold_l2=True),
]

BACKWARD = (
    "kb97", "d1024", "d768", "g512", "g512c", "g512cgqa", "d384", "vae1024",
    "d256c", "d192v128", "d128c", "d128c_mha", "d128", "d64", "kb97_f32", "d128_f32", "d64_f32",
)  # fmt: skip

# Timed in the backward alone, with the gradient of the bias.
BIAS_GRADIENTS = [Case(f"biasgrad{E}", 4, 16, 16, 2048, 2048, E, BF16, mask="headbias") for E in (320, 512, 768, 1024)]

SETS = {
    "class1024": [case.name for case in CASES if 512 < case.E <= 1024 and case.dtype != FP32],
    "class512": [case.name for case in CASES if 256 < case.E <= 512 and case.dtype != FP32 and not case.cold_l2],
    "class256": [case.name for case in CASES if case.E <= 256 and case.dtype != FP32 and not case.cold_l2],
    "float32": [case.name for case in CASES if case.dtype == FP32],
    "decode": [case.name for case in CASES if case.cold_l2],
    "biasgrad": [case.name for case in BIAS_GRADIENTS],
}

SMALL = [
    Case("small_f32", 1, 2, 2, 256, 256, 128, FP32),
    Case("small_bf16_causal", 1, 2, 2, 256, 256, 128, BF16, causal=True),
    Case("small_gqa", 1, 4, 2, 128, 128, 64, FP32),
    Case("tiny", 1, 1, 1, 4, 4, 8, FP32),
]


def choose(names: list[str]) -> list[Case]:
    """The cases of these names and sets, in the order of CASES and BIAS_GRADIENTS."""
    wanted = {name for given in names for name in SETS.get(given, [given])}
    known = [*CASES, *BIAS_GRADIENTS]
    unknown = wanted - {case.name for case in known}
    if unknown:
        raise SystemExit(f"no case or set is called {', '.join(sorted(unknown))}; the sets are {', '.join(SETS)}")
    return [case for case in known if case.name in wanted]
