"""attention-ext bench: rows and their reasons, JSON, pictures."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attention_ext import _measure
from attention_ext.__main__ import main
from attention_ext.command import bench, timing
from attention_ext.command.timing import in_turns, reason_of, size_text

CPU = torch.device("cpu")
ROWS = ["attention_ext", "PyTorch", "PyTorch flash", "PyTorch math", "three calls"]
TINY = ["--shape", "1,2,2,16,16,8", "--device", "cpu", "--repeat", "4"]


def record_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    """What bench --json says, and it says nothing else."""
    assert main(["bench", *args, "--json"]) == 0
    said = capsys.readouterr()
    assert not said.err
    return json.loads(said.out)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", ["1,2,2,16,16,8", "2,4,2,8,16,16", "1,4,1,1,32,8"])
def test_rows(shape: str, backward: bool, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--shape", shape, "--device", "cpu", "--repeat", "4", *["--backward"] * backward]
    found = record_of(args, capsys)
    assert found["device"] == "cpu" and found["torch"] == torch.__version__
    (entry,) = found["cases"]
    assert entry["backward"] == backward and entry["name"] == shape and not entry["preferred"]
    assert list(entry["rows"]) == ROWS
    for row in entry["rows"].values():
        assert 0.0 < row["low_ms"] <= row["ms"] <= row["high_ms"] and row["calls"] == 4
        assert row["ratio"] == pytest.approx(entry["rows"]["PyTorch"]["ms"] / row["ms"])
        assert "extra_bytes" not in row
    assert entry["rows"]["attention_ext"]["ran"] == "torch"


def test_what_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The median and the quartiles of all turns, warm-up not counted."""
    times = iter(range(1, 1000))
    monkeypatch.setattr(_measure, "times_ms", lambda call, device, repeat, warm_up: [float(next(times)) for _ in range(repeat)])
    rows = in_turns({"a": lambda: None, "b": lambda: None}, CPU, 7, lambda name: None)
    assert [row["calls"] for row in rows.values()] == [7, 7]
    taken = [3, 4, 7, 8, 11, 12, 13], [5, 6, 9, 10, 14, 15, 16]  # after one each, 2, 2 and 3 calls in turns
    for row, own in zip(rows.values(), taken, strict=True):
        low, middle, high = statistics.quantiles(own, n=4, method="inclusive")
        assert (row["low_ms"], row["ms"], row["high_ms"]) == (low, middle, high)


@pytest.mark.parametrize(("once", "count"), [(0.0, 30), (10.0, 30), (100.0, 10), (400.0, 3), (1001.0, 1)])
def test_how_often(once: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_measure, "times_ms", lambda call, device, repeat, warm_up: [once] * repeat)
    assert in_turns({"a": lambda: None}, CPU, None, lambda name: None)["a"]["calls"] == count


def test_every_step_is_told() -> None:
    def fails() -> None:
        raise RuntimeError("no")

    told: list[str] = []
    in_turns({"a": lambda: None, "b": fails, "c": "why not"}, CPU, 2, told.append)
    assert sorted(told) == sorted(["a", "b", "c"] * timing.STEPS)


def test_a_row_that_cannot_run_has_its_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own words: its flash kernel for the CPU wants one head dim."""
    assert main(["bench", "--shape", "1,2,2,16,16,8,4", "--device", "cpu", "--repeat", "2"]) == 0
    lines = {line.partition("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "refused: Flash attention requires q,k,v to have the same last dimension" in lines["PyTorch flash"]
    assert re.search(r"math$", lines["PyTorch"]) and re.search(r"torch$", lines["attention_ext"])


def test_ours_that_fails_is_a_row_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def sdpa(*operands: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(bench, "sdpa", sdpa)
    rows = record_of(TINY, capsys)["cases"][0]["rows"]
    assert rows["attention_ext"] == {"reason": "out of memory, asked for 20.50 GiB"} and rows["PyTorch"]["ratio"] == 1.0


def test_pytorch_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Then there is no ratio."""

    def operator(*operands: object, **options: object) -> None:
        raise RuntimeError("it is broken.\nand more")

    monkeypatch.setattr(F, "scaled_dot_product_attention", operator)
    rows = record_of(TINY, capsys)["cases"][0]["rows"]
    assert rows["PyTorch"] == {"reason": "refused: it is broken"} and rows["three calls"]["ms"] > 0.0
    assert not any("ratio" in row for row in rows.values())


