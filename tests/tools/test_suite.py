"""Which tests run: the default set, --whole, what is named; processes side by side; baselines in the report."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from pairs import cover
from paths import ROOT

SOME = """
import pytest, torch
from helpers import baselines_taken

@pytest.mark.parametrize("a", ["low", "mid", "high"])
@pytest.mark.parametrize("b", [[1], [2], [3]])
@pytest.mark.parametrize("c", [0, 1])
def test_three(a, b, c):
    baselines_taken.append("math" if c else "default")

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", [0, 1])
def test_devices(device, a, b): pass

@pytest.mark.each_value
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", range(5))
def test_each_value(a, b): pass

def test_plain(): pass

def test_threads(record_property):
    record_property("threads", torch.get_num_threads())
"""
TOGETHER = """
import os, pytest

@pytest.mark.parametrize("i", ["a/b", "c", "d", "e"])
def test_on_two_ranks(i, record_property):
    record_property("process", os.environ.get("PYTEST_XDIST_WORKER"))
"""
LARGE = """
import os, pytest

@pytest.mark.parametrize("i", range(6))
def test_large(i, record_property):
    record_property("process", os.environ.get("PYTEST_XDIST_WORKER"))
"""
THREE = {f"test_three[{c}-b{b}-{a}]" for a in ("low", "mid", "high") for b in range(3) for c in (0, 1)}
OTHERS = {f"test_devices[{b}-{a}-{device}]" for b in (0, 1) for a in "xyz" for device in ("cpu", "cuda")}
OTHERS |= {"test_plain", "test_threads"}
EACH_VALUE = {f"test_each_value[{b}-{a}]" for b in range(5) for a in "xyz"}
LARGE_ONES = {f"test_large[{i}]" for i in range(6)}
RANKS = {f"test_on_two_ranks[{i}]" for i in ("a/b", "c", "d", "e")}
WHOLE = THREE | OTHERS | EACH_VALUE
RUNS = {
    "default": ["tests", "--ignore-glob=*/test_[ld]*.py"],
    "whole": ["tests", "--ignore-glob=*/test_[ld]*.py", "--whole"],
    "file": ["tests/test_some.py"],
    "test": ["tests/test_some.py::test_three[1-b2-mid]"],
    "by keyword": ["tests", "-k", "test_three and mid and b2"],
    **{f"share {i}": ["tests", "--whole", f"--share={i}/3"] for i in range(3)},
}


def run(folder: Path, calls: list[list[str]]) -> list[list[ET.Element]]:
    """The cases that pytest ran in each call, over the files above beside this suite's conftest.py."""
    tests = folder / "tests"
    tests.mkdir()
    (tests / "test_some.py").write_text(SOME)
    (tests / "test_large.py").write_text(LARGE)
    (tests / "test_dtensor.py").write_text(TOGETHER)
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    common = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={folder}"]
    calls = [[*common, f"--junitxml={number}.xml", *call] for number, call in enumerate(calls)]
    code = f"import pytest; assert not any([pytest.main(call) for call in {calls}])"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "OMP"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [list(ET.parse(folder / f"{number}.xml").getroot().iter("testcase")) for number in range(len(calls))]


def properties(cases: list[ET.Element], name: str) -> dict[str | None, list[str | None]]:
    return {case.get("name"): [p.get("value") for p in case.iterfind(f"properties/property[@name='{name}']")] for case in cases}


def test_what_runs(tmp_path: Path) -> None:
    cases = dict(zip(RUNS, run(tmp_path, list(RUNS.values())), strict=True))
    names = {kind: {case.get("name") for case in found} for kind, found in cases.items()}
    assert names["whole"] == names["file"] == WHOLE and names["test"] == {"test_three[1-b2-mid]"}
    assert names["default"] >= OTHERS and 9 <= len(names["default"] & THREE) < 18
    assert names["by keyword"] == {"test_three[0-b2-mid]", "test_three[1-b2-mid]"}
    each = [name.split("[")[1] for name in names["default"] & EACH_VALUE]
    assert len(each) == 5 and {name[0] for name in each} == set("01234") and {name[2] for name in each} == set("xyz")
    shares = [names[f"share {i}"] for i in range(3)]
    everything = WHOLE | LARGE_ONES | RANKS
    assert sum(map(len, shares)) == len(everything) and set().union(*shares) == everything
    assert all(abs(len(share & WHOLE) - len(WHOLE) / 3) <= 1 for share in shares)
    for one in (LARGE_ONES, RANKS):
        assert sorted(len(share & one) for share in shares) == [0, 0, len(one)]
    taken = properties(cases["whole"], "baseline")
    assert all(taken[name] == ([["default"], ["math"]]["[1-" in name] if name in THREE else []) for name in WHOLE)


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
def test_processes_side_by_side(tmp_path: Path) -> None:
    """The same tests, those of much memory in one process, and no more threads than cores."""
    (cases,) = run(tmp_path, [["tests", "--whole", "-n", "2"]])
    assert {case.get("name") for case in cases} == WHOLE | LARGE_ONES | RANKS
    processes, threads = properties(cases, "process"), properties(cases, "threads")
    assert all(len({tuple(processes[name]) for name in one}) == 1 for one in (LARGE_ONES, RANKS))
    assert threads["test_threads"] == [str(max(1, len(os.sched_getaffinity(0)) // 2))]


@pytest.mark.parametrize("sizes", [(4,), (3, 5), (3, 4, 5), (6, 5, 4, 3)], ids=str)
def test_every_pair_of_values(sizes: tuple[int, ...]) -> None:
    cases = [dict(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    kept = [cases[i] for i in cover(cases)]
    for (a, m), (b, n) in itertools.combinations(enumerate(sizes), 2):
        assert {(case[a], case[b]) for case in kept} == set(itertools.product(range(m), range(n)))
    least = sizes[0] if len(sizes) == 1 else max(m * n for m, n in itertools.combinations(sizes, 2))
    assert least <= len(kept) <= 1.1 * least


def test_values_are_told_apart_by_type_and_lists_by_identity() -> None:
    one, other = [1], [1]
    assert cover([{"a": 1}, {"a": 1.0}, {"a": True}, {"a": 1}]) == [0, 1, 2]
    assert cover([{"a": one}, {"a": other}, {"a": one}]) == [0, 1]
    assert cover([{}]) == [0] and cover([]) == []
