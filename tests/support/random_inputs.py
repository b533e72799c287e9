"""The tensors of a random problem: each input a view into a larger buffer otherwise full of NaN (True for a boolean mask)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from random_cases import Case, Layout
from torch import Tensor

NEG_INF, NAN = float("-inf"), float("nan")
GUARD = 64  # elements of NaN before the first element of an input, a multiple of every alignment; as many and more after the last


@dataclass
class Placed:
    """A view, and the buffer it lies in as it was made, on the CPU."""

    view: Tensor
    buffer: Tensor
    before: Tensor

    @property
    def host(self) -> Tensor:
        """What the view showed at first, on the CPU."""
        return self.before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())

    def unchanged(self) -> bool:
        return torch.equal(self.buffer.view(torch.uint8).cpu(), self.before.view(torch.uint8))


def place(values: Tensor, layout: Layout, device: str) -> Placed:
    """The values in a buffer of their own, NaN everywhere else; along dims of stride 0 the first one counts."""
    shape = values.shape
    strides, span = layout.strides(shape)
    first = GUARD + layout.offset
    fill = True if values.dtype == torch.bool else NAN
    before = torch.full((first + span + 4 * GUARD,), fill, dtype=values.dtype)
    for d, zero in enumerate(layout.zero):
        values = values.narrow(d, 0, min(1, values.size(d))) if zero else values
    before.as_strided(values.shape, strides, first).copy_(values)
    buffer = before.to(device, copy=True, non_blocking=True)
    return Placed(buffer.as_strided(shape, strides, first), buffer, before)


def _mask_values(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """On which keys a row looks, by kind, and for a float mask what is added there."""
    S = case.mask[-1]
    share = {"few": 0.1, "all": 1.1, "none": -0.1}.get(case.mask_kind, 0.6)
    keep = torch.rand(case.mask, generator=generator) < share
    if case.mask_kind == "dead rows":
        keep &= torch.rand((*case.mask[:-1], 1), generator=generator) < 0.5
    elif case.mask_kind in ("late", "early"):  # whole tiles of keys are hidden, at the beginning or at the end
        late = torch.arange(S) >= (S * 3) // 4
        keep &= late if case.mask_kind == "late" else ~late
    elif case.mask_kind == "blocks":  # whole blocks of 64 queries by 128 keys are hidden
        L, counts = case.mask[-2], (-(-case.mask[-2] // 64), -(-S // 128))
        seen = torch.rand((*case.mask[:-2], *counts), generator=generator) < 0.5
        keep &= seen.repeat_interleave(64, -2)[..., :L, :].repeat_interleave(128, -1)[..., :S]
    if case.mask_dtype == "bool":
        return keep
    dtype = torch.float32 if case.mask_dtype == "float32" else dtype
    hidden = NEG_INF
    if case.mask_kind == "lowest" and dtype != torch.float16:  # -65504 leaves the scores standing, and the float32 sums rounded
        hidden = torch.finfo(dtype).min
    return torch.randn(case.mask, generator=generator).to(dtype).masked_fill(~keep, hidden)


def build(case: Case, device: str, draw: int = 0) -> tuple[list[Placed | None], Placed, Tensor]:
    """query, key, value and mask; grad_out; grad_lse (CPU, float32). draw: another one of the same kind."""
    generator = torch.Generator().manual_seed(case.seed + draw)
    dtype = getattr(torch, case.dtype)

    def values(shape: tuple[int, ...], spread: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * spread).to(dtype)

    placed: list[Placed | None] = [
        place(values(shape, case.spread if i == 0 else 1.0), layout, device)
        for i, (shape, layout) in enumerate(zip((case.query, case.key, case.value), case.layouts, strict=False))
    ]
    placed.append(None if case.mask is None else place(_mask_values(case, dtype, generator), case.layouts[3], device))
    grad_out = place(values((*case.scores[:-1], case.value[-1])), case.layouts[4], device)
    return placed, grad_out, torch.randn(case.scores[:-1], generator=generator)
