"""sm90_256 by name, against float64: every class of head dims, lengths about the edges of its tiles, masks, many tiles a CTA.

What every kernel is asked for, strides and gradients included, is in test_kernels.py and test_key_lengths.py.
"""

from __future__ import annotations

from collections.abc import Callable

import error_rule
import pytest
import reference
import torch
from helpers import HALVES, check_lse, sdpa_forward, torch_own
from kernels import KERNELS, needs_the_card
from torch import Tensor

pytestmark = pytest.mark.gpu
KERNEL = next(kernel for kernel in KERNELS if kernel.name == "sm90_256")
WIDEST = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))  # (E, Ev) of each class
DIMS = (*WIDEST, (8, 64), (64, 8), (72, 96), (16, 128), (136, 8), (136, 192), (8, 136), (200, 208), (256, 8))
EDGES = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193)
LENGTHS = [(L, EDGES[(i + apart) % len(EDGES)]) for i, L in enumerate(EDGES) for apart in (0, 3, 7)] + [(300, 500), (1000, 1024)]
NEG_INF, NAN = float("-inf"), float("nan")


@pytest.fixture(autouse=True)
def hopper() -> None:
    needs_the_card(KERNEL)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def draw(
    B: int, heads: tuple[int, int], L: int, S: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """query (B, Hq, L, E), key (B, Hk, S, E), value (B, Hk, S, Ev)."""
    (Hq, Hk), (E, Ev) = heads, dims
    return normal(B, Hq, L, E, dtype=dtype), normal(B, Hk, S, E, dtype=dtype), normal(B, Hk, S, Ev, dtype=dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, seed: Tensor | None = None,
    p: float = 0.0, key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse; heads of the query beyond those of the key are groups."""
    options = {"enable_gqa": q.size(1) != k.size(1), "key_lengths": key_lengths, "kernel_name": KERNEL.name}
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_lengths(dims: tuple[int, int], causal: bool, poison_all: None) -> None:
    for number, (L, S) in enumerate(LENGTHS):
        check(f"{L} x {S}", lambda L=L, S=S, dtype=HALVES[number % 2]: draw(2, (3, 3), L, S, dims, dtype), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [2, 6, 65, 128])
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_grouped(dims: tuple[int, int], group: int, causal: bool, poison_all: None) -> None:
    """Two key heads, whose query heads share tiles: a query's rows never lie in two."""
    for number, (L, S) in enumerate([(1, 300), (5, 77), (67, 257)]):
        check(f"{L} x {S}", lambda L=L, S=S, dtype=HALVES[number % 2]: draw(1, (2 * group, 2), L, S, dims, dtype), causal)


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


@pytest.mark.parametrize("heads", [(3, 3), (6, 2)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_masks(dims: tuple[int, int], kind: str, heads: tuple[int, int], poison_all: None) -> None:
    for number, (L, S) in enumerate([(300, 1024), (257, 999), (70, 133)]):

        def inputs(L: int = L, S: int = S, dtype: torch.dtype = HALVES[number % 2]) -> tuple[Tensor, ...]:
            return *draw(2, heads, L, S, dims, dtype), MASKS[kind](heads[0], L, S, dtype)

        check(f"{L} x {S}", inputs)


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "grouped, causal"])
@pytest.mark.parametrize("L", [256, 380])  # at head dim 64 rows of 128 and of 192
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_many_tiles(dims: tuple[int, int], L: int, kind: str, poison_all: None) -> None:
    """280 tiles and more, two or three for each of 132 SMs: bits of each head are those of few heads together, a CTA a tile."""
    causal, S = "causal" in kind, 600
    mask = hidden(some(L, S), L, S) if kind == "mask" else None
    q, k, v = draw(28, (5, 5) if kind != "grouped, causal" else (6, 2), L, S, dims, torch.bfloat16)
    together = forward(q, k, v, mask, causal)
    for first in range(0, 28, 4):
        few = slice(first, first + 4)
        alone = forward(q[few], k[few], v[few], mask, causal)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[few], other), f"batch rows from {first} on"
    last = [t[-1:] for t in (*together, q, k, v)]
    hold(kind, (last[0], last[1]), *last[2:], mask, causal)


def test_causal_in_sections() -> None:
    """150 heads are more than those whose tiles are taken together, longest first."""
    q, k, v = draw(5, (30, 30), 1024, 1024, (256, 256), torch.bfloat16)
    together = forward(q, k, v, causal=True)
    for row in range(5):
        alone = forward(*(t[row : row + 1] for t in (q, k, v)), causal=True)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[row : row + 1], other)
    last = [t[-1:, -2:] for t in (*together, q, k, v)]
    hold("the last heads", (last[0], last[1]), *last[2:], None, True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_nan_after_the_last_key(dims: tuple[int, int], causal: bool, poison_all: None) -> None:
    """Lengths about the edges of blocks of 80, 112 and 128 keys, none and more than there are among them."""
    lengths, S = (0, 1, 79, 80, 81, 111, 112, 113, 128, 129, 161, 257, 399, 400, 1000, -3), 400

    def trial() -> None:
        q, k, v = draw(len(lengths), (2, 2), 300, S, dims, torch.float16)
        given, seen = torch.tensor(lengths, dtype=torch.int32, device="cuda"), padding(S, *lengths)
        poisoned = (t.masked_fill(~seen.mT, NAN) for t in (k, v))
        got = forward(q, *poisoned, causal=causal, key_lengths=given)
        hold("out", got, q, k, v, seen & torch.ones(300, S, device="cuda", dtype=torch.bool).tril() if causal else seen, False)

    error_rule.settle(trial)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2)], ids=str)
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_dropout(dims: tuple[int, int], heads: tuple[int, int], causal: bool) -> None:
    def trial() -> None:
        L, S, p = 200, 333, 0.3
        q, k, v = draw(2, heads, L, S, dims, torch.float16)
        keep = reference.dropout_keep_mask(77, p, 2 * heads[0], L, S, device="cuda").view(2, heads[0], L, S)
        (want, want_lse), (own, _) = (
            reference.attention(
                q, k, v, None, causal, None, heads[0] != heads[1], keep=keep, dropout_p=p, dtype=dtype, device="cuda"
            )
            for dtype in (torch.float64, torch.float16)
        )
        out, lse = forward(q, k, v, None, causal, torch.tensor([77], device="cuda"), p)
        error_rule.check_error("out", out, want, own)
        check_lse(lse, want_lse.cpu(), torch.float16)

    error_rule.settle(trial)


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "dropout"])
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_bits_are_the_same_again(dims: tuple[int, int], kind: str) -> None:
    L, S = 380, 600
    q, k, v = draw(14, (10, 10), L, S, dims, torch.bfloat16)
    mask = hidden(some(L, S), L, S) if kind == "mask" else None
    dropout = {"seed": torch.tensor([5], device="cuda"), "p": 0.3} if kind == "dropout" else {}
    first = forward(q, k, v, mask, kind == "causal", **dropout)
    assert all(bool(t.isfinite().all()) for t in first) or kind == "mask"
    for _ in range(20):
        again = forward(q, k, v, mask, kind == "causal", **dropout)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
