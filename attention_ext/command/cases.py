"""The calls of attention that the command is about: named ones, and sizes as they are given to --shape."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["CASES", "DTYPES", "FOR_A_CARD", "FOR_A_CPU", "SIZES", "Case", "dtype_name", "parse_shape", "three_calls"]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
SIZES = "B,Hq,Hk,L,S,E"
_MOST = 1 << 40  # elements of a tensor


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Case:
    """query (B, Hq, L, E), key (B, Hk, S, E), value (B, Hk, S, Ev), Ev = E where 0. what: for whom it stands."""

    name: str
    B: int
    Hq: int
    Hk: int
    L: int
    S: int
    E: int
    dtype: torch.dtype
    causal: bool = False
    Ev: int = 0
    what: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "Ev", self.Ev or self.E)

    def with_options(self, dtype: torch.dtype | None, causal: bool) -> "Case":
        """In another dtype, if one is given, and causal, if it is to be."""
        return replace(self, dtype=dtype or self.dtype, causal=self.causal or causal)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key and value."""
        return (self.B, self.Hq, self.L, self.E), (self.B, self.Hk, self.S, self.E), (self.B, self.Hk, self.S, self.Ev)

    @property
    def nbytes(self) -> int:
        """Of query, key and value."""
        return self.dtype.itemsize * sum(map(math.prod, self.shapes))

    @property
    def scores(self) -> int:
        return self.B * self.Hq * self.L * self.S

    def flop(self, backward: bool) -> float:
        """Of the forward's two products, with the backward's five of all seven; half of it when causal."""
        widths = 4 * self.E + 3 * self.Ev if backward else self.E + self.Ev
        return 2.0 * self.scores * widths * (0.5 if self.causal else 1.0)

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value from N(0, 1), the same for every run."""
        generator = torch.Generator(device).manual_seed(seed)
        q, k, v = (torch.randn(shape, device=device, dtype=self.dtype, generator=generator) for shape in self.shapes)
        return q, k, v

    @property
    def options(self) -> dict[str, Any]:
        """Those keyword arguments of the call that are not the default."""
        found = {"is_causal": self.causal, "enable_gqa": self.Hq != self.Hk}
        return {name: True for name, wanted in found.items() if wanted}

    @property
    def record(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("B", "Hq", "Hk", "L", "S", "E", "Ev")}
        return {"name": self.name, **sizes, "dtype": dtype_name(self.dtype), "causal": self.causal}

    @staticmethod
    def of_record(record: dict[str, Any]) -> "Case":
        names = ("name", "B", "Hq", "Hk", "L", "S", "E", "causal", "Ev")
        return Case(**{name: record[name] for name in names}, dtype=DTYPES[record["dtype"]])

    def __str__(self) -> str:
        query, key, value = self.shapes
        others = f"key and value {key}" if key == value else f"key {key}, value {value}"
        return f"query {query}, {others}, {dtype_name(self.dtype)}{', causal' * self.causal}"


FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

# Each has the sizes of the case of the same name in bench/cases.py, so that a figure may be held next to the records.
_NAMED = [
    Case("vae1024", 1, 1, 1, 16384, 16384, 512, FP16, what="one head, as in a VAE: head dim 512"),
    Case("g512c", 1, 32, 32, 8192, 8192, 512, BF16, causal=True, what="causal, head dim 512"),
    Case("g512cgqa", 1, 32, 4, 8192, 8192, 512, BF16, causal=True, what="grouped heads, causal, head dim 512"),
    Case("kb97", 32, 32, 32, 512, 512, 1024, FP16, what="KernelBench 1/97: head dim 1024"),
    Case("d768", 1, 16, 16, 4096, 4096, 768, BF16, what="head dim 768"),
    Case("d384", 1, 32, 32, 8192, 8192, 384, BF16, what="head dim 384"),
    Case("d256", 1, 16, 16, 8192, 8192, 256, BF16, what="head dim 256"),
    Case("d128c", 2, 32, 8, 8192, 8192, 128, BF16, causal=True, what="grouped heads, causal, head dim 128"),
    Case("d64", 4, 16, 16, 4096, 4096, 64, FP16, what="head dim 64"),
    Case("dec512", 8, 32, 4, 1, 8192, 512, BF16, what="decoding: one query, head dim 512"),
    Case("dec128", 32, 32, 8, 1, 8192, 128, BF16, what="decoding: one query, head dim 128"),
    Case("vae1024_f32", 1, 1, 1, 16384, 16384, 512, FP32, what="one head in float32, head dim 512"),
    Case("d64_f32", 4, 16, 16, 2048, 2048, 64, FP32, what="float32, head dim 64"),
    Case("small_f32", 1, 2, 2, 256, 256, 128, FP32, what="small, for a CPU"),
    Case("small_bf16_causal", 1, 2, 2, 256, 256, 128, BF16, causal=True, what="small, for a CPU"),
    Case("small_gqa", 1, 4, 2, 128, 128, 64, FP32, what="small, for a CPU"),
]
CASES = {case.name: case for case in _NAMED}
FOR_A_CPU = [name for name, case in CASES.items() if "for a CPU" in case.what]
FOR_A_CARD = [name for name in CASES if name not in FOR_A_CPU]


def parse_shape(text: str) -> tuple[int, ...]:
    """B, Hq, Hk, L, S, E and Ev of "B,Hq,Hk,L,S,E" or "B,Hq,Hk,L,S,E,Ev"; ValueError with a sentence."""
    parts = text.replace(" ", "").split(",")
    if len(parts) not in (6, 7):
        raise ValueError(f"expected six sizes {SIZES}, or seven with Ev, got {len(parts)} in '{text}'")
    wrong = [part for part in parts if not part.isdecimal() or int(part) < 1]
    if wrong:
        raise ValueError(f"expected positive numbers {SIZES}, got '{wrong[0]}' in '{text}'")
    sizes = tuple(map(int, parts))
    Hq, Hk = sizes[1:3]
    if Hq % Hk:
        raise ValueError(f"expected Hk (key heads) to divide Hq (query heads), got Hq = {Hq} and Hk = {Hk} in '{text}'")
    B, _, _, L, S, *widths = sizes
    if B * Hq * max(L, S) * max(widths) >= _MOST:
        raise ValueError(f"expected tensors of fewer than 2^40 elements, got '{text}'")
    return sizes if len(sizes) == 7 else (*sizes, sizes[-1])


def three_calls(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What a person writes: q k^T, a softmax and a product with v, all scores in memory, in the operands' dtype.

    The query heads of a key head are rows of one product, so that neither key nor value is repeated. The mask of a causal call is
    made by the first call and hides scores in place.
    """
    group = case.Hq // case.Hk
    hidden: list[Tensor] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.causal and not hidden:
            hidden.append(torch.ones(case.L, case.S, dtype=torch.bool, device=q.device).triu(1))
        x = (q.reshape(case.B, case.Hk, group * case.L, case.E) * case.E**-0.5) @ k.mT
        for mask in hidden:
            x.view(case.B, case.Hk, group, case.L, case.S).masked_fill_(mask, -math.inf)
        return (torch.softmax(x, -1) @ v).view(case.B, case.Hq, case.L, case.Ev)

    return call
