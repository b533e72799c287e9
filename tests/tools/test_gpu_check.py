"""scripts/gpu_check without a GPU: processes of tests, two cards, a record in two commands, what it lacks."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import evidence
import gpu_tests
import pytest
import sanitizers
from loader import script
from made_records import OTHER, PARTS, REPORT, SUMMARY, TREE, benched, complete
from paths import ROOT
from shapes import SHAPES


def test_a_process_that_does_not_finish_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("gpu_check")

    def run(command: list[str], *, cwd: Path, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        assert cwd.name == "tests" and {"--whole", "--continue-on-collection-errors"} <= set(command)
        if command[-1] == "slow":
            raise subprocess.TimeoutExpired(command, timeout)
        report = next(part for part in command if part.startswith("--junitxml=")).partition("=")[2]
        if command[-1] != "crash":
            Path(report).write_text(REPORT if command[-1] == "some" else "<testsuites><testsuite/></testsuites>")
        return subprocess.CompletedProcess(command, {"some": 1, "crash": -11, "none": 5}[command[-1]])

    monkeypatch.setattr(module.subprocess, "run", run)
    found = evidence.outcome(module.run_tests([["some"], ["crash"], ["none"], ["slow"]], {}))
    assert found["tests"] == 9 + 3 and found["errors"] == 2 + 3
    ends = {"crash": -11, "none": 5, "slow": None}
    assert found["failed"][-3:] == [f"pytest ended with {code}::{share}" for share, code in ends.items()]


def about(tree: str, cards: int) -> dict[str, Any]:
    return {"card": "Some Card", "driver": "1", "date": "2000-01-01", "cards": cards, "torch": "2", "csrc_tree": tree}


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, tree: str = TREE, cards: int = 1) -> tuple[int, Any]:
    """scripts/gpu_check with tests that are made up and without what it starts; its exit code and the record."""
    module = script("gpu_check")
    reports = {"tests.test_a": "", "tests.test_two_devices": "" if cards > 1 else "<skipped/>"}
    cases = [ET.fromstring(f'<testcase classname="{name}" name="t">{inside}</testcase>') for name, inside in reports.items()]
    monkeypatch.setattr(module, "RESULTS", folder / "results")
    monkeypatch.setattr(module, "install", lambda wheel: ({}, about(tree, cards)))
    monkeypatch.setattr(module, "run_tests", lambda shares, env: [case for case in cases if picked(case, shares)])
    bench = json.dumps({name: complete()[name] for name in ("error_rule", "linear")})
    done = subprocess.CompletedProcess([], 0, stdout=bench)
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **options: done)
    rest = ("--cases", "--shapes", "--parts", "--examples", "0", "--skip-sanitizer")
    monkeypatch.setattr("sys.argv", ["gpu_check", "some.whl", "--out", str(folder), *(arguments or rest)])
    code = module.main()
    return code, json.loads((folder / "some_card.json").read_text())


def picked(case: ET.Element, shares: list[list[str]]) -> bool:
    """Of the made-up tests: all, or those of two cards where nothing else is asked for."""
    only_two = all("test_two_devices" in " ".join(share) for share in shares)
    return not only_two or "two_devices" in str(case.get("classname"))


def test_two_cards_before_and_after_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, record = call(monkeypatch, tmp_path)
    assert code == 1 and record["gpu_tests"]["modules_skipped"] == ["tests.test_two_devices"] and "two_cards" not in record
    (tmp_path / "some_card.json").write_text(json.dumps(complete(sound=False, gpu_tests=record["gpu_tests"])))
    code, record = call(monkeypatch, tmp_path, "--two-cards", cards=2)
    assert code == 0 and record["two_cards"].items() >= (about(TREE, 2) | {"tests": 1, "failures": 0, "skipped": 0}).items()
    assert record["sound"], "the earlier record counts anew"
    (tmp_path / "results").mkdir()
    (tmp_path / "some_card.json").rename(tmp_path / "results" / "some_card.json")
    code, later = call(monkeypatch, tmp_path)
    assert code == 0 and later["two_cards"] == record["two_cards"] and not later["sound"], "it is not complete"
    code, other = call(monkeypatch, tmp_path, tree=OTHER)
    assert code == 1 and "two_cards" not in other


def test_two_cards_in_a_new_record_and_in_a_full_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, record = call(monkeypatch, tmp_path, "--two-cards", cards=2)
    assert code == 0 and record.keys() == {"two_cards"}
    with pytest.raises(SystemExit, match="expected a machine with at least 2 cards, got 1"):
        call(monkeypatch, tmp_path, "--two-cards")
    code, record = call(monkeypatch, tmp_path, tree=OTHER, cards=2)
    assert code == 0 and record["cards"] == 2 and record["gpu_tests"]["tests"] == 2
    assert record["two_cards"]["csrc_tree"] == OTHER and record["two_cards"]["tests"] == 1


@pytest.mark.parametrize(("cards", "visible"), [(1, None), (2, None), (2, "4,7")])
def test_the_second_card_is_for_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cards: int, visible: str | None) -> None:
    """The first is timed, cases and then lists of shapes. The parts come after the tests, what is left of the lists at the same
    time on the second card, the host's times alone after that, and the tests of two cards with both last."""
    module, done, lists_begun = script("gpu_check"), [], threading.Event()

    def run(what: str, result: Any) -> Any:
        return lambda *args: (done.append((what, args[-1].get("CUDA_VISIBLE_DEVICES"))), result)[1]

    def run_bench(name: str, options: list[str], env: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if name == "record_shapes":
            lists_begun.set()
            time.sleep(0.05)  # both cards get some
        return run(name, (0, {"error_rule": []}))(env)

    def tests_run(shares: list[list[str]], env: dict[str, str]) -> list[ET.Element]:
        if cards > 1:
            assert lists_begun.wait(60), "lists are timed while tests run"
        return run(f"{len(shares)} shares", [])(env)

    monkeypatch.setattr(module, "install", lambda wheel: ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}, about(TREE, cards)))
    monkeypatch.setattr(module, "run_bench", run_bench)
    monkeypatch.setattr(module, "run_tests", tests_run)
    monkeypatch.setattr(module, "run_two_cards", run("two cards", []))
    monkeypatch.setattr("sys.argv", ["gpu_check", "some.whl", "--out", str(tmp_path), "--skip-sanitizer", "--examples", "0"])
    module.main()
    first, second = (visible or "0,1").split(",") if cards > 1 else (None, None)
    tests = (f"{gpu_tests.PROCESSES} shares", second)
    parts, lists = [(part, first) for part in evidence.PARTS], [one for one in done if one[0] == "record_shapes"]
    assert len(lists) == len(module.LISTS)
    if cards > 1:
        rest = [one for one in done if one not in lists]
        assert rest == [("record", first), tests, *parts, ("two cards", visible)] and parts[-1][0] == "host_time"
        assert {card for _, card in lists} == {first, second} and done[-2] == parts[-1]
        on_first = [number for number, one in enumerate(done) if one == ("record_shapes", first)]
        assert max(on_first) < done.index(parts[0]) and min(on_first) > done.index(("record", first))
    else:
        assert done == [("record", first), *lists, *parts, tests]


