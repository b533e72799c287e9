"""Records as scripts/gpu_check makes them, made up: what passes, and what its scripts of bench/ give."""

from __future__ import annotations

from typing import Any

import evidence

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
<testcase classname="" name="tests.test_d">
  <skipped message="collection skipped">('/a/tests/test_d.py', 2, "Skipped: it's not there: pip install it")</skipped></testcase>
<testcase classname="" name="tests.test_e"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


PARTS: dict[str, Any] = {
    "everyday": {"rows": [{"torch_failed": "out of memory"}], "left_out": 0},
    "variants": {"rows": [{"within": False}], "left_out": 0},
    "host_time": [{"name": "a", "function": 9.0, "torch": 5.0, "ratio": 1.8, "goal": 1.3, "kept": False}],
    "kernelbench": [
        {"name": "a", "ours": 2.0, "torch": 5.0, "ratio": 2.5, "max_difference": 1e-6, "limit": 1e-4, "within_limit": True}
    ],
}


SUMMARY = {"ours_failed": 0, "not_finite": 0, "outside_rule": 0}


def benched(name: str, options: list[str], env: Any = None) -> tuple[int, dict[str, Any] | None]:
    """In place of a script of bench/."""
    if name == "record":
        return 0, {name: complete()[name] for name in ("error_rule", "linear")}
    if name == "record_shapes":
        return 0, {"shapes": {name: [] for name in options}, "shapes_summary": {name: SUMMARY for name in options}}
    return 0, {name: PARTS[name]}


def counts(**changes: Any) -> dict[str, Any]:
    return {"tests": 9, "failures": 0, "errors": 0, "skipped": 2, "modules_skipped": []} | changes


def complete(**changes: Any) -> dict[str, Any]:
    record = {"csrc_tree": TREE, "complete": True, "error_rule": [], "gpu_tests": counts(), "sanitizer": {}}
    record["linear"] = {part: {"within_rule": True} for part in evidence.LINEAR}
    return record | {"randomised": {"asked": 5, "count": 5, "failed": 0}} | changes
