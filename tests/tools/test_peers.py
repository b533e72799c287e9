"""bench/peers.py without a GPU: which cases, the processes and what they answer, rows of a record, records that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, SETS, Case


def small(**options: Any) -> Case:
    sizes: dict[str, Any] = {"B": 1, "Hq": 4, "Hk": 2, "L": 30, "S": 30, "E": 384, "dtype": torch.float16}
    return Case("small", **(sizes | options))


def test_peers_take_what_they_are_timed_on() -> None:
    taken = {name: {case.name for case in CASES if peer.takes(case)} for name, peer in peers.PEERS.items()}
    assert taken["ffpa"] == {*SETS["class512"], "dec512"} and taken["fa4"] == set(SETS["class256"])
    assert taken["fa4"] >= {"d64", "d128", "d128c", "d128c_mha", "d256c", "d192v128"}
    for peer in peers.PEERS.values():
        assert not any(peer.takes(small(E=E, dtype=torch.float32)) for E in (64, 512))
        assert not any(peer.takes(small(E=E, causal=True, S=40)) for E in (64, 512)), "their causal mask is another one"
        assert not any(peer.takes(small(E=E, mask="pad")) for E in (64, 512))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Both libraries as PyTorch computes them, with what they were called with; a clock that counts."""
    seen: dict[str, list[Any]] = {"ffpa": [], "fa4": [], "times": []}

    def ffpa_attn_func(q: Any, k: Any, v: Any, *, backend: Any, **options: Any) -> torch.Tensor:
        seen["ffpa"].append((backend, options, [t.transpose(1, 2).is_contiguous() for t in (q, k, v)]))
        return F.scaled_dot_product_attention(q, k, v, **options)

    def flash_attn_func(q: Any, k: Any, v: Any, causal: bool) -> Any:
        seen["fa4"].append([t.is_contiguous() for t in (q, k, v)])
        operands = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.size(2) != k.size(2)
        return F.scaled_dot_product_attention(*operands, is_causal=causal, enable_gqa=grouped).transpose(1, 2), None

    def time_ms(call: Any, *_: Any) -> float:
        call()
        seen["times"].append(torch.is_grad_enabled())
        return float(len(seen["times"]))

    modules = {
        "ffpa_attn": types.SimpleNamespace(ffpa_attn_func=ffpa_attn_func, CuTeDSLBackend=lambda: "cute"),
        "flash_attn": types.ModuleType("flash_attn"),
        "flash_attn.cute": types.SimpleNamespace(flash_attn_func=flash_attn_func),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for module in (peers, peers.backward):
        monkeypatch.setattr(module, "time_ms", time_ms)
    monkeypatch.setattr(peers, "DEVICE", torch.device("cpu"))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: f"{name} 1")
    return seen


@pytest.mark.parametrize(("name", "options"), [("ffpa", {}), ("fa4", {"E": 64, "Ev": 48}), ("fa4", {"E": 64, "causal": True})])
def test_a_worker(
    fakes: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """All has run once before it says that it is ready; a peer's operands are contiguous in its own layout."""
    case = small(**options)
    with (tmp_path / "answers").open("w+") as answers:

        def readline() -> str:
            assert len((tmp_path / "answers").read_text().splitlines()) == 1 and len(fakes[name]) == 2 and not fakes["times"]
            return "\n"

        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(readline=readline))
        assert peers.worker(name, case, ["forward", "backward"], answers) == 0
    ready, rows = map(json.loads, (tmp_path / "answers").read_text().splitlines())
    assert ready == {"version": f"{peers.PEERS[name].distribution} 1"}
    forward, back = rows["forward"], rows["backward"]
    assert (forward["ms"], forward["ours_ms_in_between"], forward["ms_second_pass"]) == (1.0, 2.0, 3.0)
    assert forward["relative_frobenius_error"] < 2e-3 and forward["tflops"] == case.flop / 1e9
    assert (back["backward"], back["both"], back["ours_backward"], back["ours_both"], back["backward_second_pass"]) == (
        4,
        5,
        6,
        7,
        8,
    )
    assert 0 < back["difference_to_ours"] < 5e-3 or back["difference_to_ours"] == 0.0
    assert fakes["times"] == [False] * 3 + [True] * 6
    contiguous = [call[-1] for call in fakes[name]] if name == "ffpa" else fakes[name]
    assert all(all(of_call) for of_call in contiguous)
    assert all(call[:2] == ("cute", {"is_causal": False, "enable_gqa": True}) for call in fakes["ffpa"])


