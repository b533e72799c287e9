"""The tables of kernels and the choice from them: pure host arithmetic, no GPU needed."""

from __future__ import annotations

import random
import re

import pytest
import torch
from choice import CAP, Plan, planned
from kernel_names import kernel_names
from kernels import KERNELS
from shapes import SHAPES

import attention_ext

OPS = torch.ops.attention_ext
FORWARD = kernel_names()
OPERANDS = ("query", "key", "value")
HALF, BFLOAT16, FLOAT, DOUBLE = range(4)  # DataType
BOOL, SAME_AS_QUERY, NO_COST = 1, 2, 2**63 - 1  # MaskType; kNoCost


def plan(table: str = "forward", capability: int = 90, sms: int = 132, cap: int = CAP, **facts: int) -> Plan:
    """Facts of operands as key__row_alignment."""
    names = [name.replace("__", ".") for name in facts]
    return Plan(*OPS.plan(table, names, [int(value) for value in facts.values()], capability, sms, cap))


def against(kernel: str, table: str = "forward", **facts: int) -> str:
    return plan(table, **facts).refusals[OPS.kernels(table).index(kernel)]


def cost(kernel: str, **facts: int) -> int:
    return plan(**facts).costs[FORWARD.index(kernel)]


def needs_hopper_kernels() -> None:
    if "9.0a" not in OPS.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")


def test_tables() -> None:
    assert tuple(OPS.kernels("forward")) == tuple(kernel.name for kernel in KERNELS if kernel.device == "cuda")
    assert OPS.kernels("forward")[0] == "pipeline" and len({*OPS.kernels("forward")}) == len(OPS.kernels("forward")) > 1
    assert OPS.kernels("backward") == ["pipeline", "sm90_256", "sm90_pipeline", "sm90_split_half"]
    assert OPS.kernels("linear") == ["tiled", "split_half", "sm90_split_half"]
    with pytest.raises(RuntimeError, match='kernels: table: expected "forward", "backward" or "linear", got "none"'):
        OPS.kernels("none")
    with pytest.raises(RuntimeError, match="plan: facts: there is none called width"):
        plan(width=3)
    with pytest.raises(RuntimeError, match="plan: sms: expected a positive number, got 0"):
        plan(sms=0)


TYPICAL = {"N": 8, "L": 1024, "S": 1024, "E": 512, "Ev": 512}
NARROW = TYPICAL | {"N": 64, "E": 256, "Ev": 256}  # that every kernel takes
FUSED, ROWS_OF_64 = ("sm90_256", "sm90_512", "sm90_1024"), ("sm90_512", "sm90_1024")
HALVES, FLOATS = (*FUSED, "sm90_pipeline"), ("sm90_split_half",)
REFUSALS = [  # who refuses, for which facts, in which words
    *((HALVES + FLOATS, {size: 0}, "it does not take sizes of 0") for size in TYPICAL),
    (FLOATS, {"type": FLOAT, "N": (1 << 18) + 1}, "it keeps facts of up to 262144 heads"),
    (FLOATS, {"type": FLOAT, "L": (1 << 31) - 1024, "N": 1 << 10}, "an operand has 2^46 elements and more"),
    (FLOATS, {"type": FLOAT, "S": (1 << 16) + 1}, "it loses precision beyond 65536 keys"),
    (HALVES, {"type": FLOAT}, "it takes float16 and bfloat16, not float32"),
    (HALVES, {"type": DOUBLE}, "it takes float16 and bfloat16, not float64"),
    (HALVES, {"S": (1 << 18) + 1}, "it loses precision beyond 262144 keys"),
    (HALVES, {"N": 1 << 31, "L": 1}, "it counts heads in 32 bits, and here are more"),
    *((HALVES, {f"{name}__columns_adjacent": 0}, f"{name}'s columns are not adjacent in memory") for name in OPERANDS),
    (HALVES, {"query__row_alignment": 8}, "query's rows do not all begin on 16-byte boundaries"),
    (HALVES, {"key__rows_apart": 0}, "key's rows are broadcast or run backwards"),
    (HALVES, {"value__strides_in_range": 0}, "value's strides are negative or 2^40 bytes and more"),
    (HALVES, {"batch_dims": 4}, "strides keep 4 leading dims apart, and it takes 3"),
    (FUSED, {"batch_dims": 3, "key_group": 2, "value_group": 2}, "strides keep 3 leading dims apart, and it takes 2"),
    (FUSED, {"key_group": 4, "value_group": 2}, "key and value have different head counts"),
    *((ROWS_OF_64, dict.fromkeys(("key_group", "value_group", "N"), G), "more than 64 query heads share a") for G in (65, 128)),
    (FUSED, {"key_group": 129, "value_group": 129, "N": 129}, "more than "),
    (FUSED, {"key_group": 2, "value_group": 2, "query__heads_apart": 0}, "query's heads, of which several share a key head,"),
    (FUSED, {"L": (1 << 31) - 1024, "N": 1}, "it counts rows and tiles in 32 bits, and here are more"),
    (FUSED, {"L": 1 << 26, "N": 1 << 12, "Ev": 128}, "it counts rows and tiles in 32 bits, and here are more"),
    *((("sm90_256",), {size: 257}, "it takes head dims up to 256") for size in ("E", "Ev")),
    *((("sm90_256", "sm90_512"), {size: 513}, "it takes head dims up to ") for size in ("E", "Ev")),
    (FUSED, {"E": 1025}, "it takes head dims up to "),
]  # fmt: skip


