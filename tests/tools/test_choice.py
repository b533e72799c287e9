"""How good the choice of a kernel is, by the times of each kernel that were recorded, and how they are recorded. No GPU needed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import record_shapes
import torch
from choice import choice_summary, planned
from loader import script
from paths import ROOT
from shapes import SHAPES

OPS = torch.ops.attention_ext
RECORDED = json.loads((ROOT / "bench" / "results" / "kernels" / "nvidia_h200.json").read_text())["shapes"]
# Where the choice is beyond 5 % of the best: who splits keys follows from the head dims, so that bits do not depend on the batch.
BEYOND = {"1 32 4 1 8192 512 512 bf16 -"}


@pytest.mark.parametrize("name", RECORDED)
def test_choices_as_measured(name: str) -> None:
    """On an H200 the chosen kernel is within 5 % of the best of those that take the shape."""
    if "9.0a" not in OPS.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")
    assert [row["name"] for row in RECORDED[name]] == [shape.name for shape in SHAPES[name]]
    plans = [planned(shape) for shape in SHAPES[name]]
    rows = [row | {"kernel": plan.kernel} for row, plan in zip(RECORDED[name], plans, strict=True)]
    summary = choice_summary(rows)
    assert summary["compared"] == len(rows) and summary["geometric_mean"] < 1.02
    assert {shape["name"] for shape in summary["beyond"]} <= BEYOND
    for row, plan in zip(rows, plans, strict=True):
        refusals = dict(zip(OPS.kernels("forward"), plan.refusals, strict=True))
        assert not any(refusals[kernel] for kernel in row["kernels"])


def test_summary_of_choices() -> None:
    rows = [{"name": "a", "kernel": "x", "kernels": {"x": 2.0, "y": 1.0}}, {"name": "b", "kernel": "y", "kernels": {"y": 1.0}}]
    summary = choice_summary([*rows, {"name": "c", "ours_failed": "not run"}])
    assert summary["compared"] == 2 and summary["within_5_percent"] == 1 and summary["worst"] == 2.0
    assert summary["beyond"] == [{"name": "a", "chosen": "x", "best": "y", "ratio": 2.0}]


def test_the_script_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    shape = SHAPES["class512"][0]
    kernel = planned(shape).kernel
    other = next(name for name in OPS.kernels("forward") if name != kernel)
    record = {"shapes": {"one": [{"name": shape.name, "kernels": {other: 1.0, kernel: 2.0}}, {"name": "not run"}]}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    monkeypatch.setattr("sys.argv", ["check_choice.py", str(tmp_path / "record.json"), "--all"])
    assert script("check_choice.py").main() == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{shape.name}: ") and "(estimate " in first
    assert second.startswith("one: 0 of 1 within 5 % of the best, worst 2.000") and third.startswith(
        f"  2.00  {shape.name}: {kernel}"
    )


def test_every_kernel_that_takes_a_shape_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed:
        def __init__(self, call: Any) -> None:
            call()

        def times(self) -> list[float]:
            return [2.0, 1.0, 3.0]

    def by_name(q: torch.Tensor, *args: Any, kernel_name: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if kernel_name == "narrow":
            raise RuntimeError("attention_ext: kernel_name: expected another")
        if kernel_name == "large":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return q, q

    names = ["plain", "narrow", "chosen", "large"]
    monkeypatch.setattr(record_shapes, "OPS", SimpleNamespace(kernels=lambda table: names, sdpa_forward=by_name))
    monkeypatch.setattr(record_shapes, "Captured", Timed)
    q = torch.ones(1, 1, 2, 8)
    assert record_shapes.kernel_times(SHAPES["decoding"][0], q, q, q, None, {"chosen": 7.0}) == {"plain": 2.0, "chosen": 7.0}
