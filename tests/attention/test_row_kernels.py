"""sm90_256 by name, against float64: every class of head dims, lengths about the edges of its tiles, masks, many tiles a CTA.

What every kernel is asked for, strides and gradients included, is in test_kernels.py and test_key_lengths.py.
"""

from __future__ import annotations

import error_rule
import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import HALVES, check_lse
from kernels import needs_the_card
from row_cases import KERNEL, MASKS, NAN, NEG_INF, WIDEST, check, draw, forward, hidden, hold, normal, padding, some
from torch import Tensor

pytestmark = pytest.mark.gpu
DIMS = (*WIDEST, (8, 64), (64, 8), (72, 96), (16, 128), (136, 8), (136, 192), (8, 136), (200, 208), (256, 8))
EDGES = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193)
LENGTHS = [(L, EDGES[(i + apart) % len(EDGES)]) for i, L in enumerate(EDGES) for apart in (0, 3, 7)] + [(300, 500), (1000, 1024)]


@pytest.fixture(autouse=True)
def hopper() -> None:
    needs_the_card(KERNEL)


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


@pytest.mark.parametrize("heads", [(3, 3), (6, 2)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_masks(dims: tuple[int, int], kind: str, heads: tuple[int, int], poison_all: None) -> None:
    for number, (L, S) in enumerate([(300, 1024), (257, 999), (70, 133)]):

        def inputs(L: int = L, S: int = S, dtype: torch.dtype = HALVES[number % 2]) -> tuple[Tensor, ...]:
            return *draw(2, heads, L, S, dims, dtype), MASKS[kind](heads[0], L, S, dtype)

        check(f"{L} x {S}", inputs)


@pytest.mark.parametrize("heads", [(3, 3), (6, 2)], ids=str)
@pytest.mark.parametrize("S", [8, 128, 1000])
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_bias_in_any_layout(dims: tuple[int, int], S: int, heads: tuple[int, int], poison_all: None) -> None:
    """Rows on 16-byte boundaries are read ahead, others by elements, from the same numbers to the same bits."""
    L, (H, _) = 300, heads
    for dtype in HALVES:
        lengths = torch.tensor((S, S - 3), dtype=torch.int32, device="cuda")
        q, k, v = draw(2, heads, L, S, dims, dtype)
        bias = hidden(normal(2, H, L, S, dtype=dtype), L, S)
        bias[:, :, 65] = NEG_INF
        bias[1, ..., S - 3 :] = NAN  # after the batch row's last key
        layouts = {
            "off 16 bytes": F.pad(bias, (1, 0))[..., 1:],
            "by columns": bias.mT.contiguous().mT,
            "wider rows": F.pad(bias, (0, 5))[..., :S],
            "float32": bias.float(),
        }
        first = forward(q, k, v, bias, key_lengths=lengths)
        assert bool((first[0][:, :, 65] == 0).all()) and bool(first[0].isfinite().all())
        for name, layout in layouts.items():
            other = forward(q, k, v, layout, key_lengths=lengths)
            assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True)), name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("group", [2, 5, 33, 65, 128])
@pytest.mark.parametrize("dims", (*WIDEST, (72, 96)), ids=str)
def test_bias_of_groups(dims: tuple[int, int], group: int, dtype: torch.dtype, poison_all: None) -> None:
    """Query heads of a tile have rows of the bias of their own, or share them, and so do queries."""
    H, L, S = 2 * group, 37, 264
    for shape in [(H, L, S), (L, S), (H, 1, S), (2, H, 1, S), (2, 1, L, S), (1, S)]:

        def inputs(shape: tuple[int, ...] = shape) -> tuple[Tensor, ...]:
            return *draw(2, (H, 2), L, S, dims, dtype), normal(*shape, dtype=dtype)

        check(f"{shape}", inputs)


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bias", "grouped, causal"])
@pytest.mark.parametrize("L", [256, 380])  # at head dim 64 rows of 128 and of 192
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_many_tiles(dims: tuple[int, int], L: int, kind: str, poison_all: None) -> None:
    """280 tiles and more, two or three for each of 132 SMs: bits of each head are those of few heads together, a CTA a tile."""
    causal, S = "causal" in kind, 600
    mask = hidden(some(L, S), L, S) if kind == "mask" else None
    if kind == "bias":  # of each head: batch rows that share one are worked on together
        mask = hidden(normal(5, L, S, dtype=torch.bfloat16), L, S)
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


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bias", "dropout"])
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_bits_are_the_same_again(dims: tuple[int, int], kind: str) -> None:
    L, S = 380, 600
    q, k, v = draw(14, (10, 10), L, S, dims, torch.bfloat16)
    mask = hidden(some(L, S), L, S) if kind == "mask" else None
    if kind == "bias":
        mask = hidden(normal(10, L, S, dtype=torch.bfloat16), L, S)
    dropout = {"seed": torch.tensor([5], device="cuda"), "p": 0.3} if kind == "dropout" else {}
    first = forward(q, k, v, mask, kind == "causal", **dropout)
    assert all(bool(t.isfinite().all()) for t in first) or mask is not None
    for _ in range(20):
        again = forward(q, k, v, mask, kind == "causal", **dropout)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
