"""The tables and the chart that scripts/make_tables.py makes of bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import everyday
import make_tables
import pytest
import ratio_chart
import record_shapes
import speed_chart
import tables

ROOT = make_tables.ROOT
H100 = json.loads((ROOT / "bench" / "results" / "nvidia_h100_80gb_hbm3.json").read_text())
OWN, ROUTED = {"forward": "sm90_512", "backward": "pipeline", "both": "sm90_512"}, dict.fromkeys(everyday.WAYS, "torch: flash")


def call(kind: str, E: int, ratios: tuple[float, ...], kernels: dict[str, str], **other: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"name": f"bfloat16 {kind} {E}", "kind": kind, "dtype": "bfloat16", "E": E, "S": 2048}
    row |= {way: {"ours": 1.0, "torch": r, "ratio": r} for way, r in zip(everyday.WAYS, ratios, strict=False)}
    return row | {"kernels": kernels, "torch_back_ends": dict.fromkeys(everyday.WAYS, "cudnn"), "torch_breaks": {}} | other


CALLS = [
    call("plain", 64, (1.0, 0.99, 1.01), ROUTED),
    call("plain", 512, (4.0, 2.0, 3.0), OWN),
    call("band", 64, (0.6, 1.5, 0.9), OWN, torch_breaks=dict.fromkeys(everyday.WAYS, "masked_rows")),
    call("band", 512, (3.5,), OWN),
    call("cross", 64, (1.0, 0.5, 0.7), ROUTED, S=77, torch_breaks=dict.fromkeys(everyday.WAYS[1:], "gradients")),
    call("plain", 1024, (), OWN, torch_failed="out of memory", forward={"ours": 1.0}),
]
PARTS = {
    "everyday": {
        "rows": CALLS,
        "summary": everyday.summary(CALLS),
        "slower_below": 0.95,
        "left_out": 2,
        "torch_broken": {
            "masked_rows": {"largest": 0.53},
            "gradients": [{"S": S, "not_finite": S - 77, "of": 1000} for S in (77, 192, 1999)],
        },
    },
    "variants": {
        "rows": [
            {"option": "causal", "E": 512, "ratio": 0.7, "limit": None, "within": True},
            {"option": "causal", "E": 768, "ratio": 0.61, "limit": 0.65, "within": True},
            {"option": "bias gradient", "E": 512, "ms_more": 2.25, "limit": 1.5, "within": False},
            {"option": "bias gradient", "E": 768, "not_available": "out of memory"},
        ],
        "left_out": 3,
    },
    "host_time": [
        {"name": "tiny", "operator": 16.0, "function": 12.0, "torch": 8.0, "ratio": 2.0, "goal": 1.3, "kept": False},
        {"name": "linear", "function": 8.0, "torch": 8.0, "ratio": 1.0, "goal": 1.05, "kept": True},
    ],
    "kernelbench": [
        {"name": "level 1", "ours": 2.0, "torch": 5.0, "ratio": 2.5, "max_difference": 1.5e-6},
        {"name": "wrong", "ours": 2.0, "torch": 5.0, "ratio": 2.5, "max_difference": 0.25, "limit": 1e-4, "within_limit": False},
        {"name": "level 2", "not_available": "out of memory"},
    ],
}


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
    assert sorted(places) == sorted([*tables.TABLES, *make_tables.CLIENT_TABLES])
    assert sum(page.count("<!-- table") for page in pages) == len(places)
    kept = ("card", "csrc_tree", "ceilings", "driver", "torch", "date", "error_rule", "gpu_tests", "sanitizer", "sound")
    bare = {key: H100[key] for key in kept} | {"forward": {name: H100["forward"][name] for name in ("d64", "dec512")}}
    for name in tables.TABLES.keys() - {"cpu", "ratios"}:
        whole, part = text_of(name, H100 | PARTS), text_of(name, bare)
        assert len(whole) > len(part) and "nan" not in whole, name
    assert "not sound" in tables.title(H100 | {"sound": False}) and "not sound" not in tables.title(H100 | {"sound": True})


def test_tables_of_clients_and_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From files of their own: a row for each model and for each way of attention, and what could not be measured."""
    about = {"card": "Some Card", "torch": "2.0", "csrc_tree": "a" * 40, "date": "2000-01-01"}
    ours, default = {"ms": 2.0, "peak_bytes": 3 << 20, "kernels": {"sdpa: sm90_512": 6}}, {"ms": 5.0, "peak_bytes": 7 << 20}
    clients = {"a model": {"attention_ext": ours, "default": default, "ratio": 2.5}, "another": {"not_available": "no room"}}
    curve = {"losses": [4.0] + [1.0] * 10, "ms_per_step": 8.0}
    training = {"training": {"math": curve, "attention_ext": curve | {"ms_per_step": 3.0}}, "distance": {"attention_ext": 0.25}}
    (tmp_path / "bench" / "results").mkdir(parents=True)
    for name, record in (("clients_a", {"transformers": "5", "clients": clients}), ("training_a", training)):
        (tmp_path / "bench" / "results" / f"{name}.json").write_text(json.dumps(about | record))
    monkeypatch.setattr(make_tables, "ROOT", tmp_path)
    text = {}
    for name in make_tables.CLIENT_TABLES:
        place = f"<!-- table {name}: python scripts/make_tables.py -->\n<!-- end of table -->"
        text[name] = make_tables.PLACE.sub(lambda found: make_tables.filled(found, {}), place)
        assert "**Some Card**" in text[name] and f"`bench/results/{name}_a.json`, by `bench/{name}.py`" in text[name]
        assert len({line.count("|") for line in text[name].splitlines() if line.startswith("|")}) == 1
    assert "| a model | 2.00 | 5.00 | 2.50 | 3, 7 | 6 sdpa: sm90_512 |" in text["clients"] and "no room" in text["clients"]
    assert "| attention_ext | 3.00 | 4.000 | 1.0000 | 0.25 |" in text["training"] and "| math | 8.00 |" in text["training"]


