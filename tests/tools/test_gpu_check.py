"""scripts/gpu_check and scripts/evidence.py without a GPU: reports read, what makes a record sound, two cards."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import evidence
import pytest
from loader import script
from paths import ROOT

TREE, OTHER = "a" * 40, "b" * 40
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_passes[x]"><properties>
  <property name="baseline" value="default"/><property name="baseline" value="math"/><property name="other" value="math"/>
</properties></testcase>
<testcase classname="tests.test_a" name="test_skips"><skipped message="why"/></testcase>
<testcase classname="tests.test_a" name="test_default"><properties>
  <property name="baseline" value="default"/>
</properties></testcase>
<testcase classname="tests.test_a" name="test_fails"><properties><property name="baseline" value="three calls"/></properties>
  <failure message="wrong"/></testcase>
<testcase classname="tests.test_a" name="test_fails_twice"><failure message="wrong"/><error message="teardown"/></testcase>
<testcase classname="tests.test_two_devices" name="test_b"><skipped message="needs two CUDA devices"/></testcase>
<testcase classname="tests.test_two_devices" name="test_c"><skipped message="needs two CUDA devices"/></testcase>
<testcase classname="" name="tests.test_d"><skipped message="collection skipped"/></testcase>
<testcase classname="" name="tests.test_e"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


def test_outcome_of_reports() -> None:
    found = evidence.outcome(list(ET.fromstring(REPORT).iter("testcase")))
    assert [found[kind] for kind in ("tests", "failures", "errors", "skipped")] == [9, 2, 2, 4]
    assert found["failed"] == ["tests.test_a::test_fails", "tests.test_a::test_fails_twice", "::tests.test_e"]
    assert found["skip_reasons"] == {"needs two CUDA devices": 2, "why": 1, "collection skipped": 1}
    assert found["modules_skipped"] == ["tests.test_d", "tests.test_two_devices"]
    assert found["baselines"] == {"default": 2, "math": 1, "three calls": 1}
    assert found["other_baselines"] == ["tests.test_a::test_passes[x]", "tests.test_a::test_fails"]
    many = [ET.fromstring(f'<testcase classname="m" name="{i}"><failure/></testcase>') for i in range(60)]
    assert len(evidence.outcome(many)["failed"]) == 50


def test_a_process_that_does_not_finish_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("gpu_check")

    def run(command: list[str], *, cwd: Path, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        assert cwd.name == "tests" and "--whole" in command
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


PARTS: dict[str, Any] = {
    "everyday": {"rows": [{"torch_failed": "out of memory"}], "left_out": 0},
    "variants": {"rows": [{"within": False}], "left_out": 0},
    "host_time": [{"name": "a", "ours": 9.0, "torch": 5.0}],
}


def counts(**changes: Any) -> dict[str, Any]:
    return {"tests": 9, "failures": 0, "errors": 0, "skipped": 2, "modules_skipped": []} | changes


def complete(**changes: Any) -> dict[str, Any]:
    record = {"csrc_tree": TREE, "complete": True, "error_rule": [], "gpu_tests": counts(), "sanitizer": {}}
    record["linear"] = {part: {"within_rule": True} for part in evidence.LINEAR}
    return record | {"randomised": {"asked": 5, "count": 5, "failed": 0}} | changes


def test_what_passes() -> None:
    assert evidence.passed(complete()) and evidence.passed({"csrc_tree": TREE, "error_rule": []}, ())
    assert evidence.passed(complete(**PARTS)), "a call of PyTorch's that failed, and an option past its limit, are none of ours"
    for wrong in (
        {"gpu_tests": counts(failures=1)},
        {"gpu_tests": counts(errors=1)},
        {"gpu_tests": counts(skipped=9)},
        {"gpu_tests": counts(modules_skipped=["tests.test_a"])},
        {"sanitizer": {"memcheck": {"clean": True}, "initcheck": {"clean": False}}},
        {"randomised": {"asked": 5, "count": 4, "failed": 0}},
        {"randomised": {"asked": 5, "count": 5, "failed": 1}},
        {"bench_failed": True},
        {"shapes_failed": True},
        {"everyday_failed": True},
        {"host_time_failed": True},
        {"everyday": {"rows": [{"name": "a"}, {"ours_failed": "out of memory"}], "left_out": 0}},
        {"variants": {"rows": [{"not_available": "out of memory"}], "left_out": 0}},
        {"linear": {}},
    ):
        assert not evidence.passed(complete(**wrong)), wrong


@pytest.mark.parametrize(
    ("two_cards", "tree", "passes"),
    [
        (None, TREE, False),
        (counts(csrc_tree=TREE), TREE, True),
        (counts(csrc_tree=OTHER), TREE, False),
        (counts(csrc_tree="unknown"), "unknown", False),
        (counts(csrc_tree=f"{TREE}-dirty"), f"{TREE}-dirty", False),
        (counts(csrc_tree=TREE, failures=1), TREE, False),
        (counts(csrc_tree=TREE, modules_skipped=["tests.test_two_devices"]), TREE, False),
    ],
)
def test_two_cards_elsewhere(two_cards: dict[str, Any] | None, tree: str, passes: bool) -> None:
    """They stand for the modules that one card skips, on the same csrc tree, and for no other module."""
    skipped = counts(modules_skipped=["tests.test_two_devices", "tests.test_two_devices_dtensor"])
    record = complete(csrc_tree=tree, gpu_tests=skipped, two_cards=two_cards)
    assert evidence.passed(record) == passes
    assert not evidence.passed(record | {"gpu_tests": counts(modules_skipped=["tests.test_a", *skipped["modules_skipped"]])})


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
    """The first is timed; the parts come after the tests, the tests of two cards with both last."""
    module, done = script("gpu_check"), []

    def run(what: str, result: Any) -> Any:
        return lambda *args: (done.append((what, args[-1].get("CUDA_VISIBLE_DEVICES"))), result)[1]

    monkeypatch.setattr(module, "install", lambda wheel: ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}, about(TREE, cards)))
    monkeypatch.setattr(module, "THERE", ["host_time"])
    monkeypatch.setattr(module, "run_bench", lambda name, options, env: run(name, (0, {"error_rule": []}))(env))
    monkeypatch.setattr(module, "run_tests", lambda shares, env: run(f"{len(shares)} shares", [])(env))
    monkeypatch.setattr(module, "run_two_cards", run("two cards", []))
    monkeypatch.setattr("sys.argv", ["gpu_check", "some.whl", "--out", str(tmp_path), "--skip-sanitizer", "--examples", "0"])
    module.main()
    first, second = (visible or "0,1").split(",") if cards > 1 else (None, None)
    tests = (f"{module.PROCESSES} shares", second)
    timed = [("record", first), ("record_shapes", first), ("host_time", first)]
    assert [one for one in done if one in timed] == timed and done.count(tests) == 1
    if cards > 1:
        assert done.index(tests) < done.index(timed[-1]) and done[-1] == ("two cards", visible) and len(done) == 5
    else:
        assert done == [*timed, tests]


def test_continue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests for the benches of a command before: the record is complete, and of one kind of card and csrc tree."""
    module, benches, envs = script("gpu_check"), [], []
    bench = {"shapes_summary": {}} | {name: complete()[name] for name in ("error_rule", "linear")}
    tests = [ET.fromstring(f'<testcase classname="tests.{name}" name="t"/>') for name in ("test_a", "test_two_devices")]

    def check(*arguments: str, tree: str = TREE, cards: int = 1) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(module, "install", lambda wheel: ({}, about(tree, cards) | {"uuid": f"GPU-{cards}"}))
        monkeypatch.setattr("sys.argv", ["gpu_check", "some.whl", "--out", str(tmp_path), "--commit", "c", *arguments])
        return module.main(), json.loads((tmp_path / "some_card.json").read_text())

    monkeypatch.setattr(module, "THERE", [])
    monkeypatch.setattr(module, "run_bench", lambda name, options, env: (0, (benches.append(name), bench)[1]))
    monkeypatch.setattr(module, "run_tests", lambda shares, *given: (envs.append(given), tests[: len(given)])[1])
    monkeypatch.setattr(module, "run_sanitizer", lambda *_: {"clean": True})
    monkeypatch.setattr(module, "run_randomised", lambda examples, env: {"asked": examples, "count": examples, "failed": 0})
    with pytest.raises(SystemExit, match=r"--continue: .*some_card.json is of another .*, or not there"):
        check("--continue")
    code, first = check("--skip-tests", "--skip-sanitizer", "--examples", "0")
    assert code == 0 and first["benches_complete"] and not first["complete"] and not first["sound"]
    with pytest.raises(SystemExit, match="is of another csrc_tree, or"):
        check("--continue", tree=OTHER)
    code, whole = check("--continue")
    assert code == 0 and whole["sound"] and whole["gpu_tests"]["tests"] == 1 and whole["linear"] == first["linear"]
    assert whole["checked_on"]["uuid"] == "GPU-1" and "two_cards" not in whole and envs == [({},)]
    code, whole = check("--continue", cards=2)
    assert code == 0 and whole["sound"] and whole["gpu_tests"]["tests"] == 2 and whole["two_cards"]["tests"] == 1
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs[1]] == ["0,1", "1,0"] and whole["checked_on"]["uuid"] == "GPU-2"
    assert benches == ["record", "record_shapes"]


