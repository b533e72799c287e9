"""scripts/evidence.py: reports read, what makes a record sound, and what the tables say of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import evidence
import pytest
from loader import script
from made_records import OTHER, PARTS, REPORT, TREE, complete, counts
from paths import ROOT


def test_outcome_of_reports() -> None:
    found = evidence.outcome(list(ET.fromstring(REPORT).iter("testcase")))
    assert [found[kind] for kind in ("tests", "failures", "errors", "skipped")] == [9, 2, 2, 4]
    assert found["failed"] == ["tests.test_a::test_fails", "tests.test_a::test_fails_twice", "::tests.test_e"]
    assert found["skip_reasons"] == {"needs two CUDA devices": 2, "why": 1, "it's not there: pip install it": 1}
    assert found["modules_skipped"] == ["tests.test_d", "tests.test_two_devices"]
    assert found["baselines"] == {"default": 2, "math": 1, "three calls": 1}
    assert found["other_baselines"] == ["tests.test_a::test_passes[x]", "tests.test_a::test_fails"]
    many = [ET.fromstring(f'<testcase classname="m" name="{i}"><failure/></testcase>') for i in range(60)]
    assert len(evidence.outcome(many)["failed"]) == 50


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
        {"shapes_failed": ["class512"]},
        {"everyday_failed": True},
        {"host_time_failed": True},
        {"kernelbench": [{"not_available": "out of memory"}]},
        {"kernelbench": [{"max_difference": 0.1, "limit": 1e-4, "within_limit": False}]},
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
    last_json = evidence.last_json
    outcome = {"count": 3, "failures": [{"seed": 1}, {}]}
    for indent in (None, 1):
        assert last_json("noise\n{1}\n" + json.dumps(outcome, indent=indent) + "\nmore {}\n") == outcome
    assert last_json("no object") is None and last_json("{broken") is None
