"""scripts/report_resources.py: kernels by names that outlive a build, and what it says of a change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loader import script

USAGE = """
Fatbin elf code:
================
arch = sm_80
Resource usage:
 Function _ZN13attention_ext46_GLOBAL__N__{build}_13_batch_norm_cu_1e4ffde817batch_norm_kernelIfEEvv:
  REG:{registers} STACK:{stack} SHARED:2048 LOCAL:0 CONSTANT[2]:48 CONSTANT[0]:544 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90a
Resource usage:
 Function _ZN13attention_ext46_GLOBAL__N__{build}_13_batch_norm_cu_1e4ffde817{last}IfEEvv:
  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[2]:48
"""


def usage(build: str = "91096336", registers: int = 38, stack: int = 0, last: str = "batch_norm_kernel") -> str:
    return USAGE.format(build=build, registers=registers, stack=stack, last=last)


def test_names_and_numbers() -> None:
    report = script("report_resources.py").parse(usage())
    assert list(report) == [f"{arch} _ZN13attention_ext<batch_norm.cu>17batch_norm_kernelIfEEvv" for arch in ("sm_80", "sm_90a")]
    assert next(iter(report.values())) == {"registers": 38, "stack": 0, "shared": 2048, "local": 0}


@pytest.mark.parametrize(
    ("change", "lines", "code"),
    [
        ({"build": "00000000"}, ["2 kernels: the same resources"], 0),
        ({"registers": 40}, ["registers 38 -> 40"], 0),
        ({"stack": 16}, ["stack 0 -> 16"], 1),
        ({"last": "other"}, ["gone", "new"], 0),
    ],
)
def test_compare(
    change: dict, lines: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("report_resources.py")
    paths = [tmp_path / name for name in ("old.json", "new.json")]
    for path, text in zip(paths, (usage(), usage(**change)), strict=True):
        path.write_text(json.dumps(module.parse(text)))
    monkeypatch.setattr("sys.argv", ["report_resources.py", "--compare", *map(str, paths)])
    assert module.main() == code
    said = capsys.readouterr().out
    assert len(said.splitlines()) == len(lines) and all(line in said for line in lines)