def test_a_way_that_fails_costs_its_own_row(fakes: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(peers.WAYS, "backward", lambda *_: 1 / 0)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(readline=lambda: "\n"))
    with (tmp_path / "answers").open("w+") as answers:
        peers.worker("ffpa", small(), ["forward", "backward"], answers)
    _, rows = map(json.loads, (tmp_path / "answers").read_text().splitlines())
    assert rows["forward"]["ms"] == 1.0 and rows["backward"] == {"not_available": "division by zero"}


ANSWERS = {
    "g512": """print('{"version": "1"}', flush=True); input(); print('{"forward": {"ms": 2.0}, "backward": {"backward": 3.0}}')""",
    "g512c": "import sys; sys.exit('compiler: no such instruction')",
    "d384": """print('{"version": "1"}', flush=True); input(); import os; os.abort()""",
    "vae1024": "import time; time.sleep(60)",
    "vae512": "raise ValueError('never')",
}


def test_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, breaks down or hangs costs its own rows, and the record is kept after each."""
    started = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        assert command[2:4] == ["--worker", "ffpa"]
        return started([sys.executable, "-c", ANSWERS[command[4]]], **options)

    monkeypatch.setattr(peers.subprocess, "Popen", start)
    monkeypatch.setattr(peers, "READY", 8.0)
    names = ["g512", "g512c", "d384", "vae1024"]
    record: dict[str, Any] = {"forward": {name: {"rows": {}} for name in names}, "backward": {"g512": {}, "d128": {}}}
    kept: list[int] = []
    found = peers.measure(record, ["ffpa"], [*names, "vae512"], lambda: kept.append(1))
    assert found.pop("seconds") < 30 and found == {"ffpa_attn": "1"} and len(kept) == 4, "vae512 is not in the record"
    rows = {name: entry["rows"]["ffpa"] for name, entry in record["forward"].items()}
    assert rows["g512"] == {"ms": 2.0} and record["backward"] == {"g512": {"ffpa": {"backward": 3.0}}, "d128": {}}
    assert rows["g512c"] == {"not_available": "compiling: the process ended with 1. compiler: no such instruction"}
    assert rows["d384"]["not_available"].startswith("its times: the process ended with -6")
    assert rows["vae1024"]["not_available"].startswith("compiling: the process ended with -9")


def test_rows_go_to_own_kernels() -> None:
    part = {"d64": {"a": 1}, "d64 own": {"a": 2}, "g512": {"a": 3}}
    assert peers.entry(part, "d64") == {"a": 2} and peers.entry(part, "g512") == {"a": 3}


@pytest.mark.parametrize("change", [None, "card", "csrc_tree", "torch", "absent"])
def test_a_record_of_another_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str | None
) -> None:
    path = tmp_path / "record.json"
    here = {"card": "Some Card", "csrc_tree": peers.attention_ext._libraries.BUILD.csrc, "torch": torch.__version__}
    record = here | ({change: "other"} if change else {}) | {"forward": {}, "peers": {"ffpa_attn": "0"}, "sound": True}
    path.write_text(json.dumps(record))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Card")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if change == "absent" else name)
    monkeypatch.setattr("sys.argv", ["peers.py", "--into", str(path), "--only", "fa4"])
    if change is None:
        assert peers.main() == 0
        found = json.loads(path.read_text())
        assert found["sound"] and found["peers"].keys() == {"ffpa_attn", "seconds"}
        return
    with pytest.raises(SystemExit) as stopped:
        peers.main()
    said = capsys.readouterr().err if change == "absent" else str(stopped.value)
    assert "cannot be imported: flash_attn" in said if change == "absent" else f"is of another {change} (other, here" in said
    assert json.loads(path.read_text()) == record
