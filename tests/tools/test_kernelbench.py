"""bench/kernelbench.py on the CPU in small: what it times and the record."""

from __future__ import annotations

import json
import sys

import kernelbench
import pytest
import torch

SMALL = {"level1_problem97.py": {"num_heads": 2, "sequence_length": 8, "embedding_dimension": 16}}
SMALL["level2_problem84.py"] = {"in_features": 24, "out_features": 40}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny sizes, and a clock of the host in place of the card's."""
    whole = kernelbench.script

    def example(name: str, folder: str) -> object:
        module = whole(name, folder)
        for size, value in SMALL[name].items():
            monkeypatch.setattr(module, size, value)
        return module

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernelbench, "script", example)
    monkeypatch.setattr(kernelbench, "in_turns", lambda calls: {who: 1.0 + len(call().shape) for who, call in calls.items()})


@pytest.mark.parametrize("name", kernelbench.PROBLEMS)
def test_a_row(name: str) -> None:
    row = kernelbench.measure(kernelbench.PROBLEMS[name]())
    assert row["ours"] == row["torch"] == (5.0 if "97" in name else 3.0) and row["ratio"] == 1.0
    assert row["max_difference"] < (1e-3 if "float16" in name else 1e-5) < row["limit"] <= 2e-3 and row["within_limit"]


def test_a_wrong_result_shows() -> None:
    calls = kernelbench.PROBLEMS["level 1 problem 97, float32"]()
    row = kernelbench.measure(calls | {"ours": lambda: 2 * calls["torch"]()})
    assert row["max_difference"] == pytest.approx(1.0) and not row["within_limit"]
    assert not kernelbench.measure(calls | {"ours": lambda: torch.nan * calls["torch"]()})["within_limit"]


def test_the_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_room(*_: object) -> object:
        raise RuntimeError("no room")

    monkeypatch.setattr(sys, "argv", ["kernelbench.py"])
    monkeypatch.setitem(kernelbench.PROBLEMS, "level 2 problem 84, float32", no_room)
    before = torch.backends.cuda.matmul.allow_tf32
    assert kernelbench.main() == 0 and torch.backends.cuda.matmul.allow_tf32 == before
    record = json.loads(capsys.readouterr().out)["kernelbench"]
    assert [row["name"] for row in record] == list(kernelbench.PROBLEMS)
    assert record[-1] == {"name": "level 2 problem 84, float32", "not_available": "no room"}
