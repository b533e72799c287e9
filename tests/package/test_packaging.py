"""What setup.py makes of a machine, what an sdist holds, and what scripts/make_dist lets pass. Nothing is compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from loader import script
from paths import ROOT
from processes import python

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
needs_cuda_torch = pytest.mark.skipif(CUDA_MAJOR is None, reason="a CPU-only torch builds nothing for CUDA")
helpers = script("setup_helpers.py", ".")
make_dist = script("make_dist")


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


def test_every_folder_of_the_package_is_installed() -> None:
    listed = re.search(r"^packages = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "attention_ext").rglob("*.py")}
    assert listed is not None and set(re.findall(r'"(.+?)"', listed[1])) == there


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


@pytest.mark.parametrize(
    ("listed", "there"),
    [
        ("8.0+PTX;9.0a", {"sm_80", "compute_80", "sm_90a"}),
        ("9.0a+PTX", {"sm_90a", "compute_90a"}),
        ("8.6 9.0", {"sm_86", "sm_90"}),
        ("Hopper", {"sm_90", "compute_90"}),
    ],
)
def test_architectures(listed: str, there: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert helpers.cuda_architectures() == there


@pytest.mark.parametrize(
    "listed", ["9.0;9.0a", "9.0a 9.0", "9.0+PTX;8.0;9.0a", "9.0 9.0a+PTX", "9.0a;Hopper", "Ampere Hopper 9.0a"]
)
def test_both_images_for_hopper_are_refused(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(SystemExit, match=rf"TORCH_CUDA_ARCH_LIST: expected 9\.0a without plain 9\.0 .* got '{re.escape(listed)}'"):
        helpers.cuda_architectures()


@pytest.mark.parametrize("listed", ["8.0,9.0a", "8.0;", "9.0b", "hopper"])
def test_unknown_architectures(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(SystemExit, match=rf"TORCH_CUDA_ARCH_LIST: expected architectures .* got '{re.escape(listed)}'"):
        helpers.cuda_architectures()


@needs_cuda_torch
@pytest.mark.parametrize(
    ("listed", "fails", "said"),
    [
        ("9.0;9.0a", True, "expected 9.0a without plain 9.0"),
        ("8.0;9.0", False, "leaves the kernels for Hopper out"),
        ("", False, ""),
    ],
)
def test_setup_looks_at_the_architectures(listed: str, fails: bool, said: str, toolkit: dict[str, str]) -> None:
    env = os.environ | toolkit | {"TORCH_CUDA_ARCH_LIST": listed}
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode != 0) == fails
    lines = [line for line in done.stderr.splitlines() if line.startswith("TORCH_CUDA_ARCH_LIST")]
    assert len(lines) == bool(said) and all(said in line for line in lines), done.stderr


GOOD_TAG = "cp310-abi3-manylinux_2_34_x86_64"
FILES = {"attention_ext/__init__.py": "", "attention_ext/_C.abi3.so": "code"}


def wheel(folder: Path, tag: str, files: dict[str, str] = FILES, inside: str | None = None) -> Path:
    folder.mkdir()
    path = folder / f"attention_ext-0.1.0+cpu-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("attention_ext-0.1.0+cpu.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {inside or tag}\n")
    return path


@pytest.mark.parametrize(
    ("repaired", "shown", "found"),
    [
        ({"tag": GOOD_TAG}, "manylinux_2_34_x86_64", []),
        (
            {"tag": "cp310-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64", "inside": "cp310-abi3-manylinux2014_x86_64"},
            "manylinux_2_17_x86_64",
            [],
        ),
        ({"tag": "cp310-abi3-linux_x86_64"}, "linux_x86_64", ["expected tags .* got cp310-abi3-linux_x86_64"]),
        ({"tag": GOOD_TAG, "inside": "cp310-abi3-linux_x86_64"}, "manylinux_2_34_x86_64", ["got cp310-abi3-linux_x86_64"]),
        ({"tag": GOOD_TAG.replace("abi3", "cp310")}, "manylinux_2_34_x86_64", ["expected tags cp310-abi3", "symbols allow"]),
        ({"tag": GOOD_TAG}, "manylinux_2_35_x86_64", ["symbols allow cp310-abi3-manylinux_2_35_x86_64"]),
        (
            {"tag": GOOD_TAG, "files": FILES | {"attention_ext.libs/libcudart-1.so.13": "", "attention_ext/_C.abi3.so": "patched"}},
            "manylinux_2_34_x86_64",
            ["lost attention_ext.libs/libcudart-1.so.13", "changed, added or lost attention_ext/_C.abi3.so"],
        ),
        ({"tag": GOOD_TAG, "files": {"attention_ext/__init__.py": ""}}, "manylinux_2_34_x86_64", ["lost attention_ext/_C.abi3.so"]),
    ],
)
def test_wheels_that_make_dist_lets_pass(repaired: dict, shown: str, found: list[str], tmp_path: Path) -> None:
    built = wheel(tmp_path / "built", "cp310-abi3-linux_x86_64")
    findings = make_dist.check_wheel(built, wheel(tmp_path / "repaired", **repaired), {"sym_tag": shown})
    assert len(findings) >= len(found) and bool(findings) == bool(found), findings
    for pattern in found:
        assert any(re.search(pattern, finding) for finding in findings), findings


def test_make_dist_wants_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "attention_ext-0.0.9.tar.gz").touch()
    monkeypatch.setattr(sys, "argv", ["make_dist", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        make_dist.main()
    assert stop.value.code == 2 and "argument folder: expected a new or an empty folder" in capsys.readouterr().err
