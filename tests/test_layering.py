"""Who may know whom: torch in csrc/binding only, PTX in csrc/device only, line budgets, no generated or leftover code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})
PYTHON = [*sorted((ROOT / "attention_ext").rglob("*.py")), ROOT / "setup.py"]


def test_sources_are_there() -> None:
    assert any(p.name == "plan.cpp" for p in CSRC)
    assert any(p.parent.name == "binding" for p in CSRC)


@pytest.mark.parametrize("path", CSRC, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    text = path.read_text()
    if path.parent.name != "binding":
        assert not re.search(r'#include\s*[<"](torch|ATen|c10|Python)', text), "torch headers stand in csrc/binding only"
    if path.parent.name != "device":
        assert not re.search(r"\basm\b", text), "PTX stands in csrc/device only"
    if path.name in {"plan.h", "plan.cpp"}:
        assert "cuda" not in "\n".join(re.findall(r"#include.*", text)), "the plan is pure host code"
    if path.parent.name == "pipeline" or path.suffix == ".cu":
        assert not re.search(r"\b(exit|abort)\s*\(", text), "nothing exits"


@pytest.mark.parametrize("path", CSRC, ids=lambda p: str(p.relative_to(ROOT)))
def test_line_budget_of_csrc(path: Path) -> None:
    budget = 300 if path.parent.name == "binding" else 400
    assert len(path.read_text().splitlines()) <= budget


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_line_budget_of_python(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (100 if path.name == "setup.py" else 300)


def test_package_needs_nothing_but_torch() -> None:
    stdlib = {"argparse", "collections", "contextlib", "dataclasses", "functools", "importlib", "logging", "math", "pkgutil"}
    stdlib |= {"platform", "statistics", "sys", "time", "types", "typing"}
    for path in (ROOT / "attention_ext").rglob("*.py"):
        imported = re.findall(r"^(?:from|import) +([a-zA-Z_]+)", path.read_text(), re.MULTILINE)
        assert set(imported) <= stdlib | {"torch", "attention_ext"}, path
