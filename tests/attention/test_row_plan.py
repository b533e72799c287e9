"""The fused kernels' workspace, and with few rows and many keys how the plan splits them. No GPU needed."""

from __future__ import annotations

import pytest
import torch
from choice import CAP, Plan
from kernel_names import kernel_names

OPS = torch.ops.attention_ext
FORWARD = kernel_names()
ROW_KERNELS, FUSED = FORWARD.index("sm90_256"), ("sm90_256", "sm90_512", "sm90_1024")
BOOL = 1  # MaskType
BLOCKS = {64: 128, 128: 128, 192: 112, 256: 80}  # keys of a block of sm90_256, by head dim
SPLIT = (64, 128, 192)  # those of them whose keys sm90_256 splits
WIDER = {256: "sm90_512", 320: "sm90_512", 512: "sm90_512", 768: "sm90_1024", 1024: "sm90_1024"}


@pytest.fixture(autouse=True)
def hopper_kernels() -> None:
    if "9.0a" not in OPS.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")


def plan(N: int, L: int, S: int, E: int = 128, group: int = 1, cap: int = CAP, sms: int = 132, **more: int) -> Plan:
    facts = {"N": N, "L": L, "S": S, "E": E, "Ev": E, "key_group": group, "value_group": group, **more}
    facts |= {"query.matrices": N, "key.matrices": N // group, "value.matrices": N // group}
    return Plan(*OPS.plan("forward", [*facts], [*facts.values()], 90, sms, cap))


def cost(*args: int, **facts: int) -> int:
    return plan(*args, **facts).costs[ROW_KERNELS]


def row_bytes(E: int) -> int:
    """Of what a piece leaves of a row: its columns, a reference and a sum, float32."""
    return 4 * (E + 2)


@pytest.mark.parametrize("E", SPLIT)
@pytest.mark.parametrize(
    ("L", "S", "group", "least"),
    [(1, 513, 1, 256), (1, 4096, 8, 256), (8, 4096, 1, 256), (2, 4096, 8, 512), (1, 4097, 1, 512), (1, 16384, 4, 512),
     (4, 2048, 8, 1024), (1, 16385, 1, 1024), (1, 1 << 18, 1, 1024)],
)  # fmt: skip
def test_pieces(E: int, L: int, S: int, group: int, least: int) -> None:
    """A piece is the fewest blocks that hold 256 keys, or twice or four times as many where rows or keys are many."""
    found = plan(128 * group, L, S, E, group, cap=1 << 30)
    piece = -(-256 // BLOCKS[E]) * BLOCKS[E] * (least // 256)
    assert found.kernel == "sm90_256"
    assert found.workspace == 128 * group * L * -(-S // piece) * row_bytes(E)


@pytest.mark.parametrize(("E", "kernel"), WIDER.items())
@pytest.mark.parametrize(
    ("L", "S", "group", "keys"),
    [(1, 513, 1, 128), (1, 2048, 8, 128), (8, 4096, 1, 128), (3, 4096, 8, 384), (1, 4097, 1, 256), (1, 32768, 4, 256),
     (2, 32768, 16, 512), (1, 32769, 1, 512), (1, 65537, 8, 1024), (32, 8192, 1, 512), (1, 1 << 18, 1, 1024)],
)  # fmt: skip
def test_pieces_above_256(E: int, kernel: str, L: int, S: int, group: int, keys: int) -> None:
    """A piece has keys for 16 times the rows, and more where there are many, so that at most 256 pieces are all of them."""
    found = plan(group, L, S, E, group)
    assert found.kernel == kernel
    assert found.workspace == group * L * -(-S // keys) * row_bytes(E)
    one, row = plan(2 * group, L, S, E, group, cap=found.workspace), FORWARD.index(kernel)
    assert (one.kernel, one.workspace) == (kernel, found.workspace)
    whole = plan(group, L, S, E, group, cap=found.workspace - 1)
    assert whole.costs[row] == plan(group, L, S, E, group, cap=0).costs[row] > found.costs[row]


@pytest.mark.parametrize("E", [128, *WIDER])
@pytest.mark.parametrize(("L", "S", "more"), [(1, 512, {}), (65, 8192, {}), (9, 8192, {"group": 8}), (64, 8192, {"causal": 1})])
def test_not_split(E: int, L: int, S: int, more: dict[str, int]) -> None:
    """Short, more rows than a warpgroup's 64, or causal, where no query sees more keys than there are queries."""
    for N in (8, 1024):
        found = plan(N, L, S, E, **more)
        assert found.kernel not in FUSED or found.workspace == 0


@pytest.mark.parametrize("E", [320, 512, 768, 1024])
@pytest.mark.parametrize(("L", "group"), [(33, 1), (64, 1), (5, 8)])
def test_more_rows_above_256_are_not_split(E: int, L: int, group: int) -> None:
    for N in (group, 16 * group):
        assert plan(N, L, 8192, E, group).workspace == 0 or plan(N, L, 8192, E, group).kernel not in FUSED


def test_the_number_of_heads_does_not_matter() -> None:
    """Where the cap holds the pieces of some heads, the others' come after them; where it holds not one's, keys are not split."""
    one = 16 * row_bytes(128)
    for N in (8, 64, 16384):
        assert plan(N, 1, 4096).workspace == min(N * one, CAP // one * one)
        assert plan(N, 1, 4096, cap=5 * one + 7).workspace == 5 * one
        assert plan(N, 1, 4096, cap=one).workspace == one
    assert cost(8, 1, 4096, cap=one - 1) == cost(8, 1, 4096, cap=0) > 5 * cost(8, 1, 4096, cap=one)


def test_marks_come_first() -> None:
    """Of a mask a byte for a block of keys, next to which the pieces of as many heads as fit lie."""
    one, marks = 16 * row_bytes(128), 32
    assert plan(64, 1, 4096, mask=BOOL).workspace == 64 * one + marks
    assert plan(64, 1, 4096, mask=BOOL, cap=9 * one).workspace == 8 * one + marks
    assert plan(64, 1, 4096, mask=BOOL, cap=one + marks - 1).workspace == one


@pytest.mark.parametrize(("E", "kernel"), [*((E, "sm90_256") for E in SPLIT), (200, "sm90_512"), *WIDER.items()])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_chosen_for_decoding(E: int, kernel: str, group: int) -> None:
    """One query over many keys: one kernel, whatever the batch, as another's pieces have other bits."""
    for N in (8, 32, 1024, 8192):
        for S in (513, 1024, 4096, 32768):
            found = plan(N, 1, S, E, group)
            assert found.kernel == kernel and found.workspace > 0, (N, S, found.costs)


@pytest.mark.parametrize("E", BLOCKS)
def test_splitting_keys_is_faster(E: int) -> None:
    assert cost(8, 1, 4096, E) < 15_000 and cost(32, 1, 4096, E, group=4) < 15_000
    assert cost(8, 1, 8192, E, cap=0) > 5 * cost(8, 1, 8192, E)


@pytest.mark.parametrize(("E", "L", "kernel"), [(192, 32, "sm90_256"), (256, 32, "sm90_512"), (256, 33, "sm90_256")])
def test_the_most_rows_that_are_split(E: int, L: int, kernel: str) -> None:
    """Above head dim 192 rows are sm90_512's up to 32, and sm90_256's up to 64."""
    for N in (1, 16, 1024):
        assert plan(N, L, 4096, E).kernel == kernel


@pytest.mark.parametrize(("E", "keys"), BLOCKS.items())
def test_workspace_of_a_mask(E: int, keys: int) -> None:
    """sm90_256 marks blocks of keys for 64 queries, a byte each, of every matrix that the mask has of its own."""
    facts, blocks = {"N": 64, "L": 1000, "S": 2000, "E": E, "mask": BOOL}, -(-2000 // keys)
    for more, cells in (
        ({}, blocks),
        ({"mask_rows": 1, "mask_matrices": 64}, 64 * 16 * blocks),
        ({"mask_rows": 1, "cap": 16 * blocks}, 16 * blocks),
        ({"mask_rows": 1, "cap": 16 * blocks - 1}, 0),
        ({"S": 4 * keys}, 4),
        ({"S": 4 * keys - 1}, 0),
        ({"mask": 0}, 0),
    ):
        found = plan(**facts | more)
        assert (found.kernel, found.workspace) == ("sm90_256", cells), more