def test_the_readme_shows_the_newest_record() -> None:
    def dated(date: str, **about: Any) -> dict[str, Any]:
        return {"date": date, **about}

    found = {"a": dated("2026-11-02", sound=True), "b": dated("2026-11-03", sound=False), "c": dated("2026-11-01", sound=True)}
    assert make_tables.newest(found) == "b", "its title says that it is not sound"
    assert make_tables.newest(found | {"cpu": dated("2026-11-09")}) == "b", "a record of the CPU is never one of a card"
    assert make_tables.newest(found | {"d": dated("2026-11-03", sound=True)}) == "d"


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


def test_the_ratios_show_all_that_was_compared() -> None:
    lost = H100["forward"]["d64"] | {"ratio_to_torch": None}
    record = H100 | {"forward": H100["forward"] | {"lost": lost}, "backward": {"d256c": {"attention_ext": 4.0, "torch": 3.0}}}
    bars = {bar.name.split(":")[0]: bar for bar in ratio_chart.ratios(record)}
    assert bars.keys() == H100["forward"].keys() | H100["linear"].keys()
    assert bars["d256c"] == ("Backward alone", "d256c: head dim 256, bfloat16, causal", 0.75)
    picture = ElementTree.fromstring(ratio_chart.ratio_chart(record))
    kinds = [element.get("class") for element in picture.iter() if element.tag.endswith("rect")]
    ratios = [bar.ratio for bar in ratio_chart.ratios(record)]
    assert (
        kinds.count("ours") == sum(ratio >= 1.0 for ratio in ratios) and kinds.count("slower") == sum(r < 1.0 for r in ratios) > 0
    )
    widths = [float(element.get("width")) for element in picture.iter() if element.get("class") in ("ours", "slower")]
    assert max(widths) == widths[ratios.index(max(ratios))] and "55.71" in "".join(picture.itertext())


