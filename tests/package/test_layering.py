"""Who may include whom in csrc/: a folder sees what lies below it, never its neighbour. Torch, PTX, exits, line budgets."""

import re
from pathlib import Path

import pytest
from paths import ROOT

CSRC = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})
FOLDERS = ("attention_ext", "tests", "bench", "scripts", "examples")
PYTHON = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PYTHON += [ROOT / name for name in ("setup.py", "setup_helpers.py", "scripts/gpu_check", "scripts/make_dist")]
PROSE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 132


# Folder -> folders it may include from, besides itself. A folder here stands for all below it that have no line of their own.
SEES = {
    "core": (),
    "plan": ("core",),
    "device": ("core",),
    "gemm": ("core", "device"),
    "attention": ("core", "attention/visibility"),  # params.h, sequence.h
    "attention/visibility": ("core", "device", "gemm"),
    "attention/softmax": ("core", "device", "gemm"),
    "attention/pipeline": ("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax"),
    "attention/sm90/pieces": ("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax"),
    "attention/sm90/fused": (
        *("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax"),
        "attention/sm90/pieces",
    ),
    "attention/sm90/rows": (
        *("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax"),
        "attention/sm90/pieces",
    ),
    "attention/sm90/pipeline": (
        ("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax", "attention/pipeline")
    ),
    "attention/sm90/rows_backward": (
        *("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax"),
        *("attention/pipeline", "attention/sm90/pipeline", "attention/sm90/rows"),
    ),
    "attention/sm90/split_half": (
        ("core", "plan", "device", "gemm", "attention", "attention/visibility", "attention/softmax", "attention/pipeline")
    ),
    "linear": ("core", "plan", "device", "gemm"),
    "linear/cpu": ("core",),
    "binding": (
        *("core", "plan", "attention", "attention/pipeline", "attention/sm90/rows", "attention/sm90/fused"),
        "attention/sm90/rows_backward",
        *("attention/sm90/pipeline", "attention/sm90/split_half", "linear", "linear/cpu"),
    ),
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


def test_line_budget_of_the_readme() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", [*CSRC, *PYTHON, *PROSE], ids=lambda p: str(p.relative_to(ROOT)))
def test_width(path: Path) -> None:
    """Of every line but the rows of tables in prose."""
    lines = enumerate(path.read_text().splitlines(), 1)
    wide = [number for number, line in lines if len(line) > WIDTH and not (path in PROSE and line.startswith("|"))]
    assert not wide, f"lines {wide} of {path.relative_to(ROOT)} are wider than {WIDTH} characters"


def test_package_needs_nothing_but_torch() -> None:
    stdlib = {"argparse", "collections", "contextlib", "dataclasses", "functools", "importlib", "logging", "math", "pkgutil", "re"}
    stdlib |= {
        "difflib",
        "json",
        "os",
        "pathlib",
        "platform",
        "shutil",
        "statistics",
        "sys",
        "textwrap",
        "threading",
        "time",
        "types",
        "typing",
        "warnings",
    }
    for path in (ROOT / "attention_ext").rglob("*.py"):
        imported = re.findall(r"^(?:from|import) +([a-zA-Z_]+)", path.read_text(), re.MULTILINE)
        library = {path.stem} if path.parent.name == "integrations" else set()
        assert set(imported) <= stdlib | {"torch", "attention_ext"} | library, path


@pytest.mark.parametrize("folder", ["integrations", "command"])
def test_nothing_in_the_package_sees_the_integrations_or_the_command(folder: str) -> None:
    for path in (ROOT / "attention_ext").rglob("*.py"):
        if path.parent.name != folder and (folder, path.name) != ("command", "__main__.py"):
            assert not re.search(rf"^ *(from|import) .*\b{folder}\b", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize(("library", "module"), [("rich", "output.py"), ("matplotlib", "plot.py")])
def test_libraries_of_the_command_are_imported_when_needed(library: str, module: str) -> None:
    """In functions of one module each."""
    found = {
        (path.name, line[:1])
        for path in (ROOT / "attention_ext").rglob("*.py")
        for line in re.findall(rf"^ *(?:from|import) +{library}\b", path.read_text(), re.MULTILINE)
    }
    assert found == {(module, " ")}


PRIVATE = r"torch\._(?!_|check)|aten\._|forward_ad\._|\._schema\b|_hooks\b|_op_dispatcher"


PACKAGE = [path for path in PYTHON if path.is_relative_to(ROOT / "attention_ext")]


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_names_of_torch_stand_in_one_module(path: Path) -> None:
    """And none of them is there in vain. torch._check is documented as public."""
    if path.name != "_torch_private.py":
        code = [line.partition("#")[0].replace("module_hooks", "") for line in path.read_text().splitlines()]
        assert not [line for line in code if re.search(PRIVATE, line)]
        return
    others = "\n".join(other.read_text() for other in PACKAGE if other != path)
    for name in re.findall(r"^(?:def )?([a-zA-Z]\w*)(?:\(|:| =)", path.read_text(), re.MULTILINE):
        assert re.search(rf"\b{name}\b", others), name


@pytest.mark.parametrize("folder", ["attention", "linear"])
def test_attention_and_linear_do_not_see_each_other(folder: str) -> None:
    other = {"attention": "linear", "linear": "attention"}[folder]
    for path in (ROOT / "attention_ext" / folder).glob("*.py"):
        assert not re.search(rf"^ *(from|import) .*\b{other}\b", path.read_text(), re.MULTILINE), path