@pytest.mark.parametrize(("kernels", "facts", "words"), REFUSALS)
def test_refusals(kernels: tuple[str, ...], facts: dict[str, int], words: str) -> None:
    """Every clause, each from just the kernels that it belongs to; the pipeline refuses nothing, others those of another dtype."""
    needs_hopper_kernels()
    found = plan(**NARROW | facts)
    others = {FLOAT: HALVES, DOUBLE: HALVES + FLOATS}.get(facts.get("type", HALF), FLOATS)
    for name, clause in zip(FORWARD, found.refusals, strict=True):
        expected = words if name in kernels else "it takes float" if name in others else ""
        assert clause.startswith(expected) and (clause != "") == (expected != ""), (name, clause)
    assert found.kernel not in kernels


def test_limits_are_taken() -> None:
    """One step inside each limit nobody refuses."""
    needs_hopper_kernels()
    for facts in ({"S": 1 << 18}, {"batch_dims": 3}, {"key_group": 64, "value_group": 64, "N": 64, "batch_dims": 2},
                  {"query__heads_apart": 0}, {"query__row_alignment": 16, "key__row_alignment": 32}, {"type": BFLOAT16},
                  {"S": 1 << 20, "L": 8, "causal": 1}):  # fmt: skip
        assert not any(plan(**NARROW | facts).refusals[:5]), facts
    assert not against("sm90_256", **NARROW | {"key_group": 128, "value_group": 128, "N": 128})
    assert not against("sm90_512", **TYPICAL)
    assert not against("sm90_1024", **TYPICAL | {"E": 1024, "Ev": 5000}) and not against("sm90_pipeline", **TYPICAL | {"E": 5000})


def test_cards() -> None:
    for capability, words in ((80, "it needs compute capability 9.0, not 8.0"), (100, "it needs compute capability 9.0, not 10.0")):
        found = plan(**NARROW, capability=capability)
        assert found.refusals == ["", *[words] * len(HALVES), "it takes float32, not float16"] and found.kernel == "pipeline"
        assert re.fullmatch(rf"no other kernel takes it; sm90_256 would take \d+ us, but {words}", found.reason)
        assert 0 < found.workspace <= CAP and not found.preferred


def test_reason_names_the_fastest_that_refused() -> None:
    needs_hopper_kernels()
    plain = plan(**TYPICAL)
    assert plain.kernel == "sm90_512" and re.fullmatch(r"its estimate of \d+ us is the lowest, before \w+'s \d+ us", plain.reason)
    spoiled = plan(**TYPICAL | {"value__row_alignment": 8})
    words = "value's rows do not all begin on 16-byte boundaries"
    assert re.fullmatch(rf"no other kernel takes it; sm90_512 would take \d+ us, but {words}", spoiled.reason)
    grouped = plan(**TYPICAL | {"key_group": 4, "value_group": 2, "L": 64})
    assert grouped.kernel == "sm90_pipeline"
    assert re.search(r"; sm90_512 would take \d+ us, but key and value have different head counts$", grouped.reason)
    wide = plan(**TYPICAL | {"E": 2000, "Ev": 2000})  # what has no tile for the head dims has no estimate either
    assert wide.costs[1:4] == [NO_COST] * 3 and "would take" not in wide.reason