def test_own_kernels_stand_apart() -> None:
    """In the chart's place of the default where that is PyTorch's, and in the tables next to it."""
    forward = H100["forward"]
    routed = forward["d128"] | {"kernel": "torch: cudnn", "ratio_to_torch": 1.01}
    rates = {"attention_ext": {"tflops": 300.0, "ms": 1.0}, "torch": {"tflops": 600.0, "ms": 0.5}}
    wide = forward["d128"] | {"rows": rates, "Ev": 64, "B": 99}
    record = H100 | {"forward": forward | {"d128": routed, "d128 own": forward["d128"], "d128v64": wide}}
    assert speed_chart.points(record) == speed_chart.points(H100)
    text = text_of("chart", record)
    assert "For d128 `sdpa` runs PyTorch's kernels: 1.01 times as fast." in text
    assert "`sdpa` runs" not in text_of("chart", H100)
    lines = tables.forward_table(record | {"forward": {"d128": routed, "d128 own": forward["d128"] | {"Ev": 64}}})
    assert "`torch: cudnn`" in lines[-2] and lines[-1].startswith("| d128 own |") and "128 (values 64), " in lines[-1]
    highlights = tables.highlights_table(
        H100 | {"forward": {"d128c own": forward["d128c"], "d128c": routed}, "backward": {}, "linear": {}}
    )
    assert len(highlights) == 3 and "by own kernels | 2.97 | 1.73 | 0.58" in highlights[-1]


def test_everyday_calls() -> None:
    text = text_of("everyday", PARTS)
    line = (
        "Everyday calls (`bench/everyday.py`) at least 0.95 times as fast as PyTorch's default: forward 4 of 5 (0.60 at the least, "
    )
    assert text.startswith(line) and "both 2 of 4 (0.70 at the least" in text.splitlines()[0]
    assert text.splitlines()[0].endswith("Left out for want of time: 2.") and text.splitlines()[0] in text_of(
        "highlights", H100 | PARTS
    )
    gradients = "gradients not finite: 0 of 1000 at S = 77, 115 of 1000 at S = 192"
    rows = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| "))
    assert rows["plain, bfloat16"] == "1.00 0.99 1.01 | 4.00 2.00 3.00"
    assert rows["band, bfloat16"] == "0.60 1.50 0.90 | 3.50 |  | at 64: masked rows 0.53, not 0"
    assert rows["cross, bfloat16"] == f"1.00 0.50 0.70 |  |  | at 64: {gradients}"
    slower = [line for line in text.splitlines() if line.startswith("| bfloat16")]
    assert slower == [
        "| bfloat16 band 64 | forward | `sm90_512` | 1.00 | 0.600 | 0.60 | cudnn | masked rows 0.53, not 0 |",
        "| bfloat16 band 64 | both | `sm90_512`, `pipeline` | 1.00 | 0.900 | 0.90 | cudnn | masked rows 0.53, not 0 |",
        f"| bfloat16 cross 64 | backward alone | `torch: flash` | 1.00 | 0.500 | 0.50 | cudnn | {gradients} |",
        f"| bfloat16 cross 64 | both | `torch: flash` | 1.00 | 0.700 | 0.70 | cudnn | {gradients} |",
    ]
    assert "Not measured: bfloat16 plain 1024: out of memory." in text
    fast = PARTS["everyday"] | {"rows": CALLS[:2], "left_out": 0, "torch_broken": {"not_available": "x"}}
    text = text_of("everyday", {"everyday": fast})
    assert "None is slower." in text and "Left out" not in text and "Not measured" not in text
    unknown = text_of("everyday", {"everyday": fast | {"rows": CALLS[2:5]}})
    assert "masked rows, not measured" in unknown and "gradients not finite: not measured" in unknown


