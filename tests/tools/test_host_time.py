"""bench/host_time.py on the CPU: its rows, what they time, and the record."""

from __future__ import annotations

import json
import sys

import host_time
import pytest
import torch
from torch import Tensor

ROWS = {row.name: row for row in host_time.rows("cpu", compiled=False)}


def results(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", ROWS)
def test_all_make_the_same(name: str) -> None:
    row = ROWS[name]
    assert {"function", "torch"} <= set(row.calls) and 1.0 < row.goal <= 2.0
    with row.mode():
        outs = {who: results(call()) for who, call in row.calls.items()}
    for own in outs.values():
        for got, want in zip(own, outs["torch"], strict=False):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_row_measured() -> None:
    row = ROWS["cpu, tiny, no_grad"]
    found = host_time.measure(row, turns=3)
    assert min(found[who] for who in ("operator", "function", "torch")) > 0.0
    slower = max(found["operator"], found["function"])
    assert found["ratio"] == pytest.approx(slower / found["torch"], abs=1e-3) and found["kept"] == (found["ratio"] <= row.goal)


def test_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has a length that none before it had, also those of others; own kernels next to cuDNN, sdpa next to the default."""
    monkeypatch.setattr(host_time, "FIRST", 2)
    rows = list(host_time._first_calls("cpu", "torch_math"))
    assert [list(row.calls) for row in rows] == [["operator", "torch"]] * 2 + [["function", "torch"]] * 2
    for row in rows:
        gradients = row.name.endswith("and backward")
        lengths = [results(call())[0].size(-2) for call in row.calls.values()]
        assert len(set(lengths)) == 2 and gradients == isinstance(row.calls["torch"](), tuple)
    (fresh, *_) = host_time._first_calls("cpu", "torch_math")
    found = host_time.measure(fresh, turns=50)
    assert found["operator"] > 0 and found["kept"] == (found["ratio"] <= fresh.goal)
    with pytest.raises(StopIteration):
        fresh.calls["torch"]()  # all of them were new


def test_the_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["host_time.py", "--only", "tiny, nothing", "--turns", "1", "--no-compile"])
    assert host_time.main() == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in record["host_time"]] == ["cpu, tiny, nothing requires grad"]
    assert record["torch"] == torch.__version__ and record["device"] == "cpu"