def test_tests_of_a_command_before_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second command adds a list and other libraries' rows to a whole record, which is complete after it."""
    module, asked = script("gpu_check"), []

    def run_bench(name: str, options: list[str], env: dict[str, str]) -> tuple[int, dict[str, Any] | None]:
        asked.append((name, *options))
        if name != "peers":
            return benched(name, options)
        path = Path(options[1])
        path.write_text(json.dumps(json.loads(path.read_text()) | {"peers": {"fa4": "1"}}))
        return 0, None

    def check(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["gpu_check", "some.whl", "--out", str(tmp_path), "--commit", "c", *arguments])
        assert module.main() == 0
        return json.loads((tmp_path / "some_card.json").read_text())

    tests = [ET.fromstring('<testcase classname="tests.test_a" name="t"/>')]
    monkeypatch.setattr(module, "install", lambda wheel: ({}, about(TREE, 1) | {"uuid": "GPU-1"}))
    monkeypatch.setattr(module, "run_bench", run_bench)
    monkeypatch.setattr(module, "run_tests", lambda *_: tests)
    monkeypatch.setattr(module, "run_sanitizer", lambda *_: {"clean": True})
    monkeypatch.setattr(module, "run_randomised", lambda examples, env: {"asked": examples, "count": examples, "failed": 0})
    first = check("--shapes", *module.LISTS[:-1])
    assert not first["complete"] and first["gpu_tests"]["tests"] == 1
    asked.clear()
    tests.clear()
    monkeypatch.setattr(module, "run_sanitizer", lambda *_: pytest.fail("it was not asked for"))
    whole = check("--continue", "--skip-tests", "--skip-sanitizer", "--examples", "0", "--peers")
    assert [(name, *options[:1]) for name, *options in asked] == [("record_shapes", module.LISTS[-1]), ("peers", "--into")]
    assert whole["complete"] and whole["sound"] and whole["peers"] == {"fa4": "1"} and "checked_on" not in whole
    assert {name: whole[name] for name in ("gpu_tests", "sanitizer", "randomised")} == {
        name: first[name] for name in ("gpu_tests", "sanitizer", "randomised")
    }
    assert whole["seconds"]["tests_and_sanitizers"] == first["seconds"]["tests_and_sanitizers"]


