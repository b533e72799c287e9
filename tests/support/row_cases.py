"""Inputs and masks by name for the kernels that run any head dims fused, and their results held to the error rule."""

from __future__ import annotations

from collections.abc import Callable

import error_rule
import reference
import torch
from helpers import check_lse, sdpa_forward, torch_own
from kernels import KERNELS
from torch import Tensor

KERNEL = next(kernel for kernel in KERNELS if kernel.name == "sm90_256")
WIDEST = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))  # (E, Ev) of each class of sm90_256
WIDER = ((384, 384), (512, 512), (768, 768), (1024, 1024))  # of sm90_512 and sm90_1024
CAP = 1 << 27  # workspace_bytes
NEG_INF, NAN = float("-inf"), float("nan")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def kernel_for(E: int, Ev: int) -> str:
    width = max(E, Ev)
    return "sm90_256" if width <= 256 else "sm90_512" if width <= 512 else "sm90_1024"


def draw(
    B: int, heads: tuple[int, int], L: int, S: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """query (B, Hq, L, E), key (B, Hk, S, E), value (B, Hk, S, Ev)."""
    (Hq, Hk), (E, Ev) = heads, dims
    return normal(B, Hq, L, E, dtype=dtype), normal(B, Hk, S, E, dtype=dtype), normal(B, Hk, S, Ev, dtype=dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, seed: Tensor | None = None,
    p: float = 0.0, key_lengths: Tensor | None = None, workspace_bytes: int = CAP,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse; heads of the query beyond those of the key are groups."""
    options = {
        "enable_gqa": q.size(1) != k.size(1),
        "key_lengths": key_lengths,
        "workspace_bytes": workspace_bytes,
        "kernel_name": kernel_for(q.size(-1), v.size(-1)),
    }
    return sdpa_forward(q, k, v, mask, seed, p, causal, **options)


def hold(name: str, got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> None:
    """The error rule, next to PyTorch's own."""
    gqa = q.size(1) != k.size(1)
    want, want_lse = reference.attention(q, k, v, mask, causal, None, gqa, device="cuda")
    own, _ = torch_own([q, k, v, mask], None, want, causal, None, gqa)
    error_rule.check_error(name, got[0], want, own)
    check_lse(got[1], want_lse.cpu(), q.dtype)
    assert bool((got[0][want_lse == NEG_INF] == 0).all()), f"{name}: rows that see no key are not 0"


def check(name: str, inputs: Callable[[], tuple[Tensor, ...]], causal: bool = False) -> None:
    """What `inputs` draws, query, key, value and perhaps a mask, is held to the rule."""

    def trial() -> None:
        q, k, v, *rest = inputs()
        mask = rest[0] if rest else None
        hold(name, forward(q, k, v, mask, causal), q, k, v, mask, causal)

    error_rule.settle(trial)


def some(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda") < 0.6


def hidden(mask: Tensor, L: int, S: int) -> Tensor:
    """The mask, False or -inf for whole blocks of 80 to 512 keys, for all rows and for some."""
    hides: float | bool = NEG_INF if mask.is_floating_point() else False
    mask[..., S // 8 : S // 2] = hides
    mask[..., : L // 2, S // 2 : S - S // 8] = hides
    mask[..., L - L // 4 :, : S // 8] = hides
    return mask


def band(L: int, S: int) -> Tensor:
    apart = torch.arange(L, device="cuda")[:, None] - torch.arange(S, device="cuda")
    return apart.abs() <= 90


def padding(S: int, *lengths: int) -> Tensor:
    """(B, 1, 1, S): of each batch row the first keys."""
    return torch.arange(S, device="cuda") < torch.tensor(lengths, device="cuda").view(-1, 1, 1, 1)


MASKS: dict[str, Callable[[int, int, int, torch.dtype], Tensor]] = {  # of heads, L, S, the query's dtype; two batch rows
    "bool": lambda H, L, S, dtype: some(L, S),
    "hidden blocks": lambda H, L, S, dtype: hidden(some(L, S), L, S),
    "a head's own": lambda H, L, S, dtype: hidden(some(2, H, L, S), L, S) & some(2, H, 1, 1),
    "band": lambda H, L, S, dtype: band(L, S),
    "all": lambda H, L, S, dtype: torch.ones(L, S, device="cuda", dtype=torch.bool),
    "all and some": lambda H, L, S, dtype: some(L, S) | (torch.arange(S, device="cuda") < S // 2),
    "nothing": lambda H, L, S, dtype: torch.zeros(L, S, device="cuda", dtype=torch.bool),
    "padding": lambda H, L, S, dtype: padding(S, S - 2, S // 3),
    "one row for all": lambda H, L, S, dtype: hidden(some(1, S), 1, S).expand(2, H, L, S),
    "by columns": lambda H, L, S, dtype: some(S, L).mT,
    "rows off 16 bytes": lambda H, L, S, dtype: hidden(some(L, S + 3), L, S)[:, 3:],
    "bias": lambda H, L, S, dtype: hidden(normal(L, S, dtype=dtype), L, S),
    "float32 bias": lambda H, L, S, dtype: hidden(normal(H, L, S), L, S),
    "bias of keys": lambda H, L, S, dtype: normal(2, 1, 1, S, dtype=dtype),
    "bias off 16 bytes": lambda H, L, S, dtype: normal(L, S + 1, dtype=dtype)[:, 1:],
    "float32 bias off 16 bytes": lambda H, L, S, dtype: normal(L, S + 1)[:, 1:],
}  # fmt: skip
