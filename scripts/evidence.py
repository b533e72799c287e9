"""What a record of scripts/gpu_check is worth: the outcome of its tests, and whether what ran passed."""

import contextlib
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from typing import Any

LINEAR = ("lin84 train", "lin84 eval", "lin84 product")  # cases and parts of bench/linear_cases.py, which imports torch
BASELINES = ("default", "math", "three calls")  # of tests/support/helpers.py, torch_own
PARTS = ("kernelbench", "variants", "everyday", "host_time")  # scripts of bench/ that print a JSON object with this key
ALONE = PARTS[1:]  # the host's time counts in these
TWO_CARDS = "test_two_devices"  # begins the names of the modules that need two cards
# Where a row ends within 16 bytes, cp.async reads what there is of them and fills up with zeros. initcheck takes all 16 for read,
# and what lies between the rows of a workspace is never written. The tests fill it with NaN, which would show.
SHORT_COPY = " at attention_ext::cp_async_16_zero_filled("


def outcome(cases: list[ET.Element]) -> dict[str, Any]:
    """Of the cases of pytest's reports: counts, which failed, why others were skipped, modules of which all were, and which of
    PyTorch's results the others were compared with."""
    kinds = ("failure", "error", "skipped")
    failures, errors, skipped = ([case for case in cases if case.find(kind) is not None] for kind in kinds)
    others = [case for case in cases if case not in skipped]
    reasons = Counter(reason(skip) for case in skipped for skip in case.iterfind("skipped"))
    baselines = [(case, found.get("value")) for case in cases for found in case.iterfind("properties/property[@name='baseline']")]
    return {
        "tests": len(cases),
        "failures": len(failures),
        "errors": len(errors),
        "skipped": len(skipped),
        "failed": ids(failures + errors),
        "skip_reasons": dict(reasons.most_common()),
        "modules_skipped": sorted({module_of(case) for case in skipped} - {module_of(case) for case in others}),
        "baselines": {kind: sum(name == kind for _, name in baselines) for kind in BASELINES},
        "other_baselines": ids([case for case, name in baselines if name != "default"]),
    }


def reason(skip: ET.Element) -> str:
    """Of a module that was skipped whole it stands in the text: ('FILE', LINE, 'Skipped: REASON')."""
    whole = re.search(r"Skipped: (.*).\)$", skip.text or "", re.DOTALL)
    return whole[1] if whole else skip.get("message", "no reason")


def module_of(case: ET.Element) -> str:
    """A module that was skipped or broke while it was imported is a case without a class."""
    return case.get("classname") or case.get("name", "")


def ids(cases: list[ET.Element]) -> list[str]:
    """Each case once, 50 at most."""
    return list(dict.fromkeys(f"{case.get('classname')}::{case.get('name')}" for case in cases))[:50]


def shapes_sound(record: dict[str, Any]) -> bool:
    """Every shape ran, without a NaN, within the error rule. How fast is another matter: the summary says it."""
    kinds = ("ours_failed", "not_finite", "outside_rule")
    summaries = record.get("shapes_summary", {}).values()
    return not record.get("shapes_failed") and all(not summary[kind] for summary in summaries for kind in kinds)


def parts_sound(record: dict[str, Any]) -> bool:
    """What ran of the parts came to its end, no call of ours failed, and KernelBench's results are its Model's. How fast, and what
    an option costs, is another matter."""
    rows = [row for name in ("everyday", "variants") for row in record.get(name, {}).get("rows", ())]
    rows += record.get("kernelbench", ())
    failed = any("ours_failed" in row or "not_available" in row or not row.get("within_limit", True) for row in rows)
    return not failed and not any(record.get(f"{name}_failed") for name in PARTS)


def lacking(record: dict[str, Any], lists: Sequence[str]) -> list[str]:
    """Which of these lists of shapes, and which parts, are not in the record; parts of which calls were not begun in time."""
    absent = [name for name in lists if name not in record.get("shapes_summary", {})]
    absent += [part for part in PARTS if part not in record]
    left_out = {name: record.get(name, {}).get("left_out", 0) for name in ("everyday", "variants")}
    return absent + [f"{count} calls of {name}" for name, count in left_out.items() if count]


def forward_sound(record: dict[str, Any]) -> bool:
    return all(case["within_rule"] for case in record.get("forward", {}).values())


def bench_sound(record: dict[str, Any], linear: Sequence[str] = LINEAR) -> bool:
    """bench/record.py came to its end, and everything it compared is within the rules; `linear`: what it was to do of LINEAR."""
    ended = "bench_failed" not in record and "failed" not in record
    attention = ended and all(row["within_rule"] for row in record["error_rule"]) and forward_sound(record)
    return attention and linear_sound(record, linear)


def linear_sound(record: dict[str, Any], parts: Sequence[str] = LINEAR) -> bool:
    """These parts of the linear cases ran, and all that ran have errors at most 1.05 times PyTorch's without TF32."""
    ran = record.get("linear", {})
    return set(parts) <= set(ran) and all(part["within_rule"] for part in ran.values())


def needs_two_cards(module: str) -> bool:
    return module.split(".")[-1].startswith(TWO_CARDS)


def last_json(text: str) -> dict[str, Any] | None:
    """The last object that begins at the start of a line."""
    starts = [match.start() for match in re.finditer(r"^\{", text, re.MULTILINE)]
    for start in reversed(starts):
        with contextlib.suppress(json.JSONDecodeError):
            found: dict[str, Any] = json.JSONDecoder().raw_decode(text, start)[0]
            return found
    return None


def unwritten_reads(text: str) -> list[str]:
    """initcheck's reports, but for those that name another package's kernel or a short copy."""
    reports = re.split(r"^=+ (?=Uninitialized )", text, flags=re.MULTILINE)[1:]
    on_device = [re.split(r"\bhost\b", report, maxsplit=1, flags=re.IGNORECASE)[0] for report in reports]
    return [report for report in on_device if ("attention_ext" in report or " at " not in report) and SHORT_COPY not in report]


def tests_passed(counts: dict[str, Any], two_cards: bool = False) -> bool:
    """Some ran, none failed, and no module was skipped whole, but for those that need two cards where they passed elsewhere."""
    skipped = [module for module in counts["modules_skipped"] if not (two_cards and needs_two_cards(module))]
    return counts["failures"] + counts["errors"] == 0 and counts["tests"] > counts["skipped"] and not skipped


def two_cards_passed(record: dict[str, Any]) -> bool:
    """On the csrc tree of this record."""
    counts = of_the_same_csrc(record.get("two_cards"), record)
    return counts is not None and tests_passed(counts)


def of_the_same_csrc(two_cards: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any] | None:
    """The outcome, if it is of exactly the csrc tree of this record: one in git."""
    tree = record["csrc_tree"]
    same = two_cards is not None and two_cards["csrc_tree"] == tree and re.fullmatch("[0-9a-f]{40}", tree) is not None
    return two_cards if same else None


def passed(record: dict[str, Any], linear: Sequence[str] = LINEAR) -> bool:
    """Nothing failed of what ran, and the tests left out no module."""
    tests, examples = record.get("gpu_tests"), record.get("randomised")
    return (
        bench_sound(record, linear)
        and shapes_sound(record)
        and parts_sound(record)
        and (tests is None or tests_passed(tests, two_cards_passed(record)))
        and (examples is None or (examples["count"] >= examples["asked"] and not examples["failed"]))
        and all(result["clean"] for result in record.get("sanitizer", {}).values())
    )