def test_continue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests for the benches of a command before: the record is complete, and of one kind of card and csrc tree."""
    module, benches, envs = script("gpu_check"), [], []
    tests = [ET.fromstring(f'<testcase classname="tests.{name}" name="t"/>') for name in ("test_a", "test_two_devices")]

    def check(*arguments: str, tree: str = TREE, cards: int = 1) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(module, "install", lambda wheel: ({}, about(tree, cards) | {"uuid": f"GPU-{cards}"}))
        monkeypatch.setattr("sys.argv", ["gpu_check", "some.whl", "--out", str(tmp_path), "--commit", "c", *arguments])
        return module.main(), json.loads((tmp_path / "some_card.json").read_text())

    monkeypatch.setattr(module, "run_bench", lambda *asked: (benches.append((asked[0], *asked[1])), benched(*asked))[1])
    monkeypatch.setattr(module, "run_tests", lambda shares, *given: (envs.append(given), tests[: len(given)])[1])
    monkeypatch.setattr(module, "run_sanitizer", lambda *_: {"clean": True})
    monkeypatch.setattr(module, "run_randomised", lambda examples, env: {"asked": examples, "count": examples, "failed": 0})
    with pytest.raises(SystemExit, match=r"--continue: .*some_card.json is of another .*, or not there"):
        check("--continue")
    code, first = check("--skip-tests", "--skip-sanitizer", "--examples", "0")
    assert code == 0 and first["benches_complete"] and not first["complete"] and not first["sound"]
    assert benches == [("record",), *(("record_shapes", name) for name in module.LISTS), *((part,) for part in evidence.PARTS)]
    lost = first | {"shapes_failed": ["decoding"], "everyday_failed": True}
    lost["shapes_summary"] = {name: SUMMARY for name in module.LISTS if name != "decoding"}
    (tmp_path / "some_card.json").write_text(json.dumps({name: lost[name] for name in lost if name != "everyday"}))
    benches.clear()
    with pytest.raises(SystemExit, match="is of another csrc_tree, or"):
        check("--continue", tree=OTHER)
    code, whole = check("--continue")
    assert code == 0 and whole["sound"] and whole["gpu_tests"]["tests"] == 1 and whole["linear"] == first["linear"]
    assert whole["checked_on"]["uuid"] == "GPU-1" and "two_cards" not in whole and envs == [({},)]
    code, whole = check("--continue", cards=2)
    assert code == 0 and whole["sound"] and whole["gpu_tests"]["tests"] == 2 and whole["two_cards"]["tests"] == 1
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs[1]] == ["0,1", "1,0"] and whole["checked_on"]["uuid"] == "GPU-2"
    assert benches == [("record_shapes", "decoding"), ("everyday",)], "what the record lacked"
    assert set(whole["shapes_summary"]) == set(module.LISTS) and not whole["shapes_failed"] and not whole["everyday_failed"]


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ("", []),
        ("left out", ["1 calls of variants"]),
        ("failed", ["variants"]),
        ("list failed", ["gradients"]),
        ("list absent", ["gradients"]),
    ],
)
def test_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, lacks: list[str]
) -> None:
    """Each is a script of bench/ whose object becomes a part of the record. What it lacks, of parts and lists of shapes, is said,
    and it is not complete."""
    module = script("gpu_check")
    asked = []

    def run_bench(name: str, options: list[str], env: dict[str, str]) -> tuple[int, dict[str, Any] | None]:
        asked.append((name, options))
        code, found = benched(name, options)
        if (name, change) == ("variants", "left out"):
            return code, {name: PARTS[name] | {"left_out": 1}}
        if options == ["gradients"] and change == "list absent":
            return 0, {"shapes": {}, "shapes_summary": {}}
        fails = ("variants", []) if change == "failed" else ("record_shapes", ["gradients"]) if change == "list failed" else None
        return int((name, options) == fails), found

    monkeypatch.setattr(module, "install", lambda wheel: ({}, about(TREE, 1)))
    monkeypatch.setattr(module, "run_bench", run_bench)
    monkeypatch.setattr(module, "run_tests", lambda shares, env: [ET.fromstring('<testcase classname="a" name="t"/>')])
    monkeypatch.setattr(module, "run_sanitizer", lambda *_: {"clean": True})
    monkeypatch.setattr(module, "run_randomised", lambda examples, env: {"asked": examples, "count": examples, "failed": 0})
    monkeypatch.setattr("sys.argv", ["gpu_check", "some.whl", "--out", str(tmp_path)])
    code = module.main()
    record = json.loads((tmp_path / "some_card.json").read_text())
    assert asked == [
        ("record", []),
        *(("record_shapes", [name]) for name in module.LISTS),
        *((part, []) for part in evidence.PARTS),
    ]
    assert record["seconds"].keys() == {"benches", "shapes", *evidence.PARTS, "tests_and_sanitizers"}
    assert f"calls that it lacks: {', '.join(lacks) or 'none'}\n" in capsys.readouterr().out
    assert record["complete"] == record["sound"] == (not lacks) and code == int("failed" in change)
    assert record.get("variants_failed", False) == (change == "failed") and record["everyday"] == PARTS["everyday"]
    assert record["shapes_failed"] == ["gradients"] * (change == "list failed")


def test_the_lists_are_those_of_the_shapes() -> None:
    assert set(script("gpu_check").LISTS) == set(SHAPES) and all(
        (ROOT / "bench" / f"{part}.py").exists() for part in evidence.PARTS
    )


def test_a_tool_that_is_not_there_is_not_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = sanitizers.run_sanitizer("memcheck", ["some.py"], "done", {"PATH": "/nowhere"})
    assert not found["clean"] and sanitizers.run(["no_such_program"], {})[0] == 127
