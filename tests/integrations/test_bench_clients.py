"""bench/clients.py on the CPU in small: every case runs with both implementations, and the record has what it says."""

from __future__ import annotations

import json
import sys

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers is not installed, or older: pip install 'attention_ext[transformers]'"
)
pytest.importorskip(
    "diffusers", minversion="0.42", reason="diffusers is not installed, or older: pip install 'attention_ext[diffusers]'"
)

import clients
import common


@pytest.mark.parametrize("name", clients.CASES)
def test_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "DEVICE", torch.device("cpu"))
    row = clients.measure(clients.CASES[name](True), most=1)
    assert row["ratio"] == row["default"]["ms"] / row["attention_ext"]["ms"] > 0.0
    assert not row["default"]["kernels"] and sum(row["attention_ext"]["kernels"].values()) >= 1
    assert row.get("same_tokens", 1.0) == 1.0 and row.get("max_difference", 0.0) == 0.0  # the CPU has PyTorch's operator in both


def test_the_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(common, "DEVICE", common.DEVICE)
    monkeypatch.setattr(sys, "argv", ["clients.py", "--small", "--device", "cpu", "--only", "gemma4 forward, "])
    assert clients.main() == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["clients"]) == ["gemma4 forward, 4096 tokens, bfloat16"] and record["small"] and record["card"] == "none"


def test_cases_beyond_the_limit_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(common, "DEVICE", common.DEVICE)
    monkeypatch.setattr(sys, "argv", ["clients.py", "--small", "--device", "cpu", "--limit", "5"])
    ticks = iter((0.0, 4.0, *[6.0] * len(clients.CASES)))
    monkeypatch.setattr(clients, "measure", lambda calls, most: {"ratio": 1.5})
    monkeypatch.setattr(clients.time, "monotonic", lambda: next(ticks))
    assert clients.main() == 0
    first, *others = json.loads(capsys.readouterr().out)["clients"].values()
    assert first == {"ratio": 1.5} and others == [{"not_available": "not begun after 5 s"}] * (len(clients.CASES) - 1)
