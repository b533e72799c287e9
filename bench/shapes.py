"""Fixed shapes on which ours must not be slower than PyTorch's default: 100 of 256 < E <= 512, 60 of 512 < E <= 1024, 16 of
decoding, and 60 of the first two whose gradients are compared. Up to head dim 256, where the goal is to be no slower either, 80
drawn at random, forward and gradients, by this package's own kernels.

A line is B Hq Hk L S E Ev dtype kind; kind is "-", "causal" or one of cases.MASKS. PyTorch's default takes at most about 15 ms for
each on an H100 (115 TFLOP/s there; with grouped queries it multiplies in float32 with all scores in memory). Keys under a mask come
in multiples of 16: PyTorch's fused operators want masks with aligned rows.
"""

import random

import torch
from cases import Case

__all__ = ["SHAPES", "drawn", "parse"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

CLASS512 = """
# equal lengths, no mask
1 8 8 2048 2048 264 264 fp16 -
2 16 16 1024 1024 272 272 fp16 -
1 16 16 2048 2048 288 288 bf16 -
4 8 8 1024 1024 320 320 bf16 -
1 32 32 1024 1024 336 336 fp16 -
1 16 16 4096 4096 384 384 bf16 -
2 8 8 2048 2048 400 400 fp16 -
1 8 8 8192 8192 448 448 bf16 -
8 8 8 512 512 456 456 fp16 -
1 16 16 4096 4096 512 512 bf16 -
16 16 16 512 512 512 512 fp16 -
32 32 32 256 256 512 512 bf16 -
64 8 8 128 128 512 512 bf16 -
128 4 4 64 64 512 512 fp16 -
1 1 1 4096 4096 512 512 fp16 -
1 1 1 9216 9216 512 512 bf16 -
1 1 1 16384 16384 512 512 fp16 -
2 1 1 4096 4096 512 512 bf16 -
1 2 2 16384 16384 320 320 bf16 -
1 1 1 16384 16384 384 384 fp16 -
1 32 32 512 512 448 448 fp16 -
1 4 4 64 64 264 264 bf16 -
1 1 1 64 64 512 512 bf16 -
2 2 2 128 128 384 384 fp16 -
# odd lengths, no mask
1 8 8 65 65 512 512 bf16 -
4 8 8 127 127 384 384 fp16 -
2 16 16 1000 1000 512 512 bf16 -
1 16 16 1000 1000 264 264 fp16 -
1 8 8 4097 4097 512 512 bf16 -
1 4 4 4097 4097 320 320 fp16 -
1 8 8 2049 2047 400 400 bf16 -
2 8 8 1023 1025 456 456 fp16 -
3 5 5 777 333 336 336 bf16 -
1 3 3 129 2001 288 288 fp16 -
1 1 1 16383 4097 512 512 bf16 -
7 3 3 197 197 272 272 bf16 -
# few queries of many keys, many queries of few keys
1 16 16 64 4096 512 512 bf16 -
1 32 32 64 16384 512 512 bf16 -
4 8 8 65 8192 384 384 fp16 -
2 16 16 100 4096 448 448 bf16 -
1 8 8 127 16384 264 264 fp16 -
1 16 16 128 16384 512 512 fp16 -
1 8 8 256 16384 336 336 bf16 -
8 16 16 64 2048 320 320 bf16 -
1 16 16 512 8192 512 512 bf16 -
1 8 8 4096 64 512 512 fp16 -
1 8 8 16384 77 512 512 bf16 -
2 8 8 8192 256 288 288 fp16 -
1 4 4 16384 1000 456 456 bf16 -
# causal
1 16 16 4096 4096 512 512 bf16 causal
1 8 8 8192 8192 512 512 fp16 causal
1 1 1 16384 16384 512 512 bf16 causal
2 16 16 2048 2048 384 384 fp16 causal
1 16 16 2048 2048 264 264 bf16 causal
4 16 16 1024 1024 320 320 bf16 causal
8 8 8 512 512 448 448 fp16 causal
16 16 16 256 256 512 512 bf16 causal
1 8 8 4097 4097 400 400 bf16 causal
2 8 8 1000 1000 288 288 fp16 causal
1 4 4 65 65 512 512 fp16 causal
1 8 8 127 4096 512 512 bf16 causal
1 8 8 1024 4096 456 456 fp16 causal
1 8 8 4096 1024 512 512 bf16 causal
1 16 16 2048 3000 336 336 fp16 causal
1 4 4 16384 64 272 272 bf16 causal
# masks
2 8 8 2048 2048 512 512 bf16 pad
8 8 8 512 512 384 384 fp16 pad
4 16 16 1024 4096 320 320 bf16 pad
1 8 8 1024 1024 512 512 fp16 keep
2 4 4 2048 1024 448 448 bf16 keep
1 16 16 1000 2000 264 264 fp16 keep
2 8 8 2048 2048 512 512 bf16 band
1 4 4 4096 4096 400 400 fp16 band
1 16 16 2048 2048 512 512 bf16 bias
2 8 8 1024 1008 336 336 fp16 bias
4 8 8 65 4096 512 512 bf16 bias
1 8 8 4096 4096 288 288 bf16 keybias
2 8 8 1023 1024 512 512 fp16 keybias
1 32 32 512 2048 456 456 bf16 keybias
2 8 8 1024 1024 512 512 bf16 headbias
1 8 8 127 8192 272 272 fp16 headbias
# grouped queries
1 32 8 1024 1024 512 512 bf16 -
1 32 4 2048 2048 512 512 bf16 causal
1 8 1 2048 2048 512 512 bf16 causal
2 16 4 1024 1024 384 384 fp16 -
1 16 2 64 8192 512 512 bf16 -
4 16 2 65 4096 320 320 fp16 -
1 8 2 1000 1000 264 264 bf16 causal
1 8 1 127 16384 512 512 bf16 -
1 16 4 1024 2048 448 448 fp16 pad
1 8 2 2048 2048 336 336 bf16 bias
2 8 1 512 512 400 400 fp16 keep
8 8 2 256 256 288 288 bf16 causal
1 32 4 512 4097 512 512 fp16 -
# values of another width
1 8 8 2048 2048 512 384 bf16 -
1 16 16 1024 1024 384 512 bf16 causal
2 8 8 1000 1024 264 512 fp16 -
1 8 8 1024 4096 320 264 bf16 keybias
1 16 4 1024 1024 448 512 fp16 causal
4 8 8 127 2048 512 272 bf16 -
"""

CLASS1024 = """
# equal lengths, no mask
1 8 8 2048 2048 520 520 fp16 -
2 16 16 1024 1024 576 576 bf16 -
1 16 16 2048 2048 640 640 bf16 -
4 8 8 1024 1024 704 704 fp16 -
1 8 8 6144 6144 768 768 bf16 -
1 16 16 2048 2048 896 896 fp16 -
2 8 8 2048 2048 960 960 bf16 -
1 16 16 2048 2048 1024 1024 bf16 -
16 32 32 512 512 1024 1024 fp16 -
32 32 32 256 256 1024 1024 fp16 -
64 8 8 128 128 1024 1024 bf16 -
64 8 8 64 64 768 768 fp16 -
1 1 1 4096 4096 1024 1024 bf16 -
1 1 1 9216 9216 640 640 fp16 -
1 1 1 64 64 1024 1024 bf16 -
1 1 1 16384 16384 576 576 bf16 -
# odd lengths, no mask; few queries of many keys and the reverse
1 8 8 65 65 1024 1024 bf16 -
4 8 8 127 127 576 576 fp16 -
2 8 8 1000 1000 1024 1024 bf16 -
1 4 4 4097 4097 768 768 fp16 -
1 8 8 2049 2047 640 640 bf16 -
3 5 5 777 333 520 520 fp16 -
1 16 16 64 4096 1024 1024 bf16 -
1 16 16 64 16384 576 576 bf16 -
2 8 8 65 8192 896 896 fp16 -
1 8 8 128 16384 1024 1024 bf16 -
1 8 8 512 8192 704 704 fp16 -
1 8 8 4096 64 1024 1024 fp16 -
1 4 4 16384 77 960 960 bf16 -
# causal
1 16 16 2048 2048 1024 1024 bf16 causal
1 4 4 8192 8192 576 576 fp16 causal
2 16 16 1024 1024 640 640 bf16 causal
8 16 16 512 512 1024 1024 fp16 causal
16 16 16 256 256 768 768 bf16 causal
1 8 8 4097 4097 520 520 bf16 causal
1 8 8 127 4096 1024 1024 bf16 causal
1 8 8 1024 4096 896 896 fp16 causal
1 8 8 4096 1024 1024 1024 bf16 causal
1 4 4 65 65 960 960 fp16 causal
# masks
2 8 8 1024 1024 1024 1024 bf16 pad
8 8 8 512 512 576 576 fp16 pad
1 8 8 1024 1024 768 768 fp16 keep
2 4 4 1000 2000 640 640 bf16 keep
2 4 4 2048 2048 1024 1024 bf16 band
1 8 8 2048 2048 896 896 bf16 bias
2 8 8 65 4096 704 704 fp16 bias
1 8 8 1023 1024 1024 1024 fp16 keybias
2 8 8 1024 1024 520 520 bf16 headbias
# grouped queries
1 32 8 1024 1024 1024 1024 bf16 -
1 16 2 1024 1024 576 576 bf16 causal
1 8 1 2048 2048 768 768 fp16 causal
1 16 4 64 4096 640 640 bf16 -
1 8 1 127 8192 1024 1024 bf16 -
2 8 2 512 1008 896 896 fp16 pad
# values of another width
1 8 8 1024 1024 576 1024 bf16 -
1 8 8 2048 2048 1024 640 bf16 causal
1 8 8 1000 1024 768 520 fp16 keybias
1 8 1 1024 2048 576 768 fp16 -
1 16 16 2048 2048 576 512 bf16 causal
1 8 8 1024 2048 1024 512 fp16 -
"""


def parse(table: str) -> list[Case]:
    shapes = []
    for line in table.strip().splitlines():
        if line.startswith("#"):
            continue
        *sizes, dtype, kind = line.split()
        B, Hq, Hk, L, S, E, Ev = map(int, sizes)
        mask = None if kind in ("-", "causal") else kind
        shapes.append(Case(line, B, Hq, Hk, L, S, E, DTYPES[dtype], kind == "causal", Ev, mask))
    return shapes


# few queries a head, as one decodes
DECODING = """
8 32 4 1 8192 512 512 bf16 -
1 32 4 1 8192 512 512 bf16 -
1 32 32 1 8192 512 512 bf16 -
4 32 32 1 8192 512 512 bf16 -
8 32 4 16 8192 512 512 bf16 -
8 32 4 4 300 512 512 bf16 -
1 16 2 1 2048 320 320 bf16 -
4 16 4 8 4096 320 320 fp16 -
8 8 1 1 16384 512 512 bf16 -
16 16 8 1 1000 272 272 fp16 -
8 32 4 1 8192 768 768 bf16 -
8 32 4 1 512 1024 1024 bf16 -
1 32 4 1 8192 1024 1024 bf16 -
4 32 4 16 4096 768 768 bf16 -
2 8 8 1 1024 640 640 fp16 -
1 8 8 32 4096 576 576 fp16 -
"""

# What bounds a list's time: 2 B Hq L S (E + Ev) and B Hq L S of a shape that is drawn.
FEWEST_FLOP, MOST_FLOP, MOST_SCORES = 2e9, 4e11, 4e8


def drawn(count: int, seed: int) -> list[Case]:
    """Shapes without a mask, the same for the same seed: E and Ev from 32 to 256, a third of them with Ev != E, lengths from 64 to
    8192 of any parity, two of five with L = S, and as many causal; half with one sequence, half with grouped queries."""
    draw, shapes = random.Random(seed), {}
    while len(shapes) < count:
        B, Hk, group = draw.choice((1, 1, 2, 5)), draw.choice((1, 2, 3, 8, 16)), draw.choice((1, 1, 1, 2, 4, 8))
        L, S = (round(2 ** draw.uniform(6, 13)) for _ in range(2))
        E, Ev = (8 * draw.randint(4, 32) for _ in range(2))
        kind, dtype = draw.choice(("-", "-", "-", "causal", "causal")), draw.choice(tuple(DTYPES))
        equal, square = draw.random() < 0.7, draw.random() < 0.4
        line = f"{B} {Hk * group} {Hk} {L} {L if square else S} {E} {E if equal else Ev} {dtype} {kind}"
        (shape,) = parse(line)
        flop = 2.0 * shape.scores * (shape.E + shape.Ev)
        if FEWEST_FLOP < flop < MOST_FLOP and shape.scores < MOST_SCORES:
            shapes[line] = shape
    return list(shapes.values())


SHAPES = {"class512": parse(CLASS512), "class1024": parse(CLASS1024), "decoding": parse(DECODING)}
# Of these the gradients of q, k and v: 60 drawn from the first two lists.
SHAPES["gradients"] = random.Random(60).sample(SHAPES["class512"] + SHAPES["class1024"], 60)
SHAPES["class256"] = SHAPES["gradients256"] = drawn(80, 256)
