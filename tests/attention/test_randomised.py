"""Random problems against float64: seeds of the standard library everywhere, and hypothesis where it is installed.

ATTENTION_EXT_RANDOM_EXAMPLES sets the count of each (150 on the CPU and 100 on a GPU by default: one process checks them one by
one; `python tests/support/randomised.py` spreads thousands over several).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace

import kernels
import pytest
import torch
from random_cases import Case, Layout, draw_case
from random_check import check
from random_inputs import GUARD, build, place
from randomised import kernels_of, run_examples

EXAMPLES = os.environ.get("ATTENTION_EXT_RANDOM_EXAMPLES")


def examples(device: str) -> int:
    return int(EXAMPLES) if EXAMPLES else 100 if device == "cuda" else 150


def test_random_examples(device: str) -> None:
    outcome = run_examples(device, examples(device))
    texts = [f"seed {f['seed']}: {f['error']}\n  {f['case']}" for f in outcome["failures"]]
    assert not texts, f"{len(texts)} of {outcome['count']} failed\n" + "\n".join(texts[:10])
    assert outcome["count"] == examples(device)


try:
    import hypothesis
except ImportError:

    @pytest.mark.skip(reason="needs hypothesis")
    def test_examples_of_hypothesis() -> None: ...

else:

    @hypothesis.settings(
        max_examples=examples("cpu"),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(rng=hypothesis.strategies.randoms(use_true_random=False))
    def test_examples_of_hypothesis(rng: random.Random) -> None:
        """On the CPU; the same draw, so that a failure shrinks to a small repr."""
        case = draw_case(rng, kernels_of("cpu"))
        hypothesis.note(repr(case))
        check(case, "cpu")


def test_a_case_is_its_repr() -> None:
    for seed in range(200):
        case = draw_case(random.Random(seed), kernels.KERNELS)
        assert eval(repr(case), {"Case": Case, "Layout": Layout}) == case
        assert case == draw_case(random.Random(seed), kernels.KERNELS)


def test_the_draw_reaches_its_corners() -> None:
    """Over the default seeds: every op, dtype, rank, kind of mask, flag and size that the contract names."""
    cases = [draw_case(random.Random(seed), kernels_of("cpu")) for seed in range(2000)]
    assert {c.op for c in cases} == {"sdpa", "sdpa_with_lse", "sdpa_forward", "reference"}
    assert {c.dtype for c in cases} == {"float16", "bfloat16", "float32", "float64"}
    assert {len(c.query) for c in cases} == {2, 3, 4, 5}
    masked = [c for c in cases if c.mask is not None]
    assert {c.mask_dtype for c in masked} == {"bool", "same", "float32"} and len({c.mask_kind for c in masked}) == 9
    assert any(c.mask_dtype == "float32" and c.dtype in ("float16", "bfloat16") and c.needs[3] for c in masked)
    full = [tuple(n == m for n, m in zip(reversed(c.mask), reversed(c.scores), strict=False)) for c in masked]
    assert {f for f in full if len(f) == 4} >= {(a, b, d, e) for a in (0, 1) for b in (0, 1) for d in (0, 1) for e in (0, 1)}
    for size in (0, 1):
        assert any(c.scores[-2] == size for c in cases) and any(c.scores[-1] == size for c in cases)
        assert any(c.query[-1] == size for c in cases) and any(c.value[-1] == size for c in cases)
    assert max(c.scores[-1] for c in cases) > 256 and max(c.scores[-2] for c in cases) > 256
    assert max(c.query[-1] for c in cases) > 512 and any(c.query[-1] != c.value[-1] for c in cases)
    assert any(c.causal and c.scores[-1] != c.scores[-2] for c in cases) and any(c.scale == 0.0 for c in cases)
    assert any(c.gqa and c.key[-3] != c.value[-3] for c in cases) and any(0 < c.dropout_p < 1 for c in cases)
    assert any(c.query[:-2] != c.key[:-2] and not c.gqa for c in cases)
    layouts = [layout for c in cases for layout in c.layouts]
    assert any(any(x.zero) for x in layouts) and any(x.offset % 8 for x in layouts) and any(max(x.steps) > 1 for x in layouts)
    assert {c.needs for c in cases} >= {(a, b, d, False) for a in (False, True) for b in (False, True) for d in (False, True)}


def test_kernels_of_a_narrow_kind_are_drawn_for() -> None:
    """A kernel that takes few problems gets problems that it takes."""
    narrow = kernels.Kernel("narrow", "cpu", "reference", (torch.float16, torch.bfloat16), (), (257, 512), True)
    taken = 0
    for seed in range(300):
        case = draw_case(random.Random(seed), [narrow])
        if case.op == "narrow":
            tensors = [placed.view for placed in build(case, "cpu")[0][:3]]
            assert narrow.takes_sizes(tensors[0].dtype, case.query[-1], case.value[-1])
            taken += narrow.takes(*tensors)
    assert taken > 50


def test_half_types_reach_the_kernels_of_hopper() -> None:
    """On such a card: of these problems a sixth each goes to two fused kernels, a tenth to the pipeline's, with several blocks."""
    forced = [k for k in kernels.KERNELS if k.device == "cuda"]
    here = {k.name: replace(k, device="cpu", capability=()) for k in forced}
    ran: Counter[str] = Counter()
    fused: list[Case] = []
    for seed in range(800):
        case = draw_case(random.Random(seed), forced)
        if case.dtype not in ("float16", "bfloat16"):
            continue
        q, k, v = (placed.view for placed in build(case, "cpu")[0][:3])
        if not case.gqa:
            lead = torch.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)))
            q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
        order = (case.op, "sm90_256", "sm90_512", "sm90_pipeline", "pipeline")
        name = next(name for name in order if name in here and here[name].takes(q, k, v))
        ran[name] += 1
        if name in ("sm90_256", "sm90_512"):
            fused.append(case)
    assert min(ran["sm90_256"], ran["sm90_512"]) > ran.total() / 6 and ran["sm90_pipeline"] > 0.1 * ran.total()
    blocks = [c for c in fused if c.scores[-1] > 128]
    assert len(blocks) > len(fused) // 2 and any(c.gqa and c.scores[-2] <= 20 for c in blocks)
    assert any(c.mask is not None and c.mask_kind == "blocks" and c.mask[-1] > 128 for c in blocks)
    assert sum(max(c.query[-1], c.value[-1]) > 256 for c in fused) > len(fused) // 4


