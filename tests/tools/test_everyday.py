"""bench/everyday.py, bench/broken.py and bench/variants.py without a GPU: what they time, limits, what fails, what is left out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import broken
import common
import everyday
import pytest
import torch
import torch.nn.functional as F
import variants
from cases import Case

CPU = torch.device("cpu")
Calls = dict[str, Any]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in the GPU's place, and times: 1, 2, ... ms in the order of the calls, each of which runs."""
    for module in (everyday, variants):
        monkeypatch.setattr(module, "DEVICE", CPU)
        monkeypatch.setattr(module, "in_turns", made_up_times)
    monkeypatch.setattr(broken, "DEVICE", "cpu")
    monkeypatch.setattr(variants, "LENGTH", 24)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    card = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


def made_up_times(calls: Calls) -> dict[str, float]:
    for call in calls.values():
        call()
    return {name: float(number) for number, name in enumerate(calls, start=1)}


def small(call: everyday.Everyday) -> everyday.Everyday:
    return replace(call, case=replace(call.case, B=2, L=min(call.case.L, 12), S=min(call.case.S, 16)))


def output(module: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    monkeypatch.setattr("sys.argv", ["script", *options])
    assert module.main() == 0
    return json.loads(capsys.readouterr().out)


def test_the_list() -> None:
    names = [call.name for call in everyday.EVERYDAY]
    assert len(names) == len(set(names)) == 158
    for call in everyday.EVERYDAY:
        case = call.case
        assert call.name.startswith(str(case.dtype).removeprefix("torch.")) and call.name.endswith(f" {case.E}")
        assert not (case.causal and case.mask) and (case.mask == "headbias" or not call.biasgrad)
        assert call.backward or not call.biasgrad
    assert {call.case.E for call in everyday.EVERYDAY} >= {32, 64, 128, 256, 512, 1024}


@pytest.mark.parametrize(
    "call", [call for call in everyday.EVERYDAY if call.case.E == 64 and call.case.L > 1], ids=lambda c: c.name
)
@pytest.mark.usefixtures("made_up")
def test_a_call_measured(call: everyday.Everyday) -> None:
    row = everyday.measure(small(call))
    ways = everyday.WAYS if call.backward else ("forward",)
    assert [way for way in everyday.WAYS if way in row] == list(ways)
    assert all(row[way] == {"ours": 1.0, "torch": 2.0, "ratio": 2.0} for way in ways)
    assert row["kernels"].keys() == row["torch_back_ends"].keys() == set(ways) and row["torch_breaks"] == {}
    assert row["kernels"]["forward"] == "torch" and json.loads(json.dumps(row)) == row


def test_what_is_differentiated(made_up: None) -> None:
    """The mask too where it requires grad."""
    for kind, count in (("plain", 3), ("biasgrad", 4)):
        call = small(next(call for call in everyday.EVERYDAY if call.name == f"bfloat16 {kind} 64"))
        calls = everyday.directions(call, F.scaled_dot_product_attention)
        assert len(calls["backward"]()) == len(calls["both"]()) == count and not calls["forward"]().requires_grad


@pytest.mark.parametrize(
    ("name", "forward", "both"),
    [
        ("bfloat16 band 64", "masked_rows", "masked_rows"),
        ("float16 pad 64", "masked_rows", "masked_rows"),
        ("bfloat16 bias 64", "", ""),
        ("bfloat16 cross 64", "", "gradients"),
        ("bfloat16 odd length 64", "", "gradients"),
        ("bfloat16 plain 64", "", ""),
        ("bfloat16 causal 64", "", ""),
    ],
)
def test_what_breaks_the_contract(monkeypatch: pytest.MonkeyPatch, made_up: None, name: str, forward: str, both: str) -> None:
    """Of cuDNN, and by direction; no other back end breaks it."""
    call = next(call for call in everyday.EVERYDAY if call.name == name)
    for way, found in (("forward", forward), ("backward", both), ("both", both)):
        assert everyday.breach(call, way, "cudnn") == found and everyday.breach(call, way, "flash") == ""
    monkeypatch.setattr(everyday, "chosen_by_torch", lambda q, *_, **__: "cudnn" if q.requires_grad else "efficient")
    few = replace(call, case=replace(call.case, B=1, Hq=1, Hk=1, L=4))
    assert everyday.measure(few)["torch_breaks"] == dict.fromkeys(("both", "backward") if both else (), both)


def test_own_kernels_are_named_by_direction(monkeypatch: pytest.MonkeyPatch, made_up: None) -> None:
    names = iter(["torch: cudnn", "sm90_512", "torch: cudnn", "torch: flash"])
    monkeypatch.setattr(everyday.attention_ext, "explain", lambda *_, **__: SimpleNamespace(kernel=next(names)))
    call = small(everyday.EVERYDAY[0])
    assert everyday.runs(call)["kernels"] == {"forward": "torch: cudnn", "both": "sm90_512", "backward": "sm90_256"}
    assert everyday.runs(call)["kernels"] == {"forward": "torch: cudnn", "both": "torch: flash", "backward": "torch: flash"}


def out_of_memory(*_: Any, **__: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory\nmore of it")


@pytest.mark.parametrize("who", ["ours", "torch"])
def test_a_call_that_fails(monkeypatch: pytest.MonkeyPatch, made_up: None, who: str) -> None:
    monkeypatch.setitem(everyday.OPERATORS, who, out_of_memory)
    row = everyday.measure(small(everyday.EVERYDAY[0]))
    assert row[f"{who}_failed"] == "CUDA out of memory" and row.get("forward", {}) == ({"ours": 1.0} if who == "torch" else {})
    assert everyday.summary([row | {"name": "a"}]) == {}


def test_summary() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "forward": {"ratio": 4.0}, "both": {"ratio": 0.5}},
        {"name": "b", "forward": {"ratio": 0.94}},
        {"name": "c", "forward": {"ours": 1.0}},
    ]
    found = everyday.summary(rows)
    mean = pytest.approx(math.sqrt(4.0 * 0.94))
    assert found["forward"] == {"compared": 2, "slower": 1, "least": (0.94, "b"), "geometric_mean_ratio": mean}
    assert found["both"]["least"] == (0.5, "a") and "backward" not in found


