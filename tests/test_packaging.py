"""What setup.py makes of a machine, and what an sdist holds. Nothing is compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PARTS = (
    "setup.py",
    "setup_helpers.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "csrc",
    "attention_ext",
)
HOOKS = "import sys; from setuptools import build_meta; out = sys.argv[1]; "
METADATA = "build_meta.prepare_metadata_for_build_wheel(out); "
SDIST = "build_meta.build_sdist(out); "
CUDA_MAJOR = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None


def load(path: Path) -> ModuleType:
    loader = SourceFileLoader(re.sub(r"\W", "_", path.name), str(path))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


helpers = load(ROOT / "setup_helpers.py")


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine whose nvcc is of torch's CUDA major; it only says so."""
    pytest.importorskip("setuptools", minversion="77")
    home = tmp_path_factory.mktemp("cuda")
    (home / "bin").mkdir()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {CUDA_MAJOR or 13}.0, V{CUDA_MAJOR or 13}.0.88'\n")
    nvcc.chmod(0o755)
    return {"CUDA_HOME": str(home), "ATTENTION_EXT_CUDA": "", "TORCH_CUDA_ARCH_LIST": ""}


def python(code: str, *args: object, cwd: Path, **environment: str) -> None:
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def version_in(folder: Path) -> str:
    found = next(folder.glob("*.dist-info/METADATA"))
    return re.search(r"^Version: (.+)$", found.read_text(), re.MULTILINE).group(1)


@pytest.fixture(scope="module")
def sdists(tmp_path_factory: pytest.TempPathFactory, toolkit: dict[str, str]) -> dict[str, Path]:
    """Unpacked sdists, made with a toolkit and without, each in a tree of its own."""
    made = {}
    for name, environment in (("with", toolkit), ("without", toolkit | {"ATTENTION_EXT_CUDA": "0"})):
        folder = tmp_path_factory.mktemp(name)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / "tree" / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                (folder / "tree").mkdir(exist_ok=True)
                shutil.copy(source, folder / "tree")
        python(HOOKS + METADATA + SDIST, folder, cwd=folder / "tree", **environment)
        label = f"+cu{CUDA_MAJOR}" if name == "with" and CUDA_MAJOR else "+cpu"
        assert version_in(folder).endswith(label), "a build from the tree says what is built in"
        archive = next(folder.glob("*.tar.gz"))
        with tarfile.open(archive) as opened:
            opened.extractall(folder / "unpacked")
        made[name] = folder / "unpacked" / archive.name.removesuffix(".tar.gz")
    return made


def test_an_sdist_is_the_same_with_and_without_a_toolkit(sdists: dict[str, Path]) -> None:
    one, other = ({str(p.relative_to(sdist)): p.read_bytes() for p in sdist.rglob("*") if p.is_file()} for sdist in sdists.values())
    assert one.keys() == other.keys() and {name for name in one if one[name] != other[name]} == set()
    assert sdists["with"].name == sdists["without"].name and "+" not in sdists["with"].name
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert there | {"setup.py", "setup_helpers.py", "attention_ext/py.typed"} <= one.keys()


def test_a_build_from_an_sdist_has_its_version(sdists: dict[str, Path], toolkit: dict[str, str], tmp_path: Path) -> None:
    """pip compares the version in an sdist's file name with that of what it builds from it."""
    python(HOOKS + METADATA, tmp_path, cwd=sdists["with"], **toolkit)
    assert version_in(tmp_path) == sdists["with"].name.split("-")[1]
    assert helpers.csrc_tree(sdists["with"]) == helpers.tree_id(ROOT / "csrc").hex()


def test_the_id_of_sources_is_that_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "csrc" / "a").mkdir(parents=True)
    (tmp_path / "csrc" / "empty").mkdir()
    for name, text in (("a/b.cu", "int a;\n"), ("a.h", ""), ("a-.cpp", "// c\n"), ("a.h.orig", "left by an editor")):
        (tmp_path / "csrc" / name).write_text(text)
    by_git = "39fc9c0121dc6b2fa45678a582785ab297a9c360"  # git write-tree --prefix=csrc/
    for committed, expected in (("", by_git), (by_git, by_git), ("0" * 40, f"{by_git}-dirty")):
        monkeypatch.setattr(helpers, "output", lambda *command, committed=committed, **_: committed)
        assert helpers.csrc_tree(tmp_path) == expected
