"""The command attention-ext as a whole: run and info, help, what is refused, how it ends."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys

import pytest
import torch

from attention_ext import __main__ as entry
from attention_ext.__main__ import main
from attention_ext._libraries import BUILD, Build
from attention_ext.command import arguments, cards, info, problems
from attention_ext.command.arguments import SUBCOMMANDS

SMALL = ["--batch", "1", "--heads", "2", "--length", "32", "--head-dim", "64", "--rows", "8", "--features", "16", "--repeat", "2"]


def call(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "attention_ext", *args], capture_output=True, text=True, timeout=120)


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said about arguments that are wrong."""
    with pytest.raises(SystemExit) as stop:
        main(args)
    said = capsys.readouterr()
    assert stop.value.code == 2 and not said.out and said.err.startswith("usage: attention-ext")
    return said.err.rpartition("error: ")[2].strip()


def test_info() -> None:
    done = call("info")
    assert done.returncode == 0, done.stderr
    for part in (torch.__version__, platform.python_version(), "attention_ext", "csrc", "CUDA device", "_C", "_cuda", "rich"):
        assert part in done.stdout, part
    assert not done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_info_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0 and "nothing gets faster" in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["device"] is None and not any(about["gains"].values()) and about["torch"] == torch.__version__


@pytest.mark.skipif(not BUILD.has_hopper_kernels, reason="a build without the kernels for Hopper")
@pytest.mark.parametrize(
    ("capability", "built_for", "said", "table"),
    [
        ((9, 0), "8.0+PTX;9.0a", "The kernels are made for this card", True),
        ((9, 0), "8.0;9.0", "the build is without the kernels for it", False),
        ((8, 0), "8.0+PTX;9.0a", "nothing was measured faster", False),
    ],
)
def test_what_a_card_gains(
    capability: tuple[int, int], built_for: str, said: str, table: bool, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """On Hopper head dims above 256; decoding with a head dim of 128 is PyTorch's."""
    build = Build("0.1.0", "unknown", 13, built_for)
    for module in (info, cards):
        monkeypatch.setattr(module, "BUILD", build)
    monkeypatch.setattr(info, "CUDA_PROBLEM", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cards, "at", lambda device: cards.Card("a card", capability, 132))
    assert main(["info"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert said in text and ("head dim 768 yes" in text) == ("one query, head dim 128 no, PyTorch's" in text) == table
    assert ("float32, head dim 64 yes" in text) == table


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
    major: int, built_for: str, card: tuple[int, int], lacks: bool, told: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """`info` says so for every card, a run for a Hopper card."""
    for module in (info, cards, problems):
        monkeypatch.setattr(module, "BUILD", Build("0.1.0", "unknown", major, built_for))
    monkeypatch.setattr(cards, "at", lambda device: cards.Card("a card", card, 132))
    for name in ("_attention", "_linear"):
        monkeypatch.setattr(problems, name, lambda args, repeat: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["info"]) == 0 and f"built for {told}" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(arguments, "CUDA_PROBLEM", None)
    for device in ("cuda", "cpu"):
        args = argparse.Namespace(device=torch.device(device), problem="both", repeat=1)
        assert problems.run(args) == 0
        sentence = f"{device} is a Hopper card, and attention_ext 0.1.0 was built for {told}."
        assert (sentence in " ".join(capsys.readouterr().out.split())) == (lacks and device == "cuda")


@pytest.mark.parametrize("more", [[], ["--length", "7", "--head-dim", "5"], ["--causal", "--dtype", "bf16"]], ids=str)
def test_run(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, *more, "--device", "cpu"]) == 0
    check_run(*capsys.readouterr())


def test_run_as_a_process() -> None:
    done = call("run", *SMALL, "--device", "cpu")
    assert done.returncode == 0
    check_run(done.stdout, done.stderr)


def check_run(text: str, errors: str) -> None:
    rows = [line.split() for line in text.splitlines() if re.match(r"(PyTorch|attention_ext)( train| eval)? +\d", line)]
    assert len(rows) == 6 and all(float(cell) >= 0.0 for row in rows for cell in row[-5:]), text
    assert "nothing is to be gained" in text and not errors, errors


@pytest.mark.parametrize(("problem", "there"), [("attention", (1, 0)), ("linear", (0, 1)), ("both", (1, 1))])
def test_problems(problem: str, there: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """Both by default; linear in both modes, with errors that are float32's."""
    before = torch.backends.cuda.matmul.allow_tf32
    assert main([*SMALL, "--problem", problem, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert (text.count("q, k, v of"), text.count("linear + batch norm")) == there and "in place of" not in text
    rows = [line.split() for line in text.splitlines() if line.split()[1:2] in (["train"], ["eval"])]
    expected = [[who, mode] for mode in ("train", "eval") for who in ("PyTorch", "attention_ext")] * there[1]
    assert [row[:2] for row in rows] == expected
    assert all(0.0 < float(error) < 1e-5 for row in rows for error in row[-2:])
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_the_sizes_of_linear(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--problem", "linear", "--repeat", "1", "--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(128, 1024) to 1024 features" in text
    assert "rows 128 and features 1024 in place of rows 1024 and features 8192." in text
    assert "--rows: training takes more than one" in refused(["run", "--problem", "linear", "--rows", "1"], capsys)


@pytest.mark.parametrize(
    ("args", "shape"),
    [(["--heads", "1"], "(1, 1, 512, 1024)"), (["--length", "8", "--head-dim", "8"], "(1, 32, 8, 8)")],
    ids=str,
)
def test_default_sizes_are_the_benchmark_problem(args: list[str], shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--problem", "attention", "--device", "cpu", "--repeat", "1", *args]) == 0
    text = capsys.readouterr().out
    assert shape in text and "batch 1 in place of batch 32" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["bnch"], "expected one of run, bench, verify, explain, info, got 'bnch'; did you mean bench?"),
        (["run", "--batch", "x"], "argument --batch: expected a positive number, got 'x'"),
        (["run", "--lenght", "3"], "unrecognized arguments: --lenght 3"),
        (["--problem", "84"], "argument --problem: invalid choice"),
        (["bench", "kb79"], "got 'kb79'; did you mean kb97?"),
        (["bench", "nothing_like_it"], "argument CASE: expected one of vae1024, "),
        (["bench", "1,2,2,4,4,8"], "got '1,2,2,4,4,8'; sizes go to --shape"),
        (["bench", "--shape", "1,2,3"], "--shape: expected six sizes B,Hq,Hk,L,S,E, or seven with Ev, got 3 in '1,2,3'"),
        (["bench", "--shape", "1,2,2,4,x,8"], "--shape: expected positive numbers B,Hq,Hk,L,S,E, got 'x' in '1,2,2,4,x,8'"),
        (["bench", "--shape", "1,2,2,0,4,8"], "got '0' in '1,2,2,0,4,8'"),
        (["explain", "--shape", "1,6,4,8,8,8"], "expected Hk (key heads) to divide Hq (query heads), got Hq = 6 and Hk = 4"),
        (["explain", "--shape", "1,1,1,9999999999,9999999999,512"], "expected tensors of fewer than 2^40 elements"),
        (["bench", "--dtype", "flaot16"], "got 'flaot16'; did you mean float16?"),
        (["bench", "--device", "gpu"], "argument --device: expected cpu, cuda or cuda:NUMBER, got 'gpu'"),
        (["bench", "--device", "meta"], "argument --device: expected cpu, cuda or cuda:NUMBER, got 'meta'"),
        (["bench", "--repeat", "0"], "argument --repeat: expected a positive number, got '0'"),
        (["bench", "kb97", "--from", "x.json"], "argument --from: measures nothing"),
        (["explain", "--card", "h100", "--device", "cpu"], "argument --device: not allowed with argument --card"),
        (["verify", "--jsn"], "unrecognized arguments: --jsn"),
    ],
    ids=str,
)
def test_mistakes(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(args, capsys)


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether torch sees none, or the kernels cannot be loaded."""
    monkeypatch.setattr(arguments, "CUDA_PROBLEM", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert f"torch {torch.__version__} sees no CUDA devices, got 'cuda'" in refused(["verify", "--device", "cuda"], capsys)
    monkeypatch.setattr(arguments, "CUDA_PROBLEM", "it was built without them.")
    assert "argument --device: it was built without them." in refused(["verify", "--device", "cuda"], capsys)


@pytest.mark.parametrize("option", ["--batch", "--heads", "--length", "--head-dim", "--repeat", "--rows", "--features"])
@pytest.mark.parametrize("size", ["-1", "0"])
def test_sizes_must_be_positive(option: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert option in refused(["run", *SMALL, option, size], capsys)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_has_an_example_that_is_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    text = capsys.readouterr().out
    examples = re.findall(r"^  attention-ext (.*)$", text.partition("examples:")[2], re.MULTILINE)
    assert not stop.value.code and "usage:" in text and examples
    for example in examples:
        assert arguments.parse(example.partition(" >")[0].split()).command == name


def test_help_names_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    assert not stop.value.code and all(re.search(rf"^    {name}\b", text, re.MULTILINE) for name in SUBCOMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert not stop.value.code and re.match(
        rf"attention-ext 0\.\S+, torch {re.escape(torch.__version__)}\n$", capsys.readouterr().out
    )


@pytest.mark.parametrize("args", [[], ["--causal"], ["--repeat", "1"]], ids=str)
def test_without_a_subcommand_it_is_run(args: list[str]) -> None:
    assert arguments.parse(args).command == "run"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "attention-ext: interrupted\n"),
        (MemoryError(), 1, "attention-ext info: out of memory; smaller sizes may fit\n"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            1,
            "out of memory, asked for 2.00 GiB",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes."),
            1,
            "asked for 2.0 GiB",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ends(error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(entry, "parse", lambda argv: argparse.Namespace(command="info", run=run))
    assert main([]) == status and said in capsys.readouterr().err


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise RuntimeError("a fault")

    monkeypatch.setattr(entry, "parse", lambda argv: argparse.Namespace(command="info", run=run))
    with pytest.raises(RuntimeError, match="a fault"):
        main([])


def test_a_reader_that_leaves() -> None:
    """attention-ext info | head -0"""
    command = f"{sys.executable} -m attention_ext info | true; echo ${{PIPESTATUS[0]}}"
    code = "import sys, time; from attention_ext.__main__ import main; time.sleep(1); sys.exit(main(['info']))"
    done = subprocess.run(["bash", "-c", command.replace("-m attention_ext info", '-c "$0"'), code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("141\n", "")