def test_memory_of_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What would need more than there is does not run: the system would end the process."""
    monkeypatch.setattr(bench, "free_bytes", lambda device: 4096)
    rows = record_of(TINY, capsys)["cases"][0]["rows"]
    for name in ("PyTorch math", "three calls"):
        assert rows[name] == {"reason": "needs 6 KiB, 4 KiB are free"}
    assert all("ms" in rows[name] for name in ROWS[:3])
    monkeypatch.setattr(bench, "free_bytes", lambda device: 3)
    rows = record_of(TINY, capsys)["cases"][0]["rows"]
    assert list(rows) == ROWS and {row["reason"] for row in rows.values()} == {"out of memory, asked for 3 KiB"}


def test_free_memory_is_known() -> None:
    assert 1 << 20 < timing.free_bytes(CPU) < 1 << 50


SAID = [
    "Memory efficient kernel not used because:",
    "Memory Efficient attention has been runtime disabled.",
    "Flash attention kernel not used because:",
    "Flash attention requires q,k,v to have head dim up to 256.",
    "CuDNN attention kernel not used because:",
    "cuDNN attention has been runtime disabled.",
]


@pytest.mark.parametrize(
    ("error", "said", "back_end", "reason"),
    [
        (
            "No available kernel. Aborting execution.",
            SAID,
            "flash",
            "refused: Flash attention requires q,k,v to have head dim up to 256",
        ),
        ("No available kernel. Aborting execution.", SAID, "cudnn", "refused: cuDNN attention has been runtime disabled"),
        ("No available kernel. Aborting execution.", SAID[4:5], "cudnn", "refused: No available kernel. Aborting execution"),
        ("No available kernel. Aborting execution.", SAID, "", "refused: No available kernel. Aborting execution"),
        ("", [], "", "RuntimeError"),
    ],
)
def test_reasons(error: str, said: list[str], back_end: str, reason: str) -> None:
    assert reason_of(RuntimeError(error), said, back_end) == reason


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1 bytes"), (2048, "2 KiB"), (3 << 20, "3 MiB"), (5 << 30, "5.0 GiB"), (1 << 50, "1048576.0 GiB")]
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert size_text(size) == text


def test_defaults_are_for_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    names = [entry["name"] for entry in record_of(["--device", "cpu", "--repeat", "1"], capsys)["cases"]]
    assert names == ["small_f32", "small_bf16_causal", "small_gqa"]


def test_a_record_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one of a card: memory, the kernel and the back end."""
    found = record_of(TINY, capsys)
    for row in found["cases"][0]["rows"].values():
        row["extra_bytes"] = 3 << 20
    (tmp_path / "cpu.json").write_text(json.dumps(found))
    (tmp_path / "card.json").write_text(json.dumps(found | {"device": "NVIDIA Something"}))
    assert record_of(["--from", str(tmp_path / "cpu.json")], capsys) == found
    texts = []
    for name in ("cpu", "card"):
        assert main(["bench", "--from", str(tmp_path / f"{name}.json")]) == 0
        texts.append(" ".join(capsys.readouterr().out.split()))
    assert "on the CPU (" in texts[0] and "nothing gets faster" in texts[0] and "MiB" not in texts[0]
    assert "on NVIDIA Something" in texts[1] and re.search(r"attention_ext [\d.]+ [\d.]+ - [\d.]+ [\d.]+ [\d.]+ 3 torch", texts[1])


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"cases": [{}]}', '{"cases": [{"dtype": "int8"}]}'])
def test_a_file_that_is_no_record(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    assert main(["bench", "--from", str(file)]) == 2
    said = capsys.readouterr()
    assert not said.out and f"--from: expected a file that bench --json has written, got {file}" in said.err


@pytest.mark.parametrize(
    ("file", "words"), [("x.pdf", "ends in .svg or .png, got x.pdf"), ("no/x.svg", "a folder that is there, got no/x.svg")]
)
def test_files_that_cannot_be_a_picture(file: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is measured."""
    assert main(["bench", *TINY, "--plot", file]) == 2
    said = capsys.readouterr()
    assert not said.out and words in said.err


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", *TINY, "--plot", str(tmp_path / "x.svg")]) == 2
    said = capsys.readouterr()
    assert not said.out and "this needs matplotlib: pip install 'attention_ext[cli]'" in said.err


@pytest.mark.parametrize(("suffix", "begin"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_picture(suffix: str, begin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"x.{suffix}"
    args = ["--shape", "1,2,2,16,16,8,4", *TINY]
    assert main(["bench", *args, "--plot", str(file), "--json"]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)["cases"]) == 2 and said.err == f"wrote {file}\n"
    assert file.read_bytes().startswith(begin) and file.stat().st_size > 5000


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", ["1,4,2,256,256,512", "1,4,4,256,256,64"])
def test_on_a_card(shape: str, backward: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row has a figure or a reason; above head dim 256 FlashAttention has a reason."""
    found = record_of(["--shape", shape, "--device", "cuda", *["--backward"] * backward], capsys)
    assert found["device"] == torch.cuda.get_device_name()
    rows = found["cases"][0]["rows"]
    assert list(rows) == [*ROWS[:2], *(f"PyTorch {name}" for name in bench.BACK_ENDS), "three calls"]
    for name, row in rows.items():
        assert ("ms" in row) != ("reason" in row), name
        if "ms" in row:
            assert 0.0 < row["low_ms"] <= row["ms"] <= row["high_ms"] and 3 <= row["calls"] <= 30 and row["extra_bytes"] >= 0
    assert all("ms" in rows[name] for name in ("attention_ext", "PyTorch", "PyTorch math", "three calls"))
    assert shape.endswith("64") == ("ms" in rows["PyTorch flash"])
    assert shape.endswith("64") or rows["PyTorch flash"]["reason"].startswith("refused: ")
    assert rows["PyTorch"]["ran"] in bench.BACK_ENDS and not rows["attention_ext"]["ran"].startswith("reference")


@pytest.mark.gpu
def test_out_of_memory_on_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """All scores of a long sequence are half a terabyte; the fused kernels need none of them."""
    rows = record_of(["--shape", "1,4,4,262144,262144,8", "--repeat", "1", "--device", "cuda"], capsys)["cases"][0]["rows"]
    assert "ms" in rows["attention_ext"]
    assert all(rows[name]["reason"].startswith("out of memory, asked for ") for name in ("three calls", "PyTorch math"))
