"""bench/record.py and its parts without a GPU: what is timed and when, the stages of a pipeline, parts that fail."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import common
import evidence
import pipelines
import pytest
import record
import torch
from cases import Case
from loader import script
from paths import CSRC


def test_a_row_rests_before_its_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is idle, and then for REST seconds, before anything of the call runs; the second pass follows at once."""
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("idle"))
    monkeypatch.setattr(common.time, "sleep", done.append)
    monkeypatch.setattr(common._measure, "time_ms", lambda call, device, repeat: done.append(repeat) or 20.0)
    assert common.time_ms(lambda: None) == 20.0 and done == ["idle", common.REST, 1, 15]
    done.clear()
    assert common.time_ms(lambda: None, rested=False) == 20.0 and done == [1, 15]


@pytest.mark.parametrize("kernel", pipelines.STAGES)
def test_stages_by_the_profiler(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Of the kernels' names as csrc spells them, over five calls of three slices."""
    sources = "".join(path.read_text() for path in CSRC.rglob("*.cu"))
    names = pipelines.STAGES[kernel].values()
    named = [f"void attention_ext::(anonymous namespace)::{name}<8>(QkScoresParams)" for name in names]
    assert all(re.search(rf"(__global__[^;{{]*|struct ){name}\b", sources) for name in names)
    events = [SimpleNamespace(key=key, self_device_time_total=5e3, count=15) for key in (*named, "void at::native::fill()")]
    calls: list[dict[str, Any]] = []

    class Profile:
        def __init__(self, **options: Any) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None: ...
        def key_averages(self) -> list[Any]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(pipelines, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(pipelines, "OPS", SimpleNamespace(sdpa_forward=lambda *_, **options: calls.append(options)))
    case = Case("small", 2, 4, 4, 30, 48, 24, torch.float32)
    found = pipelines.stages(case, kernel, {"copy_tb_per_s": 2.0, "matmul_fp16_tflops": 500.0})
    assert all(row["bound_ms"] == max(row["bytes"] / 2e9, row["flop"] / 500e9) for row in found.values())
    assert list(found) == list(pipelines.STAGES[kernel]) and calls == 6 * [{"kernel_name": kernel}]
    assert all(stage["ms"] == 1.0 and stage["launches"] == 3 for stage in found.values())


@pytest.mark.parametrize("lost", [None, "error_table", "stages", "peers"])
def test_a_part_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, lost: str | None) -> None:
    """What came before is printed, the linear cases behind all of attention's."""
    broken = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory\nmore of it"))
    fakes = {
        record: {
            "ceilings": {"x": 1.0},
            "forward_case": {"within_rule": True, "kernel": "sm90_pipeline"},
            "error_table": [{"within_rule": True}],
            "backward_case": {},
        },
        pipelines: {"stages": {}, "workspaces": {}, "long_sequences": {}},
    }
    for module, values in fakes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, broken if name == lost else lambda *_, value=value: value)
    monkeypatch.setattr(record.linear_cases, "measure", lambda *_: {"within_rule": True})
    monkeypatch.setattr(record.peers, "measure", broken if lost == "peers" else lambda *_: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")
    monkeypatch.setattr("sys.argv", ["record.py", "--cases", "kb97", "lin84", "--peers"])
    code = record.main()
    found = script("gpu_check").last_json(capsys.readouterr().out)
    assert code == int(lost is not None) and list(found["forward"]) == ["kb97"] and found["ceilings"] == {"x": 1.0}
    assert ("OutOfMemoryError" in found.get("failed", "")) == (lost is not None) and evidence.bench_sound(found) == (lost is None)
    assert ("stages_sm90_pipeline" in found) == (lost != "stages")
    assert len(found.get("linear", {})) == (3 if lost in (None, "peers") else 0)
    assert not evidence.bench_sound({"bench_failed": True, "error_rule": []})
    assert lost is not None or not evidence.bench_sound(found | {"error_rule": [{"within_rule": False}]})
