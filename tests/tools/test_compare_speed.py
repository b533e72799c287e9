"""scripts/compare_speed.py: both builds are asked in turns, and what got slower is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import common
import linear_cases
import pytest
import shapes
import torch
from cases import Case
from loader import script

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "compare_speed.py"
WORKER = """
import json, os, sys
times = {"forward a": 1.0, "forward b": 1.0, "host": 7.0}
print(json.dumps(list(times)), flush=True)
new = os.environ["PYTHONPATH"].endswith("new")
for line in sys.stdin:
    name = line.strip()
    slowdown = 1.5 if name == "forward b" and new else 1.0
    print(json.dumps("no memory" if name == "host" and new else times[name] * slowdown), flush=True)
"""


def compare(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """The script with workers that only say times."""
    script = tmp_path / "compare.py"
    head, found, tail = SCRIPT.read_text().partition("    if args.worker:\n        return worker()\n")
    assert found
    script.write_text(head + f"    if args.worker:\n        exec({WORKER!r})\n        return 0\n" + tail)
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, str(script), *map(str, folders), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_what_got_slower_is_named(tmp_path: Path) -> None:
    done = compare(tmp_path, "--turns", "3")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and set(found) == {"forward a", "forward b", "host"}
    assert found["forward a"]["ratio"] == 1.0 and found["forward b"]["all"] == [[1.0] * 3, [1.5] * 3]
    assert "forward b 1.0000 -> 1.5000, 1.500" in done.stderr and "no memory" in done.stderr
    assert "3 calls, 2 slower, 0 faster by more than 2%" in done.stderr and "forward a" not in done.stderr


@pytest.mark.parametrize(("options", "code"), [(["--cases", "forward a"], 0), (["--cases", "forward", "--slower", "1.6"], 0)])
def test_chosen_cases_and_limits(tmp_path: Path, options: list[str], code: int) -> None:
    done = compare(tmp_path, *options)
    assert done.returncode == code and "0 slower" in done.stderr


def test_kernels_are_those_of_the_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward by own kernels, also where sdpa runs PyTorch's; the host's time is that of sdpa."""
    asked: list[str] = []

    def own(case: Case, *operands: torch.Tensor, **options: Any) -> Any:
        asked.append(case.name)
        return common_own(case, *operands, **options)

    common_own, inputs, mask = common.own_kernels, Case.inputs, Case.attn_mask
    monkeypatch.setattr(common, "own_kernels", own)
    monkeypatch.setattr(Case, "inputs", lambda case, device: inputs(case, "cpu"))
    monkeypatch.setattr(Case, "attn_mask", lambda case, device: mask(case, "cpu"))
    monkeypatch.setattr(cases, "CASES", [Case("grouped", 1, 4, 2, 8, 8, 16, torch.float16, causal=True)])
    monkeypatch.setattr(shapes, "SHAPES", {"list": [Case("masked", 1, 2, 2, 8, 16, 16, torch.float16, mask="bias")]})
    monkeypatch.setattr(linear_cases, "LINEAR_CASES", [])
    made = {name: (make(), host) for name, make, host in script("compare_speed.py").calls()}
    assert asked == ["grouped", "grouped", "masked"]
    assert [host for _, host in made.values()] == [False] * 3 + [True] * 2
    results = {name: call() for name, (call, _) in made.items()}
    assert len(results["host, forward and backward"]) == len(results["backward grouped"]) == 3
    assert results["forward grouped"].shape == (1, 4, 8, 16) and results["list: masked"].shape == (1, 2, 8, 16)
