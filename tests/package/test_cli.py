"""python -m attention_ext: info for bug reports, run for a first measurement."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

import attention_ext.__main__ as cli
from attention_ext.__main__ import main
from attention_ext._libraries import Build

SMALL = ["--batch", "1", "--heads", "2", "--length", "32", "--head-dim", "64", "--rows", "8", "--features", "16", "--repeat", "2"]


def call(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "attention_ext", *args], capture_output=True, text=True, timeout=120)


def test_info() -> None:
    done = call("info")
    assert done.returncode == 0, done.stderr
    for part in (torch.__version__, platform.python_version(), "attention_ext", "csrc", "CUDA device", "_C", "_cuda"):
        assert part in done.stdout, part
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("major", "built_for", "card", "lacks", "told"),
    [
        (0, "", (9, 0), False, "CPU only"),
        (13, "8.0+PTX;9.0a", (9, 0), False, "8.0+PTX;9.0a"),
        (13, "8.0;9.0", (9, 0), True, "8.0;9.0 without the kernels for Hopper (9.0a in TORCH_CUDA_ARCH_LIST builds them)"),
        (13, "8.0;9.0", (8, 0), False, "8.0;9.0 without the kernels for Hopper (9.0a in TORCH_CUDA_ARCH_LIST builds them)"),
    ],
)
def test_builds_without_the_kernels_for_hopper(
    major: int,
    built_for: str,
    card: tuple[int, int],
    lacks: bool,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`info` says so for every card, a run for a Hopper card."""
    monkeypatch.setattr(cli, "BUILD", Build("0.1.0", "unknown", major, built_for))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: card)
    for name in ("_run_attention", "_run_linear"):
        monkeypatch.setattr(cli, name, lambda args: None)
    assert main(["info"]) == 0 and f"built for      {told}\n" in capsys.readouterr().out
    for device in ("cuda", "cpu"):
        assert main(["--device", device]) == 0
        sentence = f"{device} is a Hopper card, and attention_ext 0.1.0 was built for {told}."
        assert (sentence in capsys.readouterr().out) == (lacks and device == "cuda")


@pytest.mark.parametrize("more", [[], ["--length", "7", "--head-dim", "5"]], ids=str)
def test_run(more: list[str]) -> None:
    done = call("run", *SMALL, *more)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert len(lines) >= 3 and any("ms" in line for line in lines), done.stdout
    assert "torch" in done.stdout.lower() and "nan" not in done.stdout.lower().split(), done.stdout


@pytest.mark.parametrize(("problem", "there"), [("attention", (1, 0)), ("linear", (0, 1)), ("both", (1, 1))])
def test_problems(problem: str, there: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """Both by default; linear in both modes, with errors that are float32's."""
    before = torch.backends.cuda.matmul.allow_tf32
    assert main(["run", *SMALL, "--problem", problem, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert (text.count("q, k, v of"), text.count("linear + batch norm")) == there and "in place of" not in text
    rows = [line.split() for line in text.splitlines() if line.split()[1:2] in (["train"], ["eval"])]
    assert [row[:2] for row in rows] == [[who, mode] for mode in ("train", "eval") for who in ("PyTorch", "attention_ext")] * there[
        1
    ]
    assert all(0.0 < float(error) < 1e-5 for row in rows for error in row[-2:])
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_the_sizes_of_linear(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--problem", "linear", "--repeat", "1", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "(128, 1024) to 1024 features" in text and "128 rows and 1024 features in place of 1024 and 8192." in text
    with pytest.raises(SystemExit) as stop:
        main(["run", "--problem", "linear", "--rows", "1"])
    assert stop.value.code == 2 and "--rows" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runs batch 1 of the problem")
@pytest.mark.parametrize(
    ("args", "shape"),
    [(["--heads", "1"], "(1, 1, 512, 1024)"), (["--length", "8", "--head-dim", "8"], "(1, 32, 8, 8)")],
    ids=str,
)
def test_default_sizes_are_the_benchmark_problem(args: list[str], shape: str) -> None:
    done = call("run", "--repeat", "1", *args)
    assert done.returncode == 0 and shape in done.stdout and "in place of 32" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "args", [["run", "--batch", "x"], ["run", "--lenght", "3"], ["no such command"], ["--problem", "84"]], ids=str
)
def test_mistakes(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2 and "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch", "--heads", "--length", "--head-dim", "--repeat", "--rows", "--features"])
@pytest.mark.parametrize("size", ["-1", "0"])
def test_sizes_must_be_positive(option: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", *SMALL, option, size])
    assert stop.value.code == 2 and option in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--help"], ["info", "--help"], ["run", "--help"]], ids=str)
def test_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert not stop.value.code and "usage:" in capsys.readouterr().out