def test_other_libraries_both_ways() -> None:
    """Each next to ours of its own process, PyTorch's back ends next to ours of the record; by own kernels where they are apart."""
    row, ours = {"ms": 3.0, "ms_second_pass": 3.1, "ours_ms_in_between": 2.0}, {"attention_ext": {"ms": 1.5}}
    lost = {"not_available": "no"}
    forward = {
        "g512": {"kernel": "sm90_512", "rows": ours | {"ffpa": row, "torch_cudnn": lost}},
        "d64": {"kernel": "torch: cudnn", "rows": ours | {"torch": {"ms": 1.0}}},
        "d64 own": {"kernel": "sm90_256", "rows": ours | {"fa4": row | {"ms": 1.8}, "torch_cudnn": {"ms": 3.0}}},
    }
    back = {"backward": 9.0, "ours_backward": 4.5}
    backward = {
        "g512": {"attention_ext": 4.0, "ffpa": back},
        "d384": {"attention_ext": 4.0, "ffpa": lost},
        "d64": {"attention_ext": 4.0, "torch_flash": 2.0},
        "d64 own": {"attention_ext": 4.0, "torch_flash": 2.0, "fa4": back | {"ours_backward": 10.0}},
    }
    record = {"forward": forward, "backward": backward, "peers": {"ffpa_attn": "1.0", "flash_attn_4": "4"}}
    columns = ("FFPA 1.0", "FlashAttention-4 4", "PyTorch's cuDNN", "PyTorch's FlashAttention-2")
    assert tables.peers_table(record) == [
        f"| case | kernel | ours, ms | {' | '.join(f'{name}, ms (times ours)' for name in columns)} |",
        "|---|---|---|---|---|---|---|",
        "| g512 | `sm90_512` | 1.50 | 3.00 (1.50) |  |  |  |",
        "| d64 own | `sm90_256` | 1.50 |  | 1.80 (0.90) | 3.00 (2.00) |  |",
        "| g512, backward |  | 4.00 | 9.00 (2.00) |  |  |  |",
        "| d64 own, backward |  | 4.00 |  | 9.00 (0.90) |  | 2.00 (0.50) |",
    ]
    ffpa, fa4 = (
        "FFPA 1.0 takes 1.50 to 1.50 times our time forward, 2.00 to 2.00",
        "FlashAttention-4 4 takes 0.90 to 0.90 times our time",
    )
    assert (
        tables.peers_text(record)
        == f"In one process, {ffpa} times our time backward; {fa4} forward, 0.90 to 0.90 times our time backward."
    )
    assert tables.peers_text({"forward": {"d64": forward["d64"]}}) == "" == "".join(tables.peers_table({"forward": {}}))
    with_peers = text_of("highlights", H100 | record | {"linear": {}} | {"forward": H100["forward"] | {"g512": forward["g512"]}})
    assert with_peers.endswith("times our time backward.") and "In one process, FFPA 1.0 takes" in with_peers


def test_options_and_host_time() -> None:
    lines = text_of("variants", PARTS).splitlines()
    assert lines[0] == "| option, head dim | 512 | 768 |"
    assert lines[2] == "| causal | 0.70 | 0.61 (limit 0.65) |"
    assert lines[3] == "| bias gradient | **2.25 ms more** (limit 1.5) | not measured: out of memory |"
    assert lines[-1] == "Left out for want of time: 3."
    made, of_functions = text_of("host_time", PARTS).splitlines()[-2:]
    assert made == "| tiny | 16.0 | 12.0 | 8.0 | **2.00** (1.3) |"
    assert of_functions == "| linear |  | 8.0 | 8.0 | 1.00 (1.05) |"
    assert text_of("kernelbench", PARTS).splitlines()[-3:] == [
        "| level 1 | 2.00 | 5.00 | 2.50 | 1.5e-06 |",
        "| wrong | 2.00 | 5.00 | 2.50 | **2.5e-01** (1e-04) |",
        "| level 2 | not measured: out of memory |  |  |  |",
    ]


def test_stages_in_their_table_and_without() -> None:
    old = {key: value for key, value in H100.items() if key != "stages_sm90_pipeline"}
    rows = {"wgmma_scores": {"ms": 1.125, "launches": 5}}
    new = text_of("stages", old | {"stages_sm90_pipeline": {"kb97": rows}})
    assert "`wgmma_scores` 1.12 in 5 launches" in new and "of `sm90_pipeline` on kb97" in new
    assert "sm90_pipeline" not in text_of("stages", old)