@pytest.mark.parametrize("change", ["", "left out", "failed", "absent"])
def test_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str) -> None:
    """Each is a script of bench/ whose object becomes a part of the record; a call that was left out makes it incomplete."""
    module = script("gpu_check")
    asked = []

    def run_bench(name: str, options: list[str], env: dict[str, str]) -> tuple[int, dict[str, Any] | None]:
        asked.append((name, options))
        if name == "record":
            return 0, {name: complete()[name] for name in ("error_rule", "linear")}
        if name == "record_shapes":
            return 0, {"shapes_summary": {}}
        left_out = {"left_out": 1} if (name, change) == ("variants", "left out") else {}
        code = int((name, change) == ("variants", "failed"))
        return code, {name: PARTS[name] | left_out if left_out else PARTS[name]}

    monkeypatch.setattr(module, "THERE", ["everyday", "variants", "host_time"][: 2 if change == "absent" else 3])
    monkeypatch.setattr(module, "install", lambda wheel: ({}, about(TREE, 1)))
    monkeypatch.setattr(module, "run_bench", run_bench)
    monkeypatch.setattr(module, "run_tests", lambda shares, env: [ET.fromstring('<testcase classname="a" name="t"/>')])
    monkeypatch.setattr(module, "run_sanitizer", lambda *_: {"clean": True})
    monkeypatch.setattr(module, "run_randomised", lambda examples, env: {"asked": examples, "count": examples, "failed": 0})
    monkeypatch.setattr("sys.argv", ["gpu_check", "some.whl", "--out", str(tmp_path)])
    code = module.main()
    record = json.loads((tmp_path / "some_card.json").read_text())
    assert asked == [("record", []), ("record_shapes", list(module.LISTS)), *((part, []) for part in module.THERE)]
    assert record["seconds"].keys() == {"benches", "shapes", *module.THERE, "tests_and_sanitizers"}
    assert record["complete"] == (change != "left out") and code == int(change == "failed")
    assert record["sound"] == (change in ("", "absent")) and record.get("variants_failed", False) == (change == "failed")
    assert ("host_time" in record) == (change != "absent") and record["everyday"] == PARTS["everyday"]


def test_table_says_two_cards_and_names_the_sanitizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tables = script("make_tables.py")
    record = json.loads((ROOT / "bench" / "results" / "nvidia_h100_80gb_hbm3.json").read_text()) | {"csrc_tree": TREE}
    record["sanitizer"] = {"memcheck": {"clean": True}, "initcheck": {"clean": False}}
    for two_cards, text in ((None, "not run on this csrc"), (OTHER, "not run on this csrc"), (TREE, "7 run, 1 failed")):
        record["two_cards"] = two_cards and counts(csrc_tree=two_cards, failures=1)
        sentence = f"those that need two cards: {text}. compute-sanitizer: memcheck clean, initcheck NOT clean."
        assert sentence in "\n".join(tables.TABLES["checks"](record))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "other.json").write_text(json.dumps({"two_cards": record["two_cards"]}))
    assert tables.records() == {}, "a record of two cards alone has no table"


def test_last_json() -> None:
    last_json = script("gpu_check").last_json
    outcome = {"count": 3, "failures": [{"seed": 1}, {}]}
    for indent in (None, 1):
        assert last_json("noise\n{1}\n" + json.dumps(outcome, indent=indent) + "\nmore {}\n") == outcome
    assert last_json("no object") is None and last_json("{broken") is None
