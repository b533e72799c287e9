"""What the benches stand on, without a GPU: lists of cases and shapes, errors on sampled rows, rivals, summaries."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
from types import SimpleNamespace
from typing import Any

import cases
import common
import evidence
import memory
import pytest
import record_shapes
import torch
import torch.nn.functional as F
import training
from cases import CASES, MASKS, SETS, Case
from choice import planned
from shapes import SHAPES, drawn


@pytest.mark.parametrize(
    ("name", "count", "low", "dims"),
    [
        ("class512", 100, 256, {264, 272, 288, 320, 336, 384, 400, 448, 456, 512}),
        ("class1024", 60, 512, {520, 576, 640, 704, 768, 896, 960, 1024}),
    ],
)
def test_lists_of_shapes(name: str, count: int, low: int, dims: set[int]) -> None:
    shapes = SHAPES[name]
    assert len(shapes) == len(set(shapes)) == len({shape.name for shape in shapes}) == count
    assert {shape.E for shape in shapes} == dims
    for shape in shapes:
        assert low < max(shape.E, shape.Ev) <= 2 * low and min(shape.E, shape.Ev) > 256 and shape.E % 8 == shape.Ev % 8 == 0
        assert shape.Hq % shape.Hk == 0 and not (shape.causal and shape.mask)
        assert all(64 <= length <= 16384 for length in (shape.L, shape.S)) and shape.dtype.itemsize == 2
        assert shape.mask is None or shape.S % 16 == 0, "PyTorch's fused operators want masks with aligned rows"
    assert {shape.dtype for shape in shapes} == {torch.float16, torch.bfloat16}
    assert {shape.mask for shape in shapes} == {None, *MASKS}
    assert any(shape.causal and shape.L < shape.S for shape in shapes) and any(
        shape.causal and shape.L > shape.S for shape in shapes
    )
    assert {shape.Hq // shape.Hk for shape in shapes} >= {1, 4, 8} and any(shape.Hk == 1 < shape.Hq for shape in shapes)
    assert any(shape.Ev != shape.E for shape in shapes) and {shape.L for shape in shapes} >= {64, 65, 127, 1000, 4097, 16384}


def test_shapes_are_cheap_for_pytorch() -> None:
    """By a model of an H100: 115 TFLOP/s where 2 blocks of 32 query rows are there for each of 132 processors, or float32 math."""
    for shape in (shape for shapes in SHAPES.values() for shape in shapes):
        visible = sum(min(i + 1, shape.S) for i in range(shape.L)) / (shape.L * shape.S) if shape.causal else 1.0
        flop = 2.0 * shape.scores * (shape.E + shape.Ev)
        busy = min(1.0, shape.B * shape.Hq * math.ceil(shape.L / 32) / 264)
        grouped = shape.Hq != shape.Hk
        seconds = flop / 50e12 + 8 * 4 * shape.scores / 2.5e12 if grouped else flop * visible / 115e12 / busy
        assert seconds < 15e-3 and 4 * shape.scores < 20e9, shape.name


def test_cases() -> None:
    names = [case.name for case in (*CASES, *cases.BIAS_GRADIENTS)]
    assert len(names) == len(set(names)) and sorted(name for kind in SETS.values() for name in kind) == sorted(names)
    assert [case.name for case in cases.choose(["decode", "kb97", "class512", "g512"])] == [
        name for name in names if name in {"kb97", *SETS["class512"], *SETS["decode"]}
    ]
    assert set(cases.BACKWARD) <= set(names) and {"d64", "d128c", "d256c", "g512c"} <= set(cases.BACKWARD)
    assert cases.choose([]) == [] and all(case.cold_l2 == (case.L == 1) for case in CASES)
    assert [case.E for case in cases.choose(["biasgrad"])] == [320, 512, 768, 1024]
    assert all(case.mask is None for case in CASES) and set(memory.PEAKS) <= set(names)
    with pytest.raises(SystemExit, match="no_such"):
        cases.choose(["no_such"])


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str) -> None:
    case = Case("", 2, 3, 3, 20, 32, 8, torch.float16, mask=mask)
    made = case.attn_mask("cpu")
    assert made is not None and torch.equal(made, case.attn_mask("cpu"))
    assert made.dtype == (torch.bool if MASKS[mask].startswith("bool") else torch.float16)
    assert str(tuple(made.shape)) in MASKS[mask].replace("B", "2").replace("Hq", "3").replace("L", "20").replace("S", "32")
    if made.dtype == torch.bool:
        assert made.any(-1).all() and not made.all()


def small(**options: Any) -> Case:
    sizes: dict[str, Any] = {"B": 2, "Hq": 4, "Hk": 4, "L": 30, "S": 48, "E": 24, "dtype": torch.float32}
    return Case("small", **(sizes | options))


KINDS = [{}, {"causal": True}, {"Hk": 2}, {"Hk": 1, "causal": True, "L": 60}, {"Ev": 16}, {"L": 1, "Hk": 2}]


@pytest.mark.parametrize("case", [small(**kind) for kind in [*KINDS, *({"mask": mask} for mask in MASKS)]], ids=str)
def test_samples_and_rivals(case: Case) -> None:
    q, k, v = case.inputs("cpu")
    options = case.options("cpu")
    sample = common.Sample(case, q, k, v, options["attn_mask"])
    own = F.scaled_dot_product_attention(q, k, v, **options)
    good, bad = sample.errors(own), sample.errors(own + 1e-2)
    assert good["relative_frobenius_error"] < 1e-6 and good["max_abs_error"] < 1e-5
    assert bad["max_abs_error"] > 9e-3
    assert common.within_rule(good, good, sample.top, case.dtype) and not common.within_rule(bad, good, sample.top, case.dtype)
    assert not common.within_rule(sample.errors(own * math.nan), good, sample.top, case.dtype)
    if case.mask is None:
        call, how = common.naive(case, q, k, v)
        torch.testing.assert_close(call(), own)
        assert ("group" in how) == (case.Hk != case.Hq) and ("hidden" in how) == case.causal


class Eager:
    """In place of a CUDA graph."""

    count = 3

    def __init__(self, call: Any) -> None:
        self.out = call()

    def times(self) -> list[float]:
        return [2.0, 1.0, 3.0]


def measured(monkeypatch: pytest.MonkeyPatch, **operators: Any) -> dict[str, Any]:
    monkeypatch.setattr(record_shapes, "Captured", Eager)
    monkeypatch.setattr(record_shapes, "DEVICE", "cpu")
    for name, operator in operators.items():
        monkeypatch.setitem(record_shapes.OPERATORS, name, operator)
    return record_shapes.measure(small(mask="pad", E=264, Ev=264))


def broken(*args: Any, **options: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory\nmore of it")


def nothing(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return q * math.nan


def test_a_shape_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch)
    assert row["ms"] == row["torch_ms"] == 2.0 and row["ratio"] == 1.0 and row["within_rule"] and row["finite"]
    assert row["kernel"] == "torch" and json.loads(json.dumps(row)) == row
    total = record_shapes.summary([row, row | {"ratio": 0.96}, row | {"ratio": 0.94, "name": "slow"}])
    assert total["slower_by_more_than_5_percent"] == 1 and total["slowest"]["name"] == "slow" and total["compared"] == 3
    assert not total["ours_failed"] + total["torch_failed"] + total["not_finite"] + total["outside_rule"]


@pytest.mark.parametrize(
    ("operators", "bad"),
    [
        ({"torch": broken}, {"torch_failed"}),
        ({"torch": nothing}, {"torch_failed"}),
        ({"ours": broken}, {"ours_failed"}),
        ({"ours": nothing}, {"not_finite", "outside_rule"}),
        ({"ours": nothing, "torch": broken}, {"torch_failed", "not_finite"}),
        ({"ours": lambda q, k, v, **options: v.mean(-2, keepdim=True).expand_as(q)}, {"outside_rule"}),
    ],
)
def test_a_shape_that_goes_wrong(monkeypatch: pytest.MonkeyPatch, operators: dict[str, Any], bad: set[str]) -> None:
    row = measured(monkeypatch, **operators)
    total = record_shapes.summary([row])
    kinds = ("torch_failed", "ours_failed", "not_finite", "outside_rule")
    assert {kind for kind in kinds if total[kind]} == bad
    assert total["compared"] == (0 if "torch_failed" in bad or "ours_failed" in bad else 1)
    sound = evidence.shapes_sound({"shapes_summary": {"class512": total}})
    assert sound == (bad == {"torch_failed"})


def test_gradients_of_shapes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The worker's lines, one a shape: ours next to PyTorch's, the same gradients, on a stream of its own."""
    streams: list[str] = []

    class Stream(contextlib.nullcontext):
        def __enter__(self) -> None:
            streams.append("entered")

    results: list[tuple[torch.Tensor, ...]] = []

    class Kept(Eager):
        def __init__(self, call: Any) -> None:
            assert streams == ["entered"]
            super().__init__(call)
            results.append(self.out)

    card = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    shapes = [small(**kind) for kind in [*KINDS, *({"mask": mask} for mask in MASKS)]]
    monkeypatch.setitem(SHAPES, "gradients", shapes)
    monkeypatch.setattr(record_shapes, "Captured", Kept)
    monkeypatch.setattr(record_shapes, "DEVICE", "cpu")
    for name, value in {"get_device_properties": card, "Stream": None, "stream": Stream(), "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert record_shapes.worker("gradients", 1) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == len(shapes) - 1 and all(row["ratio"] == 1.0 and row["finite"] and row["kernel"] for row in rows), rows
    for ours, theirs in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert record_shapes.summary(rows)["compared"] == len(rows) and evidence.shapes_sound(
        {"shapes_summary": {"gradients": record_shapes.summary(rows)}}
    )


def test_the_plan_takes_every_shape_of_the_gradients() -> None:
    shapes = SHAPES["gradients"]
    assert len(set(shapes)) == 60 and set(shapes) <= {*SHAPES["class512"], *SHAPES["class1024"]}
    assert all(planned(shape, table="backward").kernel for shape in (*shapes, *SHAPES["gradients256"]))


def test_drawn_shapes() -> None:
    """The same every time, of all kinds, by own kernels, and in all no more work than a minute allows."""
    shapes = SHAPES["class256"]
    assert shapes == SHAPES["gradients256"] == drawn(80, 256) != drawn(80, 1) and len(set(shapes)) == 80
    assert all(32 <= width <= 256 and width % 8 == 0 for shape in shapes for width in (shape.E, shape.Ev))
    assert all(64 <= length <= 8192 for shape in shapes for length in (shape.L, shape.S))
    assert all(shape.dtype.itemsize == 2 and shape.mask is None and shape.Hq % shape.Hk == 0 for shape in shapes)
    assert {shape.dtype for shape in shapes} == {torch.float16, torch.bfloat16}
    kinds = {
        "Ev": [shape.Ev != shape.E for shape in shapes],
        "causal": [shape.causal for shape in shapes],
        "fewer queries": [shape.L < shape.S for shape in shapes],
        "more queries": [shape.L > shape.S for shape in shapes],
        "causal, fewer": [shape.causal and shape.L < shape.S for shape in shapes],
        "causal, more": [shape.causal and shape.L > shape.S for shape in shapes],
        "grouped": [shape.Hq > shape.Hk for shape in shapes],
        "one sequence": [shape.B == 1 for shape in shapes],
        "odd": [shape.S % 2 == 1 for shape in shapes],
        **{f"up to {E}": [E - 64 < shape.E <= E for shape in shapes] for E in (64, 128, 192, 256)},
    }
    assert all(8 <= sum(of) <= 60 for of in kinds.values()), {kind: sum(of) for kind, of in kinds.items()}
    assert sum(2 * shape.scores * (shape.E + shape.Ev) for shape in shapes) < 5e12
    asked = [record_shapes.operators(shape)["ours"] for shape in (*shapes, *SHAPES["class512"])]
    assert asked == [record_shapes.own] * 80 + [record_shapes.OPERATORS["ours"]] * 100


def test_a_shape_by_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says which kernel of this package it was, also where sdpa would run PyTorch's."""
    monkeypatch.setattr(record_shapes, "Captured", Eager)
    monkeypatch.setattr(record_shapes, "DEVICE", "cpu")
    plans: list[dict[str, Any]] = []
    ops = torch.ops.attention_ext
    fakes = {"sdpa_plan": lambda *_, **options: (plans.append(options), ("sm90_256", "why", 0, False))[1], "kernels": lambda _: []}
    monkeypatch.setattr(record_shapes, "OPS", SimpleNamespace(sdpa=broken, sdpa_forward=ops.sdpa_forward, **fakes))
    row = record_shapes.measure(small(Ev=16, Hk=2, causal=True, dtype=torch.float16))
    assert row["kernel"] == "sm90_256" and row["within_rule"] and row["ratio"] == 1.0 and plans == [{"enable_gqa": True}]


def test_a_lost_device_costs_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    def fake(command: list[str], **options: Any) -> Any:
        starts.append(start := int(command[-1]))
        stop, code = {0: (10, 3), 10: (12, -11), 13: (60, 0)}[start]
        lines = "".join(json.dumps({"name": shape.name}) + "\n" for shape in SHAPES["class1024"][start:stop])
        return subprocess.CompletedProcess(command, code, stdout=lines)

    monkeypatch.setattr(subprocess, "run", fake)
    rows = record_shapes.run("class1024")
    assert starts == [0, 10, 13] and [row["name"] for row in rows] == [shape.name for shape in SHAPES["class1024"]]
    assert [index for index, row in enumerate(rows) if "ours_failed" in row] == [12]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "E"), [("class512", 264), ("gradients", 264), ("class256", 136), ("gradients256", 136)])
