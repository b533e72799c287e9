"""The tables and the chart that scripts/make_tables.py makes of bench/results."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import make_tables
import record_shapes
import speed_chart
import tables

ROOT = make_tables.ROOT
H100 = json.loads((ROOT / "bench" / "results" / "nvidia_h100_80gb_hbm3.json").read_text())


def text_of(name: str, record: dict[str, Any]) -> str:
    return "\n".join(tables.TABLES[name](record))


def test_tables_of_what_was_not_measured() -> None:
    first = H100["forward"]["kb97"]
    lost = first | {"rows": {"attention_ext": {"not_available": "out of memory"}, "torch": first["rows"]["torch"]}}
    text = text_of("forward", H100 | {"forward": {"kb97": first, "cold": first | {"cold_l2": True}, "lost": lost}})
    assert text.count("cold L2") == 1 and text.count("out of memory") == 1
    assert len({line.count("|") for line in text.splitlines()}) == 1, "as many columns in every row"
    part = H100["linear"]["lin84 train"]
    lost = part | {"rows": {"attention_ext": {"not_available": "out of memory"}, "torch": part["rows"]["torch"]}}
    text = text_of("linear", {"linear": {"lin84 train": part, "lost": lost, "outside": part | {"within_rule": False}}})
    assert text.count("out of memory") == 1 and text.count("outside the rule") == 1
    assert len({line.count("|") for line in text.splitlines()}) == 1
    row = {"name": "1 8 8 64 64 512 512 bf16 -", "ratio": 1.5, "ms": 1.0, "torch_ms": 1.5, "kernel": "some", "within_rule": True}
    shapes = {"class512": [row], "class1024": [{"ours_failed": "x"}]}
    text = text_of("shapes", {"shapes": shapes, "shapes_summary": {name: record_shapes.summary(shapes[name]) for name in shapes}})
    assert "0 of 1 slower" in text and "ours on 1" in text and "1 by `some`" in text and "nan" not in text


def test_every_table_has_its_place_and_does_without_what_was_not_measured() -> None:
    pages = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
    places = [place[2] for page in pages for place in make_tables.PLACE.finditer(page)]
    assert sorted(places) == sorted(tables.TABLES) and sum(page.count("<!-- table") for page in pages) == len(places)
    kept = ("card", "csrc_tree", "ceilings", "driver", "torch", "date", "error_rule", "gpu_tests", "sanitizer", "sound")
    bare = {key: H100[key] for key in kept} | {"forward": {name: H100["forward"][name] for name in ("d64", "dec512")}}
    for name in tables.TABLES.keys() - {"cpu"}:
        whole, part = text_of(name, H100), text_of(name, bare)
        assert len(whole) > len(part) and "nan" not in whole, name
    assert "not sound" in tables.title(H100 | {"sound": False}) and "not sound" not in tables.title(H100 | {"sound": True})


def test_the_readme_shows_the_newest_sound_record() -> None:
    def dated(date: str, **about: Any) -> dict[str, Any]:
        return {"date": date, **about}

    found = {"a": dated("2026-11-02", sound=True), "b": dated("2026-11-03", sound=False), "c": dated("2026-11-01", sound=True)}
    assert make_tables.newest_sound(found) == "a"
    assert make_tables.newest_sound(found | {"cpu": dated("2026-11-09")}) == "a", "a record of the CPU is never called sound"
    assert make_tables.newest_sound(found | {"d": dated("2026-11-02", sound=True)}) == "d"


def test_the_chart_shows_a_case_of_each_head_dim() -> None:
    points = {point.head_dim: point for point in speed_chart.points(H100)}
    rates = {name: {row: found.get("tflops") for row, found in H100["forward"][name]["rows"].items()} for name in H100["forward"]}
    assert sorted(points) == sorted({case["E"] for case in H100["forward"].values()})
    for head_dim, name in ((64, "d64"), (128, "d128"), (256, "d256c"), (512, "g512"), (1024, "d1024")):
        rate, point = rates[name], points[head_dim]
        assert (point.ours, point.torch, point.naive) == (rate["attention_ext"], rate["torch"], rate.get("naive")), name
    assert points[256].causal and not points[512].causal and points[256].naive is None
    picture = ElementTree.fromstring(speed_chart.chart(H100))
    shapes = [element for element in picture.iter() if element.tag.endswith("rect")]
    assert sum(element.get("class") == "ours" for element in shapes) == 1 + len(points), "the legend and the bars"
    assert sum(element.get("class") == "naive" for element in shapes) == len(points), "no bar where nothing was measured"
    text = " ".join(picture.itertext())
    assert H100["card"] in text and H100["csrc_tree"][:12] in text and "not measured at head dim 256" in text


def test_stages_in_their_table_and_without() -> None:
    old = {key: value for key, value in H100.items() if key != "stages_sm90_pipeline"}
    rows = {"wgmma_scores": {"ms": 1.125, "launches": 5}}
    new = text_of("stages", old | {"stages_sm90_pipeline": {"kb97": rows}})
    assert "`wgmma_scores` 1.12 in 5 launches" in new and "of `sm90_pipeline` on kb97" in new
    assert "sm90_pipeline" not in text_of("stages", old)