def test_workers_check_what_one_process_checks() -> None:
    together, alone = run_examples("cpu", 12, 5, workers=2), run_examples("cpu", 12, 5)
    for name in ("count", "first_seed", "failures", "kernels"):
        assert together[name] == alone[name]
    assert together["count"] == 12


def test_memory_around_an_input_is_nan() -> None:
    values = torch.arange(24.0).view(2, 3, 4)
    for layout in (
        Layout((0, 1, 2), (1, 1, 1), (0, 0, 0), (False,) * 3, 0),
        Layout((1, 0, 2), (1, 2, 1), (3, 0, 1), (False,) * 3, 5),
        Layout((2, 1, 0), (1, 1, 3), (1, 1, 0), (False, True, False), 1),
    ):
        placed = place(values, layout, "cpu")
        want = values[:, :1].expand(2, 3, 4) if layout.zero[1] else values
        assert torch.equal(placed.view, want) and placed.view.storage_offset() == GUARD + layout.offset
        distinct = values.numel() // 3 if layout.zero[1] else values.numel()
        assert placed.buffer.isnan().sum() == placed.buffer.numel() - distinct
        assert placed.buffer[:GUARD].isnan().all() and placed.buffer[-GUARD:].isnan().all()
        assert placed.unchanged()
        placed.buffer[0] = 1.0
        assert not placed.unchanged()
