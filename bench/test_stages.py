"""pytest-benchmark: each stage of the pipeline as an operator of its own, whole problems at once."""

from typing import Any

import pytest
import torch
from cases import SMALL, Case

import attention_ext  # noqa: F401

OPS = torch.ops.attention_ext
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [Case("kb97_eighth", 4, 32, 32, 512, 512, 1024, torch.float16)] if DEVICE == "cuda" else SMALL[:2]


@pytest.mark.parametrize("stage", ["qk_scores", "row_softmax", "scores_values"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stage(benchmark: Any, case: Case, stage: str) -> None:
    q, k, v = case.inputs(DEVICE)
    dtype = str(case.dtype).removeprefix("torch.")
    scores = OPS.qk_scores(q, k, None, case.causal)
    weights, row_sum, _ = OPS.row_softmax(scores, dtype=dtype)
    calls = {
        "qk_scores": lambda: OPS.qk_scores(q, k, None, case.causal),
        "row_softmax": lambda: OPS.row_softmax(scores, dtype=dtype),
        "scores_values": lambda: OPS.scores_values(weights, row_sum, v),
    }

    def timed() -> None:
        calls[stage]()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(timed, rounds=10, warmup_rounds=2)
    out = OPS.scores_values(weights, row_sum, v)
    assert torch.equal(out, OPS.scores_values(weights, row_sum, v)), "the same bits every time"
    flop = 0.0 if stage == "row_softmax" else case.flop / 2
    benchmark.extra_info |= {"stage": stage, "device": DEVICE, "tflops": flop / benchmark.stats.stats.median / 1e12}
