"""Few rows and many keys, which the fused kernels split in pieces: against float64, and bits alone and in a batch."""

from __future__ import annotations

import error_rule
import pytest
import reference
import torch
from helpers import HALVES, check_lse
from kernels import needs_the_card
from row_cases import KERNEL, MASKS, NAN, NEG_INF, WIDER, WIDEST, check, draw, forward, hidden, hold, kernel_for, padding, some
from torch import Tensor

pytestmark = pytest.mark.gpu
CLASSES = (*WIDEST, *WIDER)
DIMS = (*CLASSES, (8, 64), (64, 8), (72, 96), (136, 8), (136, 192), (200, 208), (264, 320), (8, 512), (400, 72))
DIMS += ((520, 1024), (904, 8))
# About the edges of pieces and blocks of every class, and each of their lengths; L, heads of query and key, S.
SIZES = [(1, (3, 3), 513), (1, (8, 2), 640), (2, (3, 3), 671), (16, (4, 4), 1023), (1, (8, 1), 4096), (5, (6, 2), 1345),
         (1, (64, 2), 4099), (64, (2, 2), 2048), (8, (16, 2), 2700), (1, (2, 2), 17000), (3, (8, 4), 5000)]  # fmt: skip


@pytest.fixture(autouse=True)
def hopper() -> None:
    needs_the_card(KERNEL)


