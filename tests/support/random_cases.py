"""Random problems for the operators: drawn from a plain random.Random, described by a dataclass whose repr makes them again."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kernels import Kernel

EDGES = (15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 127, 128, 129)
BLOCK_EDGES = (127, 128, 129, 192, 255, 256, 257, 384, 385, 511, 512, 513)  # about blocks of 128 keys
BANDS = ((1, 64), (65, 256), (257, 512), (513, 1100))  # of head dims
LARGEST = 1 << 20  # elements of one operand with such head dims


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its buffer. order: its dims, slowest first. steps, pads: per dim, every n-th element is its own, and
    so many are left free behind it. zero: dims of stride 0. offset: elements before the first, beyond the guard."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    zero: tuple[bool, ...]
    offset: int

    def strides(self, shape: Sequence[int]) -> tuple[list[int], int]:
        """Strides, and elements from the first one to the end."""
        strides, span = [0] * len(shape), 1
        for d in reversed(self.order):
            if not self.zero[d]:
                strides[d] = span * self.steps[d]
                span = strides[d] * max(shape[d], 1) + self.pads[d]
        return strides, span


@dataclass(frozen=True)
class Case:
    """One call. op: "sdpa", "sdpa_with_lse", "sdpa_forward", or the name of a kernel that is forced. layouts: of query, key,
    value, attn_mask and grad_out. needs: which of the first four require grad; none: no backward pass."""

    seed: int
    op: str
    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None
    mask_dtype: str
    mask_kind: str
    layouts: tuple[Layout, ...]
    causal: bool
    scale: float | None
    gqa: bool
    dropout_p: float
    spread: float
    needs: tuple[bool, bool, bool, bool]
    grad_lse: bool

    @property
    def scores(self) -> tuple[int, ...]:
        tail = 3 if self.gqa else 2
        lead = torch.broadcast_shapes(self.query[:-tail], self.key[:-tail], self.value[:-tail])
        return (*lead, *self.query[-tail:-1], self.key[-2])


def _length(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.5:
        return rng.randint(2, 20)
    if kind < 0.75:
        return rng.choice(EDGES)
    if kind < 0.88:
        return rng.randint(21, 300)
    return 1 if kind < 0.97 else 0


def _head_dim(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.45:
        return rng.randint(2, 40)
    if kind < 0.7:
        return rng.choice((8, 16, 24, 32, 48, 64, 72, 96, 128))
    if kind < 0.9:
        return rng.randint(41, 300)
    return 1 if kind < 0.95 else rng.randint(301, 1030) if kind < 0.98 else 0


def _head_dims(rng: random.Random, kernel: Kernel | None, dtype: str) -> tuple[int, int]:
    """E and Ev. kernel: takes them; of the bands of sizes within its own each is as likely, the last one twice."""
    E = _head_dim(rng)
    Ev = E if rng.random() < 0.5 else _head_dim(rng)
    if kernel is None or kernel.takes_everything:
        return E, Ev
    multiple = 16 // getattr(torch, dtype).itemsize if kernel.aligned else 1
    bands = [(max(low, kernel.head_dims[0]), min(high, kernel.head_dims[1])) for low, high in BANDS]
    bands = [(low, high) for low, high in bands if -(-low // multiple) <= high // multiple]
    low, high = rng.choice([*bands, bands[-1]])
    wide = rng.randint(-(-low // multiple), high // multiple) * multiple
    other = min(max(1, -(-Ev // multiple)) * multiple, wide)
    return (wide, other) if rng.random() < 0.3 else (other, wide) if rng.random() < 0.4 else (wide, wide)


def _block_lengths(rng: random.Random) -> tuple[int, int]:
    """L and S of several blocks of keys, often with few queries."""
    kind = rng.random()
    S = max(1, _length(rng)) if kind < 0.15 else rng.choice(BLOCK_EDGES) if kind < 0.5 else rng.randint(129, 700)
    kind = rng.random()
    L = rng.randint(1, 20) if kind < 0.5 else rng.choice((*EDGES, *BLOCK_EDGES)) if kind < 0.75 else rng.randint(21, 300)
    return L, S


def _aligned_layout(rng: random.Random, shape: tuple[int, ...], multiple: int) -> Layout:
    """Columns adjacent, every row at a multiple of so many elements."""
    rank, kind = len(shape), rng.random()
    order, steps, pads, zero = list(range(rank)), [1] * rank, [0] * rank, [False] * rank
    if kind > 0.4 and rank > 2:
        order[-3], order[-2] = order[-2], order[-3]
    if kind > 0.7:
        order[:-1] = rng.sample(order[:-1], rank - 1)
        for d in range(rank):
            if rng.random() < 0.4:
                pads[d] = multiple * rng.choice((1, 2, 3, 8))
            if d < rank - 1 and rng.random() < 0.1:
                steps[d] = rng.choice((2, 3))
            if d < rank - 2 and rng.random() < 0.1:
                zero[d] = True
    offset = multiple * rng.choice((0, 0, 1, 3)) if kind > 0.4 else 0
    return Layout(tuple(order), tuple(steps), tuple(pads), tuple(zero), offset)


def _layout(rng: random.Random, shape: tuple[int, ...]) -> Layout:
    rank, kind = len(shape), rng.random()
    order, ones, none = list(range(rank)), (1,) * rank, (0,) * rank
    never = (False,) * rank
    if kind < 0.35:
        return Layout(tuple(order), ones, none, never, 0)
    if kind < 0.55 and rank > 2:
        order[-3], order[-2] = order[-2], order[-3]
        return Layout(tuple(order), ones, none, never, rng.choice((0, 0, 8)))
    if kind > 0.75:
        rng.shuffle(order)
    steps, pads, zero = list(ones), list(none), list(never)
    if rng.random() < 0.4:
        steps[rng.randrange(rank)] = rng.choice((2, 3))
    for d in range(rank):
        if rng.random() < 0.3:
            pads[d] = rng.choice((1, 3, 8, 16))
        if rng.random() < 0.08:
            zero[d] = True
    return Layout(tuple(order), tuple(steps), tuple(pads), tuple(zero), rng.choice((0, 0, 1, 2, 3, 4, 7, 8)))


def _shapes(rng: random.Random, forced: bool, aim: Kernel | None, dtype: str) -> tuple[list[tuple[int, ...]], bool]:
    """Shapes of query, key and value, and whether heads are grouped. Leading dims broadcast where no kernel is forced.

    aim: a kernel that takes few problems; sizes are such that it mostly takes this one, and has several blocks of keys.
    """
    (E, Ev), L = _head_dims(rng, aim, dtype), _length(rng)
    S = L if rng.random() < 0.25 else _length(rng)
    if aim is not None:
        L, S = _block_lengths(rng)
    rank = rng.choice((4, 4, 4, 3, 5, 2))
    batch = tuple(0 if rng.random() < 0.01 else rng.randint(1, 3 if aim is None else 2) for _ in range(rank - 3))
    gqa = rank > 2 and rng.random() < (0.3 if aim is None else 0.45)
    heads = [(rng.randint(1, 4 if aim is None else 2),)] * 3 if rank > 2 else [()] * 3
    if gqa:
        hq = rng.choice((1, 2, 4, 6, 8, 12))
        divisors = [n for n in range(1, hq + 1) if hq % n == 0]
        hk = rng.choice(divisors)
        same = 0.7 if aim is None or aim.value_heads else 0.95
        heads = [(hq,), (hk,), (hk if rng.random() < same else rng.choice(divisors),)]
    leads = [(*batch, *h) for h in heads]
    if not forced and rng.random() < 0.15:
        end = len(batch) if gqa else len(leads[0])
        for i in range(3):
            leads[i] = (*(1 if rng.random() < 0.3 else n for n in leads[i][:end]), *leads[i][end:])
            if i and rng.random() < 0.2:
                leads[i] = leads[i][rng.randint(0, end) :]
    count = max(1, math.prod(torch.broadcast_shapes(*(lead[: -1 if gqa else None] for lead in leads)))) * (
        heads[0][0] if gqa else 1
    )
    most, width = 1 << (25 if rng.random() < 0.02 else 23 if aim is None else 24), max(E, Ev, 1)
    while count * L * S * width > most:
        L, S = (L // 2, S) if L >= S else (L, S // 2)
    if aim is not None:
        L = min(L, max(1, LARGEST // (width * max(1, math.prod(leads[0])))))
        S = min(S, max(1, LARGEST // (width * max(1, *(math.prod(lead) for lead in leads[1:])))))
    return [(*leads[0], L, E), (*leads[1], S, E), (*leads[2], S, Ev)], gqa


def draw_case(rng: random.Random, forced: Sequence[Kernel] = ()) -> Case:
    """A problem, from nothing but the numbers of `rng`. forced: the kernels that may be asked for by name."""
    kind = rng.random()
    op = "sdpa" if kind < 0.45 else "sdpa_with_lse" if kind < 0.6 else "sdpa_forward"
    kernel = rng.choice(list(forced)) if forced and kind > 0.7 else None
    dtype = rng.choice(("float32", "float32", "float16", "bfloat16", "float64"))
    if kernel is not None:
        allowed = {str(d).removeprefix("torch.") for d in kernel.dtypes}
        op, dtype = kernel.name, dtype if dtype in allowed else rng.choice(sorted(allowed))
    narrow = [k for k in forced if not k.takes_everything and getattr(torch, dtype) in k.dtypes]
    aim = kernel if kernel in narrow else rng.choice(narrow) if narrow and kernel is None and rng.random() < 0.6 else None
    shapes, gqa = _shapes(rng, kernel is not None, aim, dtype)
    multiple = 16 // getattr(torch, dtype).itemsize
    layouts = [
        _aligned_layout(rng, shape, multiple)
        if aim is not None and aim.aligned and (kernel is not None or rng.random() < 0.97)
        else _layout(rng, shape)
        for shape in shapes
    ]
    tail = 3 if gqa else 2
    scores = (*torch.broadcast_shapes(*(s[:-tail] for s in shapes)), *shapes[0][-tail:-1], shapes[1][-2])
    causal = rng.random() < 0.3
    mask = None
    if not causal and rng.random() < 0.65:
        start = 0 if rng.random() < 0.5 else rng.randint(0, len(scores) - 2)
        mask = tuple(1 if rng.random() < 0.45 else n for n in scores[start:])
    layouts += [_layout(rng, mask or (1, 1)), _layout(rng, (*scores[:-1], shapes[2][-1]))]
    mask_dtype = rng.choice(("bool", "bool", "same", "same", "float32"))
    needs = tuple(rng.random() < 0.7 for _ in range(4)) if rng.random() < 0.6 else (False,) * 4
    return Case(
        seed=rng.randrange(1 << 31),
        op=op,
        dtype=dtype,
        query=shapes[0],
        key=shapes[1],
        value=shapes[2],
        mask=mask,
        mask_dtype=mask_dtype,
        mask_kind=rng.choice(("some", "some", "few", "dead rows", "late", "early", "all", "none", "lowest", "blocks", "blocks")),
        layouts=tuple(layouts),
        causal=causal,
        scale=rng.choice((None, None, None, 0.0, -0.7, 0.3, 1.0, 1e-30)),
        gqa=gqa,
        dropout_p=rng.choice((0.1, 0.5, 0.9, 1.0, rng.random()))
        if op not in ("sdpa", "sdpa_with_lse") and rng.random() < 0.3
        else 0.0,
        spread=rng.choice((1.0, 1.0, 1.0, 4.0)),
        needs=(*needs[:3], needs[3] and mask is not None and mask_dtype != "bool"),
        grad_lse=op != "sdpa" and rng.random() < 0.5,
    )
