"""torch warns on import where NumPy is missing. attention_ext needs no NumPy, so its import and its command print nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [
    "--batch 1 --heads 2 --length 32 --head-dim 64 --rows 8 --features 16 --repeat 1",
    "bench --shape 1,2,2,8,8,8 --repeat 1 --backward",
    "explain",
    "verify",
]
ALL = f"""
from attention_ext.__main__ import main
from attention_ext.command import verify
verify.SPREAD = [(1, 4, 2, 32, 48, 16, 8, False, mask) for mask in ("", "bool", "bias")]
assert not any([main(command.split()) for command in {COMMANDS}])
"""
# Python runs this file before anything else.
SITE = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            raise ModuleNotFoundError("{error}", name=name)
sys.meta_path.insert(0, Finder())
"""


def call(folder: Path, *args: str, error: str = "No module named 'numpy'") -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(SITE.format(error=error))
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {key: text for key, text in os.environ.items() if key != "PYTHONWARNINGS"} | {"PYTHONPATH": paths}
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.each_value
@pytest.mark.parametrize("options", [[], ["-W", "error"]], ids=["", "error"])
@pytest.mark.parametrize("command", [["-m", "attention_ext", "info"], ["-c", ALL]], ids=["info", "others"])
def test_nothing_is_said(command: list[str], options: list[str], tmp_path: Path) -> None:
    done = call(tmp_path, *options, *command)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_a_numpy_that_fails_is_still_reported(tmp_path: Path) -> None:
    done = call(tmp_path, "-c", "import attention_ext", error="a part of numpy is missing")
    assert done.returncode == 0 and "Failed to initialize NumPy: a part of numpy is missing" in done.stderr


def test_the_filters_of_warnings_stay(tmp_path: Path) -> None:
    """Those that torch sets on import among them."""
    after = [
        call(tmp_path, "-c", f"import {name}, warnings; print(warnings.filters)").stdout for name in ("torch", "attention_ext")
    ]
    assert after[0] == after[1] and after[0].strip()