def workspace(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> int:
    gqa, name = q.size(1) != k.size(1), kernel_for(q.size(-1), v.size(-1))
    return torch.ops.attention_ext.sdpa_plan(q, k, v, mask, 0.0, False, enable_gqa=gqa, kernel_name=name)[2]


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Bit for bit, NaN too."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_sizes(dims: tuple[int, int], poison_all: None) -> None:
    for number, (L, heads, S) in enumerate(SIZES):
        check(f"{L} x {S}, {heads}", lambda L=L, S=S, heads=heads, dtype=HALVES[number % 2]: draw(2, heads, L, S, dims, dtype))


@pytest.mark.parametrize("heads", [(3, 3), (8, 2)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dims", CLASSES, ids=str)
def test_masks(dims: tuple[int, int], kind: str, heads: tuple[int, int], poison_all: None) -> None:
    """Pieces of which nothing is shown, to some rows or to all, among them."""
    for number, (L, S) in enumerate([(1, 1024), (7, 2999), (13, 1600)]):

        def inputs(L: int = L, S: int = S, dtype: torch.dtype = HALVES[number % 2]) -> tuple[Tensor, ...]:
            return *draw(2, heads, L, S, dims, dtype), MASKS[kind](heads[0], L, S, dtype)

        check(f"{L} x {S}", inputs)


@pytest.mark.parametrize("dims", CLASSES, ids=str)
def test_nan_after_the_last_key(dims: tuple[int, int], poison_all: None) -> None:
    """Lengths about the edges of pieces: from some on, pieces have no key."""
    lengths, S = (0, 1, 80, 127, 128, 129, 255, 256, 257, 319, 320, 321, 336, 337, 384, 672, 1000, 1999, 2000, 3000, -3), 2000

    def trial() -> None:
        q, k, v = draw(len(lengths), (4, 2), 3, S, dims, torch.float16)
        given, seen = torch.tensor(lengths, dtype=torch.int32, device="cuda"), padding(S, *lengths)
        poisoned = (t.masked_fill(~seen.mT, NAN) for t in (k, v))
        hold("out", forward(q, *poisoned, key_lengths=given), q, k, v, seen, False)

    error_rule.settle(trial)


@pytest.mark.parametrize("dims", CLASSES, ids=str)
def test_dropout(dims: tuple[int, int]) -> None:
    def trial() -> None:
        L, S, p, heads = 3, 1500, 0.3, (6, 2)
        q, k, v = draw(2, heads, L, S, dims, torch.float16)
        keep = reference.dropout_keep_mask(77, p, 2 * heads[0], L, S, device="cuda").view(2, heads[0], L, S)
        (want, want_lse), (own, _) = (
            reference.attention(q, k, v, None, False, None, True, keep=keep, dropout_p=p, dtype=dtype, device="cuda")
            for dtype in (torch.float64, torch.float16)
        )
        out, lse = forward(q, k, v, None, False, torch.tensor([77], device="cuda"), p)
        error_rule.check_error("out", out, want, own)
        check_lse(lse, want_lse.cpu(), torch.float16)

    error_rule.settle(trial)


@pytest.mark.parametrize("kind", ["plain", "grouped", "mask", "key lengths"])
@pytest.mark.parametrize("dims", CLASSES, ids=str)
def test_bits_alone_and_in_a_batch(dims: tuple[int, int], kind: str, poison_all: None) -> None:
    """A batch row's bits are the same alone, in a batch, and where the workspace holds the pieces of a few heads at a time."""
    L, S, B = 2, 3000, 64
    q, k, v = draw(B, (8, 2) if kind == "grouped" else (4, 4), L, S, dims, torch.bfloat16)
    mask = hidden(some(L, S), L, S) if kind == "mask" else None
    lengths = torch.randint(0, S + 1, (B,), dtype=torch.int32, device="cuda") if kind == "key lengths" else None
    together = forward(q, k, v, mask, key_lengths=lengths)
    for row in (0, 31, 63):
        one = slice(row, row + 1)
        alone = forward(q[one], k[one], v[one], mask, key_lengths=None if lengths is None else lengths[one])
        assert same(alone, tuple(t[one] for t in together)), row
    first = slice(0, 4 if kind == "grouped" else 1)  # one group's
    one = workspace(q[:1, first], k[:1, :1], v[:1, :1], mask)
    for cap in (one, 5 * one + 7):
        assert same(forward(q, k, v, mask, key_lengths=lengths, workspace_bytes=cap), together)
    last = [t[-1:] for t in (*together, q, k, v)]
    if lengths is None:
        hold(kind, (last[0], last[1]), *last[2:], mask, False)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("E", [64, 128, 192, 256, 512, 768, 1024])
def test_bits_of_the_plans_choice(E: int, heads: tuple[int, int]) -> None:
    """The kernel that splits the keys is the same for one batch row and for 64."""
    q, k, v = draw(64, heads, 1, 2000, (E, E), torch.bfloat16)
    gqa = heads[0] != heads[1]
    together = torch.ops.attention_ext.sdpa_forward(q, k, v, None, None, 0.0, False, enable_gqa=gqa)
    alone = torch.ops.attention_ext.sdpa_forward(q[:1], k[:1], v[:1], None, None, 0.0, False, enable_gqa=gqa)
    assert same(alone, (together[0][:1], together[1][:1]))


@pytest.mark.parametrize("dims", CLASSES, ids=str)
def test_bits_are_the_same_again(dims: tuple[int, int]) -> None:
    q, k, v = draw(4, (16, 4), 1, 8000, dims, torch.bfloat16)
    first = forward(q, k, v)
    assert all(bool(t.isfinite().all()) for t in first)
    for _ in range(50):
        assert same(forward(q, k, v), first)


@pytest.mark.parametrize("dims", ((264, 264), (64, 64)), ids=str)
def test_very_many_keys(dims: tuple[int, int], poison_all: None) -> None:
    for S in (33_000, 70_000):
        check(f"{S}", lambda S=S: draw(1, (2, 2), 1, S, dims, torch.float16))


@pytest.mark.parametrize("dims", CLASSES, ids=str)
def test_one_key_head_is_read_once(dims: tuple[int, int]) -> None:
    """Its query heads are a group as those of more key heads are: the same bits, and what the pieces leave of one group."""
    q, k, v = draw(2, (8, 1), 2, 1500, dims, torch.bfloat16)
    twice = forward(q.repeat(1, 2, 1, 1), k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
    for few, more in zip(forward(q, k, v), twice, strict=True):
        assert torch.equal(few, more[:, :8]) and torch.equal(few, more[:, 8:])
    assert same(forward(q, k.expand(-1, 8, -1, -1), v.expand(-1, 8, -1, -1)), forward(q, k, v))
    assert 2 * workspace(q, k, v) == workspace(q.repeat(1, 2, 1, 1), k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)) > 0


@pytest.mark.parametrize("dims", ((64, 64), (512, 512), (768, 1024)), ids=str)
def test_what_is_not_finite(dims: tuple[int, int]) -> None:
    """A row of NaN, a key of NaN and scores of infinity show where they would over all keys at once; other rows do not change."""
    q, k, v = draw(1, (4, 4), 1, 2000, dims, torch.float16)
    clean = forward(q, k, v)
    q[0, 0], k[0, 1, 700, 3], v[0, 2, 1500, 5] = NAN, NAN, NAN
    out, lse = forward(q, k, v)
    assert bool(out[0, :2].isnan().all()) and bool(lse[0, :2].isnan().all())
    assert out[0, 2, 0].isnan().nonzero().flatten().tolist() == [5] and torch.equal(lse[0, 2:], clean[1][0, 2:])
    assert torch.equal(out[0, 3], clean[0][0, 3])


@pytest.mark.parametrize("dims", ((128, 128), (320, 512), (1024, 1024)), ids=str)
def test_without_room_keys_are_not_split(dims: tuple[int, int]) -> None:
    q, k, v = draw(2, (4, 4), 1, 2000, dims, torch.float16)
    hold("cap 0", forward(q, k, v, workspace_bytes=0), q, k, v, None, False)
    mask = torch.full((1, 2000), NEG_INF, device="cuda")
    out, lse = forward(q, k, v, mask)
    assert not bool(out.any()) and bool((lse == NEG_INF).all())