def test_everyday_within_its_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made_up: None) -> None:
    """Calls that are not begun in time are counted, and a call that breaks down is a failure of ours, not the end."""
    clock = iter(range(1000))
    monkeypatch.setattr(everyday.time, "monotonic", lambda: float(next(clock)))
    measured = {"forward": {"ours": 1.0, "torch": 2.0, "ratio": 2.0}, "kernels": {"forward": "some"}}
    monkeypatch.setattr(everyday, "measure", lambda call: out_of_memory() if call.case.E == 80 else measured)
    found = output(everyday, capsys, monkeypatch, "--only", "bfloat16 plain", "--limit", "5")["everyday"]
    assert [row["E"] for row in found["rows"]] == [32, 64, 80, 96, 128] and found["left_out"] == 6
    assert [row.get("ours_failed") for row in found["rows"]] == [None, None, "CUDA out of memory", None, None]
    assert found["summary"]["forward"]["compared"] == 4 and found["slower_below"] == everyday.SLOWER
    assert found["rows"][0].items() >= {"dtype": "bfloat16", "kind": "plain", "S": 2048}.items()
    assert [row["S"] for row in found["torch_broken"]["gradients"]] == [192]


def test_broken_results_are_counted(monkeypatch: pytest.MonkeyPatch, made_up: None) -> None:
    right = broken.measured([77, 192])
    assert right["masked_rows"]["largest"] == 0.0 and [row["not_finite"] for row in right["gradients"]] == [0, 0]
    assert [(row["S"], row["of"]) for row in right["gradients"]] == [(S, 3 * 2 * 4 * S * 64) for S in (77, 192)]

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            x = (q.float() @ k.float().mT) * q.size(-1) ** -0.5
            assert (x - broken.SCORE).abs().max() < 4.0 and x.logsumexp(-1).max() < -100.0
            return v + 0.0 * k + q * math.nan
        return torch.where(mask.any(-1, keepdim=True), v, torch.full_like(v, -0.5))

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    found = broken.measured([192])
    assert found["masked_rows"]["largest"] == 0.5
    assert found["gradients"][0]["not_finite"] == found["gradients"][0]["of"] // 3, "those of query"


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as often as a turn holds, and fewer turns of slow calls."""
    times = {"fast": 1.0, "slow": 15.0, "tiny": 1e-4}
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(common, "queued_ms", lambda call, count: done.append((call, count)) or times[call])
    assert common.in_turns({"a": "fast", "b": "tiny"}) == {"a": 1.0, "b": 1e-4}
    assert done == [("fast", 1), ("tiny", 1), *[("fast", 6), ("tiny", common.MOST_CALLS)] * common.TURNS]
    done.clear()
    common.in_turns({"a": "fast", "b": "slow"})
    assert done == [("fast", 1), ("slow", 1), *[("fast", 6), ("slow", 1)] * 2]
    done.clear()
    times["slow"] = 500.0
    assert common.in_turns({"b": "slow"}) == {"b": 500.0} and done == [("slow", 1)] * 2


def test_band(monkeypatch: pytest.MonkeyPatch, made_up: None) -> None:
    monkeypatch.setattr(variants, "BAND", 8)
    mask = variants.band()
    assert mask.shape == (1, 1, 24, 24) and mask.sum(-1).flatten().tolist() == [4, 5, 6, 7, *[8] * 17, 7, 6, 5]
    assert mask[0, 0].diagonal().all()


@pytest.mark.parametrize("option", variants.OPTIONS)
def test_an_option_next_to_the_call_without(monkeypatch: pytest.MonkeyPatch, made_up: None, option: str) -> None:
    asked: list[tuple[Case, torch.Tensor | None]] = []

    def spy(case: Case, *operands: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        asked.append((case, mask))
        return common.own_kernels(case, *operands, mask=mask)

    monkeypatch.setattr(variants, "own_kernels", spy)
    row = variants.measure(option, 64)
    (case, mask), (other, plain) = asked
    kinds = [found if found is None else (found.dtype, found.size(1), found.requires_grad) for found in (mask, plain)]
    bias = (torch.bfloat16, variants.HEADS, False)
    masks = {"bool mask": [(torch.bool, 1, False), None], "bias": [bias, None], "bias gradient": [(*bias[:2], True), bias]}
    assert kinds == masks.get(option, [None, None])
    assert [case.causal, other.causal] == {"causal": [True, False], "grouped backward": [True, True]}.get(option, [False, False])
    assert [case.Hk, other.Hk] == ([4, 16] if option == "grouped backward" else [16, 16])
    assert row["ms"] == 1.0 and row["ms_without"] == 2.0 and row["within"]
    assert row["ms_more"] == -1.0 if option == "bias gradient" else row["ratio"] == 0.5


@pytest.mark.parametrize(
    ("option", "E", "limit"),
    [
        *(("causal", E, 0.65 if E > 512 else None) for E in variants.HEAD_DIMS),
        *(("bool mask", E, 1.2 if E > 256 else 1.4) for E in variants.HEAD_DIMS),
        *(("bias", E, 1.5 if E > 256 else 1.8) for E in variants.HEAD_DIMS),
        ("bias gradient", 512, 1.5),
        ("grouped backward", 512, 1.15),
    ],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, option: str, E: int, limit: float | None) -> None:
    monkeypatch.setattr(variants, "pair", lambda option, E: (lambda: None, lambda: None))
    for cost, within in (((limit or 1.0) - 0.01, True), ((limit or 1.0) + 0.01, limit is None)):
        times = {"ms": 2.0 + cost if option == "bias gradient" else 2.0 * cost, "ms_without": 2.0}
        monkeypatch.setattr(variants, "in_turns", lambda calls, times=times: times)
        row = variants.measure(option, E)
        assert row["limit"] == limit and row["within"] == within


def test_options_within_their_limit_of_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made_up: None
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(variants.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(variants, "measure", lambda option, E: out_of_memory() if E == 128 else {"ratio": 1.0})
    found = output(variants, capsys, monkeypatch, "--limit", "3")["variants"]
    assert [row["E"] for row in found["rows"]] == [64, 128, 256] and found["left_out"] == 6 * 5 - 3
    assert found["rows"][1]["not_available"] == "CUDA out of memory" and found["rows"][0]["option"] == "causal"


@pytest.mark.gpu
def test_on_the_device() -> None:
    """A call of each kind of mask, both measures of broken results, every option."""
    for name in ("bfloat16 plain 64", "bfloat16 biasgrad 512", "float16 pad 64", "float32 causal 64"):
        call = next(call for call in everyday.EVERYDAY if call.name == name)
        row = everyday.measure(call)
        assert all(row[way]["ratio"] > 0 for way in (everyday.WAYS if call.backward else ("forward",))), row
    found = broken.measured([192])
    assert 0.0 <= found["masked_rows"]["largest"] < 10.0 and found["gradients"][0]["of"] == 3 * 2 * 4 * 192 * 64
    for option in variants.OPTIONS:
        assert variants.measure(option, 64)["ms"] > 0