def some_problems(count: int) -> list[dict[str, int]]:
    rng = random.Random(0)
    lengths, widths = (1, 2, 17, 64, 100, 128, 512, 1000, 2048, 8192), (8, 64, 72, 128, 264, 384, 512, 520, 768, 1024)
    problems = []
    for _ in range(count):
        group = rng.choice((1, 1, 1, 2, 4, 7))
        problem = {"N": rng.choice((1, 2, 8, 16, 100)) * group, "L": rng.choice(lengths), "S": rng.choice(lengths)}
        problem |= {"E": rng.choice(widths), "Ev": rng.choice(widths), "key_group": group, "value_group": group}
        problem |= rng.choice(({}, {}, {"causal": 1}, {"mask": BOOL}, {"mask": SAME_AS_QUERY, "mask_rows": 1}, {"dropout": 1}))
        for operand in OPERANDS:
            problem[f"{operand}__matrices"] = problem["N"] // (1 if operand == "query" else group)
            problem[f"{operand}__row_alignment"] = rng.choice((16, 32, 64, 128, 128))
        problems.append(problem)
    return problems


@pytest.mark.parametrize("sms", [132, 114, 78, 1])
def test_more_is_never_cheaper(sms: int) -> None:
    """Estimates are positive, and those of more queries or keys by whole tiles, of twice the heads and of half the SMs no lower.

    By whole tiles, as 256 keys are cheaper than 200 for a kernel that has another epilogue for a tile with an edge in it; not to
    where the fused kernels begin to split the keys of few rows; and with room for all in the workspace, as slices of other sizes
    fill rounds otherwise.
    """
    rng, room = random.Random(1), 1 << 50
    for problem in some_problems(300):
        if problem.get("causal"):
            problem |= {"L": -(-problem["L"] // 256) * 256, "S": -(-problem["S"] // 256) * 256}
        costs = plan(**problem, sms=sms, cap=room).costs
        assert all(cost > 0 for cost in costs)
        heads = {name: 2 * problem[name] for name in problem if name == "N" or name.endswith("matrices")}
        tiles = 256 * rng.choice((1, 2, 5, 16))
        for more in ({"L": problem["L"] + tiles}, {"S": problem["S"] + tiles}, heads):
            for name, before, after in zip(FORWARD, costs, plan(**problem | more, sms=sms, cap=room).costs, strict=True):
                few = problem["L"] * problem["key_group"] <= 64 and problem["S"] <= 1344
                assert after >= before or (name in FUSED and few and "S" in more), (name, problem, more)
        for name, before, after in zip(FORWARD, costs, plan(**problem, sms=max(sms // 2, 1), cap=room).costs, strict=True):
            assert after >= before, (name, problem)


def test_sizes_beyond_any_memory() -> None:
    """Estimates end somewhere instead of overflowing."""
    huge = (1 << 31) - 1
    narrow = plan(N=huge, L=huge, S=1 << 18, E=64, Ev=huge)
    assert all(cost > 0 for cost in narrow.costs)
    found = plan(N=huge, L=huge, S=huge, E=huge, Ev=huge, query__matrices=huge, key__matrices=huge, value__matrices=huge)
    assert found.kernel == "pipeline" and all(cost > 0 for cost in found.costs)


def test_the_choice_is_the_cheapest_that_does_not_refuse() -> None:
    needs_hopper_kernels()
    for number, problem in enumerate(some_problems(200)):  # who splits keys is chosen by head dims: bits do not depend on the batch
        problem |= ({}, {"value__row_alignment": 8}, {"value_group": 1}, {"batch_dims": 3})[number % 4]
        found = plan(**problem)
        best = min(cost for cost, clause in zip(found.costs, found.refusals, strict=True) if not clause)
        assert found.costs[FORWARD.index(found.kernel)] == best or found.reason.endswith("at these head dims for any batch")
        assert found == plan(**problem)


def test_fewer_sms_choose_otherwise() -> None:
    """Rounds count: a problem of just as many tiles as a card has SMs takes one on it and two on a smaller one."""
    needs_hopper_kernels()
    of_512 = [cost("sm90_512", N=33, L=256, S=4096, E=512, Ev=512, sms=sms) for sms in (132, 114)]
    assert of_512[1] > 1.9 * of_512[0]
    assert cost("sm90_256", N=133, L=128, S=4096, E=128, Ev=128) > 1.9 * cost("sm90_256", N=132, L=128, S=4096, E=128, Ev=128)
    kernels = {tuple(planned(shape, sms=sms).kernel for sms in (132, 78)) for shape in SHAPES["class1024"]}
    assert any(first != second for first, second in kernels)


@pytest.mark.parametrize("table", ["forward", "backward"])
@pytest.mark.parametrize(("facts", "kernel"), [({}, "sm90_split_half"), ({"E": 31}, "pipeline"), ({"S": 63}, "pipeline")])
def test_short_float_sums_run_on_cuda_cores(facts: dict[str, int], kernel: str, table: str) -> None:
    needs_hopper_kernels()
    assert plan(table, **NARROW | {"type": FLOAT} | facts).kernel == kernel
    # By its name it runs them too, but for gradients of few products.
    clause = against("sm90_split_half", table, **NARROW | {"type": FLOAT} | facts)
    assert bool(clause) == (table == "backward" and "E" in facts)


def test_float_terms_lie_in_out() -> None:
    """What of out is not written yet holds terms, where its matrices lie one after another: slices take less and cost less."""
    shape = TYPICAL | {"N": 256, "L": 512, "S": 512, "E": 1024, "Ev": 1024, "type": FLOAT}
    found, apart = (plan(**shape, out_dense=dense) for dense in (1, 0))
    assert found.workspace < apart.workspace <= 1 << 27 and found.costs[-1] < apart.costs[-1]


@pytest.mark.parametrize("facts", [{}, {"causal": 1}, {"mask": BOOL, "mask_rows": 1}, {"dropout": 1}])
@pytest.mark.parametrize(("L", "S"), [(77, 77), (128, 4096), (1000, 300), (4096, 4096)])
@pytest.mark.parametrize(("E", "Ev"), [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (8, 256), (256, 8)])
def test_row_kernels_are_chosen(E: int, Ev: int, L: int, S: int, facts: dict[str, int]) -> None:
    """Up to head dim 256 where their tiles fill the card, and where more than 64 query heads share a key head, too."""
    needs_hopper_kernels()
    for group in (1, 8, 128):
        found = plan(N=128, L=L, S=S, E=E, Ev=Ev, key_group=group, value_group=group, **facts)
        assert found.kernel == "sm90_256" and (group <= 64) == (found.refusals[FORWARD.index("sm90_512")] == "")


def test_classes_of_the_row_kernels() -> None:
    """The larger of E and Ev rules, in steps: 64, 128, 192 with Ev up to 128, 192, 256. Columns that lack are multiplied."""
    ends = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
    costs = [cost("sm90_256", N=132, L=128, S=8192, E=E, Ev=Ev) for E, Ev in ends]
    assert costs == sorted(set(costs))
    begins = [((8, 64), (64, 8)), ((65, 8), (8, 65)), ((129, 8), (136, 128)), ((8, 129), (129, 136)), ((193, 8), (8, 193))]
    for end, same in zip(costs, begins, strict=True):
        assert {cost("sm90_256", N=132, L=128, S=8192, E=E, Ev=Ev) for E, Ev in same} == {end}


def test_rows_of_a_tile() -> None:
    """Up to head dim 64 192 where that takes less time; 128 above, and with masks or dropout."""
    facts = {"N": 132, "S": 8192, "E": 64, "Ev": 64}
    half, wide = cost("sm90_256", L=128, **facts), cost("sm90_256", L=192, **facts)
    assert half < wide < 1.4 * half
    for other in ({"E": 72}, {"mask": BOOL}, {"dropout": 1}):
        assert cost("sm90_256", L=192, **facts | other) > 1.9 * cost("sm90_256", L=128, **facts | other), other
    grouped = facts | {"N": 132 * 100, "key_group": 100, "value_group": 100}  # a query of all 100 heads leaves 28 rows empty
    assert cost("sm90_256", L=2, **grouped) > 1.9 * cost("sm90_256", L=1, **grouped)


@pytest.mark.parametrize("cap", [0, 1 << 16, 1 << 20, CAP])
def test_workspace_stays_under_the_cap_or_is_one_row(cap: int) -> None:
    rng = random.Random(0)
    for _ in range(300):
        N, L, S = (rng.choice([1, 2, 3, 8, 100, 1000, 4096, 100_000]) for _ in range(3))
        dtype = rng.choice([HALF, FLOAT, DOUBLE])
        row = 2 * (S + 8) * max({HALF: 2, FLOAT: 4, DOUBLE: 8}[dtype], 4) + 2048
        for capability, E in ((80, 64), (90, 600)):
            found = plan(N=N, L=L, S=S, E=E, Ev=E, type=dtype, cap=cap, capability=capability)
            assert found.workspace <= max(cap, row)
            few = L <= 64 and S > 512  # rows, whose keys may be split
            assert found.workspace == 0 or found.kernel not in FUSED or few
            assert found.workspace > 0 or found.kernel in FUSED
    assert plan(**TYPICAL | {"N": 0}).workspace == plan(**TYPICAL | {"L": 0}).workspace == 0


LINEAR = [  # facts, capability, the kernel, a part of the reason
    ({"K": 512}, 90, "tiled", "; sm90_split_half would take .*, but sums of up to 512 products run on CUDA cores"),
    ({"K": 513}, 90, "sm90_split_half", "is the lowest, before split_half's"),
    ({"K": 513}, 80, "split_half", "but it needs compute capability 9.0, not 8.0"),
    ({"K": 4096, "type": BFLOAT16}, 90, "sm90_split_half", "is the lowest, before tiled's"),
    ({"K": 4096, "type": HALF, "weight__row_alignment": 8}, 90, "tiled", "but weight's rows do not all begin on"),
    ({"K": 4096, "type": HALF, "input__columns_adjacent": 0}, 90, "tiled", "but input's columns are not adjacent in memory"),
    ({"K": 4096, "weight__row_alignment": 4}, 90, "sm90_split_half", "is the lowest"),
    ({"K": 4096, "type": DOUBLE}, 90, "tiled", "; sm90_split_half would take .*, but it does not take float64"),
    ({"K": 4096, "type": HALF}, 80, "tiled", "but it needs compute capability 9.0"),
    ({"K": 0}, 90, "tiled", "no other kernel takes it"),
]


@pytest.mark.parametrize(("facts", "capability", "kernel", "reason"), LINEAR)
@pytest.mark.parametrize(("M", "N"), [(1, 1), (128, 8192), (700, 128), (4096, 4096)])
def test_linear(facts: dict[str, int], capability: int, kernel: str, reason: str, M: int, N: int) -> None:
    needs_hopper_kernels()
    found = plan("linear", capability, M=M, N=N, **{"type": FLOAT} | facts)
    assert found.kernel == kernel and re.search(reason, found.reason), found
    assert against("split_half", "linear", M=M, N=N, K=4096, type=HALF) == "it takes float32 alone"
    assert against("split_half", "linear", M=M, N=N, K=64) == "", "by its name it runs short sums too"


def test_backward() -> None:
    assert plan("backward", 80, **TYPICAL).kernel == "pipeline" and against("pipeline", "backward", **TYPICAL) == ""
    assert "grad_out's rows" in against("sm90_pipeline", "backward", **TYPICAL, grad_out__row_alignment=8)


def test_build_says_what_it_is() -> None:
    version, csrc, major, built_for = OPS.build_info()
    assert version == attention_ext.__version__
    assert csrc
    assert (major == 0) == (built_for == "") == version.endswith("+cpu")
