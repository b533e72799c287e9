"""bench/record.py and its parts without a GPU: what is timed and when, the stages of a pipeline, parts that fail."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import backward
import cases
import common
import errors
import evidence
import memory
import pipelines
import pytest
import record
import torch
import torch.nn.functional as F
from cases import Case
from loader import script
from paths import CSRC


def test_a_row_rests_before_its_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is idle, and then for REST seconds, before anything of the call runs; the second pass follows at once."""
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("idle"))
    monkeypatch.setattr(common.time, "sleep", done.append)
    monkeypatch.setattr(common._measure, "time_ms", lambda call, device, repeat: done.append(repeat) or 20.0)
    assert common.time_ms(lambda: None) == 20.0 and done == ["idle", common.REST, 1, 15]
    done.clear()
    assert common.time_ms(lambda: None, rested=False) == 20.0 and done == [1, 15]


@pytest.mark.parametrize("kernel", pipelines.STAGES)
def test_stages_by_the_profiler(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Of the kernels' names as csrc spells them, over five calls of three slices."""
    sources = "".join(path.read_text() for path in CSRC.rglob("*.cu"))
    names = pipelines.STAGES[kernel].values()
    named = [f"void attention_ext::(anonymous namespace)::{name}<8>(QkScoresParams)" for name in names]
    assert all(re.search(rf"(__global__[^;{{]*|struct ){name}\b", sources) for name in names)
    events = [SimpleNamespace(key=key, self_device_time_total=5e3, count=15) for key in (*named, "void at::native::fill()")]
    calls: list[dict[str, Any]] = []

    class Profile:
        def __init__(self, **options: Any) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None: ...
        def key_averages(self) -> list[Any]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(pipelines, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(pipelines, "OPS", SimpleNamespace(sdpa_forward=lambda *_, **options: calls.append(options)))
    case = Case("small", 2, 4, 4, 30, 48, 24, torch.float32)
    found = pipelines.stages(case, kernel, {"copy_tb_per_s": 2.0, "matmul_fp16_tflops": 500.0})
    assert all(row["bound_ms"] == max(row["bytes"] / 2e9, row["flop"] / 500e9) for row in found.values())
    assert list(found) == list(pipelines.STAGES[kernel]) and calls == 6 * [{"kernel_name": kernel}]
    assert all(stage["ms"] == 1.0 and stage["launches"] == 3 for stage in found.values())


ROW = {"ms": 2.0, "tflops": 1.0}


@pytest.mark.parametrize(
    "case", [Case("small", 2, 4, 2, 30, 48, 24, torch.float16, Ev=16), Case("wide", 1, 2, 2, 8, 9, 264, torch.float16)]
)
@pytest.mark.parametrize("quick", [False, True])
def test_own_kernels_have_entries_of_their_own(monkeypatch: pytest.MonkeyPatch, case: Case, quick: bool) -> None:
    """Up to head dim 256; each row with its errors, and one row of PyTorch's for both entries."""
    asked: list[dict[str, Any]] = []

    def own(case: Case, *operands: torch.Tensor, **options: Any) -> Any:
        asked.append(options)
        return lambda: common.own_kernels(case, *operands)() + 1.0  # its errors show which row it is

    def measure(case: Case, call: Any, sample: common.Sample, ceilings: dict[str, float], most: int = 30) -> dict[str, Any]:
        return ROW | sample.errors(call())

    plan = Mock(return_value=("sm90_512", "why", 0, False))
    monkeypatch.setattr(record, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(record, "own_kernels", own)
    monkeypatch.setattr(record, "measure", measure)
    monkeypatch.setattr(record, "OPS", SimpleNamespace(sdpa=torch.ops.attention_ext.sdpa, sdpa_plan=plan))
    monkeypatch.setattr(record, "rivals", lambda *_: {"naive": lambda **_: ROW})
    found = record.forward_case(case, {}, quick)
    assert list(found) == (["small", "small own"] if case.E <= 256 else ["wide"])
    assert asked == [{}] * (case.E <= 256) + [{"kernel_name": "pipeline"}] * (not quick)
    default = found[case.name]
    assert default["kernel"] == "torch" and default["ratio_to_torch"] == 1.0 and default["within_rule"]
    assert (default["E"], default["Ev"], default["dtype"]) == (case.E, case.Ev, "torch.float16")
    pipeline = {"pipeline"} if not quick else set()
    if case.E > 256:
        assert default["rows"].keys() == {"attention_ext", "torch", "naive"} | pipeline
        return
    assert plan.call_args.kwargs == {"enable_gqa": True}
    entry = found["small own"]
    assert default["rows"].keys() == {"attention_ext", "torch"} and entry["rows"]["torch"] is default["rows"]["torch"]
    assert entry["rows"].keys() == {"attention_ext", "torch", "naive"} | pipeline and entry["kernel"] == "sm90_512"
    assert entry["rows"]["attention_ext"]["max_abs_error"] > 0.9 > default["rows"]["attention_ext"]["max_abs_error"]
    assert not entry["within_rule"] and not evidence.forward_sound({"forward": found})


@pytest.mark.parametrize(
    "case", [Case("small", 1, 4, 2, 30, 48, 24, torch.float32, causal=True), Case("wide", 1, 2, 2, 8, 9, 264, torch.float32)]
)
def test_gradients_of_a_case(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Ours, PyTorch's and the formula make the same gradients; a call that fails costs its own figures."""
    grads: list[tuple[torch.Tensor, ...]] = []

    def time_ms(call: Any) -> float:
        grads.append(call())
        return float(len(grads))

    monkeypatch.setattr(backward, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(backward, "time_ms", time_ms)
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    found = backward.measure(case)
    assert list(found) == (["small", "small own"] if case.E <= 256 else ["wide"])
    for number, grad in enumerate(grads):
        for one, first in zip(grad, grads[0], strict=True):
            torch.testing.assert_close(one, first, msg=lambda text, number=number: f"call {number}: {text}")
    ours, theirs, formula = (1.0, 3.0, 5.0 if case.E > 256 else 7.0)
    entry = found[case.name]
    assert (entry["attention_ext"], entry["torch"], entry["three_calls"]) == (ours, theirs, formula)
    assert entry["both"] == {"attention_ext": ours + 1, "torch": theirs + 1, "three_calls": formula + 1}
    assert entry["tflops"] == 2.5 * case.flop / ours / 1e9
    if case.E <= 256:
        assert found["small own"]["attention_ext"] == 5.0 and found["small own"]["torch"] == theirs
    monkeypatch.setattr(backward, "naive", lambda *_: (Mock(side_effect=torch.OutOfMemoryError("no room")), ""))
    entry = backward.measure(case)[case.name]
    assert "three_calls" not in entry and "no room" in entry["not_available"]["three_calls"]


def test_pytorchs_back_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to head dim 256 and in half precision those that are fused, in both directions; one that fails costs its own figures."""
    asked: list[str] = []

    def by_back_end(name: str, *operands: torch.Tensor, **options: Any) -> Any:
        asked.append(name)
        return (
            Mock(side_effect=RuntimeError("no kernel"))
            if name == "torch_flash"
            else lambda: F.scaled_dot_product_attention(*operands, **options)
        )

    for module in (record, backward):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
        monkeypatch.setattr(module, "by_back_end", by_back_end)
    monkeypatch.setattr(record, "measure", lambda case, call, **given: (call(), ROW | given)[1])
    monkeypatch.setattr(backward, "time_ms", lambda call: (call(), 2.0)[1])
    case = Case("small", 1, 4, 2, 30, 48, 24, torch.float16, causal=True)
    rows = record.rivals(case, *case.inputs("cpu"), {"is_causal": True, "enable_gqa": True}, False)
    assert list(rows) == asked == ["torch_flash", "torch_cudnn"] and rows["torch_cudnn"]()["most"] == 30
    assert record.rivals(case, *case.inputs("cpu"), {}, True) == {}, "a quick run has none"
    entries = backward.measure(case)
    for entry in entries.values():
        assert entry["torch_cudnn"] == entry["both"]["torch_cudnn"] == 2.0
        assert "no kernel" in entry["not_available"]["torch_flash"] and "torch_flash" not in entry
    assert list(entries) == ["small", "small own"]
    wide = Case("wide", 1, 2, 2, 8, 9, 264, torch.float16)
    assert {*record.rivals(wide, *wide.inputs("cpu"), {}, False)} == {"naive", "naive_compiled", *common.BACK_ENDS}
    assert not wide.fused_back_ends and not Case("float", 1, 2, 2, 8, 9, 64, torch.float32).fused_back_ends
    missing = {name for name in ("d64", "d128", "d128c", "d256c", "d192v128", "d128c_mha") if name not in cases.BACKWARD}
    assert not missing and set(cases.FUSED) < set(common.BACK_ENDS)
    small = case.inputs("cpu")
    torch.testing.assert_close(
        common.by_back_end("torch_math", *small, enable_gqa=True)(),
        common.own_kernels(Case("small", 1, 4, 2, 30, 48, 24, torch.float16), *small)(),
        rtol=1e-2,
        atol=1e-2,
    )


def test_errors_of_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name where sdpa may run PyTorch's, of all four results."""
    monkeypatch.setattr(errors, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(errors, "LENGTH", 24)
    wrong = 0.0

    def own(case: Case, *operands: torch.Tensor, kernel_name: str = "auto") -> Any:
        return lambda: common.own_kernels(case, *operands)() * (1.0 + wrong)

    monkeypatch.setattr(errors, "own_kernels", own)
    whats = [*errors.WHATS, *(f"{what} by own kernels" for what in errors.WHATS), "out by pipeline"]
    for dtype, E, expected in (
        (torch.float16, 64, whats),
        (torch.bfloat16, 264, [*errors.WHATS, whats[-1]]),
        (torch.float32, 64, whats[:4]),
    ):
        wrong = 0.0
        rows = errors.rows(dtype, E)
        assert sorted(row["what"] for row in rows) == sorted(expected) and all(row["within_rule"] for row in rows)
        wrong = 0.5
        outside = {row["what"] for row in errors.rows(dtype, E) if not row["within_rule"]}
        assert outside == set(expected) - set(errors.WHATS)


def test_gradients_of_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of query, key, value and the bias, the same by ours and by PyTorch's; the formula in three calls has no mask."""
    grads: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(backward, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(backward, "time_ms", lambda call: grads.append(call()) or 2.0)
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    case = Case("small", 2, 3, 3, 30, 48, 264, torch.float32, mask="headbias")
    assert backward.measure(case) == {
        "small": {"attention_ext": 2.0, "torch": 2.0, "both": {"attention_ext": 2.0, "torch": 2.0}, "tflops": 2.5 * case.flop / 2e9}
    }
    assert all([t.shape for t in of_call] == [(2, 3, 30, 264), *[(2, 3, 48, 264)] * 2, (1, 3, 30, 48)] for of_call in grads)
    for ours, theirs in ((grads[0], grads[2]), (grads[1], grads[3])):
        torch.testing.assert_close(ours, theirs)


def test_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands, result and gradients count, what was there before does not; for a call that fails there is the reason."""
    there, highest = 100, 0

    def taken(tensors: Any, beside: int = 0) -> Any:
        nonlocal there, highest
        there += sum(t.nbytes for t in tensors)
        highest = max(highest, there + beside)
        return tensors

    def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        (out,) = taken([F.scaled_dot_product_attention(q, k, v, **options)], 7000)
        return out

    def reset() -> None:
        nonlocal highest
        highest = there

    case = Case("small", 1, 2, 2, 16, 16, 8, torch.float32)
    inputs, grad = case.inputs("cpu"), torch.autograd.grad
    monkeypatch.setattr(Case, "inputs", lambda self, device: taken(inputs))
    monkeypatch.setattr(torch.autograd, "grad", lambda *args: taken(grad(*args), 9000))
    monkeypatch.setattr(memory, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(memory, "OPS", SimpleNamespace(sdpa=operator))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: there)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: highest)
    found, one = memory.peaks(case), inputs[0].nbytes
    assert found["attention_ext"] == {"forward_bytes": 4 * one + 7000, "backward_bytes": 7 * one + 9000}
    assert list(found["torch_efficient"]) == ["not_available"], "no such back end on the CPU"
    peaks = {
        name: {"peaks": {"g512": row}}
        for name, row in (("both", found | {"torch_efficient": found["attention_ext"]}), ("one", found))
    }
    sentences = {name: script("make_tables.py").TABLES["backward"](record)[-1] for name, record in peaks.items()}
    ours = "ours forward 0, backward 0; PyTorch's memory-efficient operator"
    assert (
        sentences["both"] == f"Memory at the peak of g512, with operands, result and gradients, MiB: {ours} forward 0, backward 0."
    )
    assert f"{ours} {found['torch_efficient']['not_available']}." in sentences["one"]


@pytest.mark.parametrize("lost", [None, "error_table", "stages"])
def test_a_part_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, lost: str | None) -> None:
    """What came before is printed, the linear cases behind all of attention's."""
    broken = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory\nmore of it"))
    fakes = {
        record: {
            "ceilings": {"x": 1.0},
            "forward_case": {"kb97": {"within_rule": True, "kernel": "sm90_pipeline"}},
            "error_table": [{"within_rule": True}],
        },
        record.backward: {"measure": {"kb97": {"attention_ext": 1.0, "torch": 2.0}}},
        pipelines: {"stages": {}, "workspaces": {}},
        memory: {"long_sequences": {}, "peaks": {"attention_ext": {}}},
    }
    for module, values in fakes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, broken if name == lost else lambda *_, value=value: value)
    monkeypatch.setattr(record.linear_cases, "measure", lambda *_: {"within_rule": True})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")
    monkeypatch.setattr("sys.argv", ["record.py", "--cases", "kb97", "g512", "biasgrad", "lin84"])
    code = record.main()
    found = script("gpu_check").last_json(capsys.readouterr().out)
    assert code == int(lost is not None) and list(found["forward"]) == ["kb97"] and found["ceilings"] == {"x": 1.0}
    assert ("OutOfMemoryError" in found.get("failed", "")) == (lost is not None) and evidence.bench_sound(found) == (lost is None)
    assert ("stages_sm90_pipeline" in found) == (lost != "stages")
    assert list(found.get("peaks", {})) == (["g512"] if lost is None else [])
    assert list(found.get("backward", {})) == (["kb97"] if lost is None else [])
    assert len(found.get("linear", {})) == (3 if lost is None else 0)
    assert not evidence.bench_sound({"bench_failed": True, "error_rule": []})
    assert lost is not None or not evidence.bench_sound(found | {"error_rule": [{"within_rule": False}]})
