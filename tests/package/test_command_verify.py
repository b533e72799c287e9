"""attention-ext verify: the errors it finds, its rule and its exit status."""

from __future__ import annotations

import json
import math

import error_rule
import pytest
import torch
from torch import Tensor

import attention_ext
from attention_ext.__main__ import main
from attention_ext.command import verify
from attention_ext.command.verify import SPREAD, WHATS, share

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FEW = [
    SPREAD[2],
    (1, 2, 2, 64, 64, 16, 8, True, ""),
    (1, 2, 1, 64, 96, 16, 16, False, "bool"),
    (2, 2, 2, 64, 64, 8, 8, False, "bias"),
]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SPREAD", FEW)


def test_the_whole_spread(capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU sdpa and, as it is PyTorch's operator there, this package's reference as well."""
    assert main(["verify", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and len(found["rows"]) == 2 * len(SPREAD) * len(DTYPES)
    kernels = {
        operator: {row["kernel"] for row in found["rows"] if row["operator"] == operator} for operator in ("sdpa", "sdpa_with_lse")
    }
    assert kernels["sdpa"] <= {"torch", "torch_math"} and kernels["sdpa_with_lse"] == {"reference"}
    for row in found["rows"]:
        assert list(row["errors"]) == list(WHATS) and 0.0 <= row["share"] <= 1.0
        assert all(0.0 <= error < 0.05 for pair in row["errors"].values() for error in pair)
    assert max(row["share"] for row in found["rows"]) > 0.1


def test_what_is_printed(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert f"{8 * len(FEW)} passed, 0 failed" in text and text.count(f"{len(FEW)} within") == 8
    assert main(["verify", "--device", "cpu", "--all"]) == 0
    text = capsys.readouterr().out
    assert text.count("  within") == 8 * len(FEW) and "1,2,1,16,24,16,16 bfloat16, bool mask  sdpa" in text


def wrong(factor: float):
    def sdpa(*operands: Tensor, **options: object) -> Tensor:
        return attention_ext.sdpa(*operands, **options) * factor

    return sdpa


@pytest.mark.parametrize("factor", [1.1, math.nan])
def test_a_wrong_result(factor: float, few: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verify, "sdpa", wrong(factor))
    assert main(["verify", "--device", "cpu"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.count(f"{len(FEW)} of {len(FEW)} failed") == 4 and f"{4 * len(FEW)} passed, {4 * len(FEW)} failed" in text
    assert "failed: sdpa (torch), 2,8,2,64,128,128,128 float16: out" in text
    assert main(["verify", "--device", "cpu", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]  # NaN is null there
    assert [row["within"] for row in rows] == [row["operator"] == "sdpa_with_lse" for row in rows]


def test_a_call_that_raises(few: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def sdpa(*operands: Tensor, **options: object) -> Tensor:
        raise RuntimeError("it cannot")

    monkeypatch.setattr(verify, "sdpa", sdpa)
    assert main(["verify", "--device", "cpu"]) == 1
    assert "refused: it cannot" in capsys.readouterr().out


@pytest.mark.parametrize(("shares", "within"), [([1.5, 0.5, 0.9], True), ([1.5, 0.5, 1.1], False), ([2.1, 0.5, 0.5], False)])
def test_a_close_call_has_three_draws(shares: list[float], within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(shares)
    errors = [[0.0, 0.0]] * len(WHATS)
    monkeypatch.setattr(verify, "_draw", lambda *arguments: (errors, next(left)))
    (case, kind), *_ = verify.spread(CPU)
    assert verify._row(case, kind, CPU, "sdpa")["within"] == within


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("largest", [3.7, 1e-3, 1e-40, 0.0])
def test_the_rule_is_that_of_the_tests(dtype: torch.dtype, largest: float) -> None:
    unit = error_rule.unit(dtype, largest)
    for base in ((0.0, 0.0), (1e-4, 1e-5), (3e-8, 2e-7)):
        limits = error_rule.limits(base, largest, unit)
        for factors in ((0.5, 0.5), (0.99, 0.99), (1.01, 0.5), (0.5, 1.01)):
            ours = tuple(limit * factor if math.isfinite(limit) else factor for limit, factor in zip(limits, factors, strict=True))
            assert (share(ours, base, largest, dtype) <= 1.0) == error_rule.within(ours, base, largest, dtype), (base, factors)
    assert share((math.nan, 0.0), (1.0, 1.0), 1.0, dtype) == math.inf


@pytest.mark.gpu
def test_on_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cuda"]) == 0, capsys.readouterr().out
