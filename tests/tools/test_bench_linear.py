"""bench/linear_cases.py, its verdict and its table on the CPU, at tiny sizes."""

from __future__ import annotations

import json
import math
from typing import Any

import common
import evidence
import linear_cases
import pytest
import torch
from cases import CASES, SETS
from loader import script


def broken(*args: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory\nmore of it")


def linear_row(monkeypatch: pytest.MonkeyPatch, part: str, ours: Any = None, quick: bool = False) -> dict[str, Any]:
    """A tiny linear case on the CPU; the compiler and the device's memory are left out."""
    monkeypatch.setattr(common, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(linear_cases, "extra_memory", lambda call: call().nbytes)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(linear_cases.error_rule, "LINEAR", 2.0)  # of two sums of so few terms one is more than 1.05 times the other
    if ours is not None:
        monkeypatch.setitem(linear_cases.ROWS, "attention_ext", (ours, False, False))
    return linear_cases.measure(linear_cases.LinearCase("tiny", 24, 40, 36), part, quick)


@pytest.mark.parametrize("part", linear_cases.PARTS)
def test_a_linear_case_measured(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with torch.no_grad():
        case = linear_row(monkeypatch, part)
    assert torch.backends.cuda.matmul.allow_tf32 == before
    assert (case["M"], case["K"], case["F"]) == (24, 40, 36) and case["ratio_to_torch"] > 0 and case["within_rule"]
    assert list(case["rows"]) == ["attention_ext", "torch", "torch_compiled", "torch_tf32"] == list(linear_cases.ROWS)
    for row in case["rows"].values():
        assert min(row["ms"], row["ms_second_pass"], row["tflops"], row["extra_bytes"]) > 0 and set(row["errors"]) == {
            "own",
            "normal",
        }
        assert all(0.0 < error < 1e-5 for errors in row["errors"].values() for error in errors.values())
    assert json.loads(json.dumps(case)) == case
    table, sound = script("tables.py").TABLES["linear"], evidence.linear_sound
    text = "\n".join(table({"linear": {f"tiny {part}": case}}))
    assert f"| tiny {part} | 24, 40, 36 |" in text and "outside" not in text and "nan" not in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {14}
    assert sound({"linear": {"a": case}}, ["a"]) and sound({}, [])
    assert not sound({"linear": {"a": case, "b": case | {"within_rule": False}}}, ["a"])
    with torch.no_grad():
        assert list(linear_row(monkeypatch, part, quick=True)["rows"]) == ["attention_ext", "torch"]


def as_tf32(part: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    lowered = {
        name: (t.view(torch.int32) & ~0x1FFF).view(torch.float32) for name, t in tensors.items() if name in ("input", "weight")
    }
    return linear_cases._torch(part, tensors | lowered)


def as_zeros(part: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.zeros_like(linear_cases._torch(part, tensors))


def as_nan(part: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return linear_cases._torch(part, tensors) * math.nan


@pytest.mark.parametrize("part", linear_cases.PARTS)
@pytest.mark.parametrize("wrong", [as_tf32, as_zeros, as_nan, broken], ids=lambda call: call.__name__)
def test_a_linear_case_that_goes_wrong(monkeypatch: pytest.MonkeyPatch, part: str, wrong: Any) -> None:
    """The controls: plain TF32, zeros, NaN and an error are all not sound, and the table says so."""
    with torch.no_grad():
        case = linear_row(monkeypatch, part, wrong)
    assert not case["within_rule"] and not evidence.linear_sound({"linear": {"tiny": case}}, ["tiny"])
    text = "\n".join(script("tables.py").TABLES["linear"]({"linear": {"tiny": case}}))
    assert ("not measured: attention_ext: CUDA out of memory |" if wrong is broken else "(outside the rule)") in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {14}


def test_a_record_without_all_parts_is_not_sound() -> None:
    right = {"within_rule": True}
    names = [f"{case.name} {part}" for case in linear_cases.LINEAR_CASES for part in linear_cases.PARTS]
    assert list(evidence.LINEAR) == names
    whole = {"error_rule": [], "linear": dict.fromkeys(names, right)}
    for sound in (evidence.linear_sound, evidence.bench_sound):
        assert sound(whole)
        for linear in ({}, *({n: right for n in names if n != missing} for missing in names)):
            assert not sound(whole | {"linear": linear})
        assert not sound({"error_rule": []}) and sound({"error_rule": []}, ())


def test_names_of_linear_cases() -> None:
    (case,) = linear_cases.LINEAR_CASES
    assert (case.name, case.M, case.K, case.F, case.flop) == ("lin84", 1024, 8192, 8192, 2.0 * 1024 * 8192**2)
    assert linear_cases.choose(["kb97", "lin84", "decode"]) == ([case], ["kb97", "decode"])
    assert linear_cases.choose(["linear"]) == ([case], []) and linear_cases.choose(["kb97"]) == ([], ["kb97"])
    assert not {case.name, "linear"} & {*SETS, *(case.name for case in CASES)}