def test_a_shape_under_a_graph(name: str, E: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, name, [Case("graph", 1, 2, 2, 65, 80, E, torch.bfloat16, mask="bias")])
    assert record_shapes.worker(name, 0) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["ms"] > 0 and row["torch_ms"] > 0 and row["finite"] and row["kernel"], row
    assert name.startswith("gradients") or (row["calls"] > 1 and row["within_rule"]), row


def test_training_in_small(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs from one seed: the same first loss, and distances that are those of the curves."""
    monkeypatch.setattr("sys.argv", ["training.py", "--small", "--device", "cpu", "--steps", "12"])
    assert training.main() == 0
    record = json.loads(capsys.readouterr().out)
    losses = {name: run["losses"] for name, run in record["training"].items()}
    assert list(losses) == ["math", "efficient", "attention_ext"] and all(len(curve) == 12 for curve in losses.values())
    assert all(abs(curve[0] - losses["math"][0]) < 0.02 for curve in losses.values()) and record["small"]
    assert len(set(losses["math"])) == 12, "it trains"
    shifted = {"math": {"losses": [1.0, 2.0]}, "efficient": {"losses": [1.5, 2.0]}, "attention_ext": {"losses": [0.0, 3.0]}}
    assert training.distances(shifted) == {"efficient": 0.25, "attention_ext": 1.0}
