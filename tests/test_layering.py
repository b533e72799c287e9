"""Who may include whom in csrc/: a folder sees what lies below it, never its neighbour. Torch, PTX, exits, line budgets."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})
PYTHON = [*sorted((ROOT / "attention_ext").rglob("*.py")), ROOT / "setup.py", ROOT / "setup_helpers.py"]


# Folder -> folders it may include from, besides itself. A folder here stands for all below it that have no line of their own.
SEES = {
    "core": (),
    "plan": ("core",),
    "device": ("core",),
    "gemm": ("core", "device"),
    "attention": ("core",),  # params.h
    "attention/visibility": ("core", "device", "gemm", "attention"),
    "attention/softmax": ("core", "device", "gemm", "attention"),
    "attention/pipeline": ("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax"),
    "attention/sm90/fused": ("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax"),
    "attention/sm90/pipeline": (
        ("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax", "attention/pipeline")
    ),
    "linear": ("core", "plan", "device", "gemm"),
    "binding": ("core", "plan", "attention", "attention/pipeline", "attention/sm90/fused", "attention/sm90/pipeline", "linear"),
}


def room(file: str) -> str:
    """The folder of SEES that a file of csrc/ belongs to."""
    folder = file.rpartition("/")[0]
    while folder not in SEES:
        assert folder, f"csrc/{file} lies in a folder without a line in SEES"
        folder = folder.rpartition("/")[0]
    return folder


def test_sources_are_there() -> None:
    assert {room(str(path.relative_to(ROOT / "csrc"))) for path in CSRC} == set(SEES)


@pytest.mark.parametrize("path", CSRC, ids=lambda p: str(p.relative_to(ROOT)))
def test_includes(path: Path) -> None:
    file = str(path.relative_to(ROOT / "csrc"))
    for included in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
        assert (ROOT / "csrc" / included).is_file(), f"{included} is not named from csrc/ on"
        assert room(included) in (room(file), *SEES[room(file)]), f"{room(file)} does not see {room(included)}"


@pytest.mark.parametrize("path", CSRC, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    text = path.read_text()
    above = path.relative_to(ROOT / "csrc").parts[0]
    if above != "binding":
        assert not re.search(r'#include\s*[<"](torch|ATen|c10|Python)', text), "torch headers stand in csrc/binding only"
        assert not re.search(r"\b(exit|abort)\s*\(", text), "nothing exits"
    if above != "device":
        assert not re.search(r"\basm\b", text), "PTX stands in csrc/device only"
    if above == "plan":
        assert "cuda" not in "\n".join(re.findall(r"#include.*", text)), "the plan is pure host code"


@pytest.mark.parametrize("path", CSRC, ids=lambda p: str(p.relative_to(ROOT)))
def test_line_budget_of_csrc(path: Path) -> None:
    budget = 300 if path.parent.name == "binding" else 400
    assert len(path.read_text().splitlines()) <= budget


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_line_budget_of_python(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (100 if path.name == "setup.py" else 300)


def test_package_needs_nothing_but_torch() -> None:
    stdlib = {"argparse", "collections", "contextlib", "dataclasses", "functools", "importlib", "logging", "math", "pkgutil", "re"}
    stdlib |= {"os", "platform", "statistics", "sys", "time", "types", "typing", "warnings"}
    for path in (ROOT / "attention_ext").rglob("*.py"):
        imported = re.findall(r"^(?:from|import) +([a-zA-Z_]+)", path.read_text(), re.MULTILINE)
        assert set(imported) <= stdlib | {"torch", "attention_ext"}, path
