"""Pythons that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paths import SUPPORT


def importing(*folders: Path) -> dict[str, str]:
    """The environment in which a process imports from these folders and this one as well."""
    paths = [*folders, SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def python(
    code: str,
    *args: object,
    options: Sequence[str] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    timeout: float | None = None,
    **environment: str,
) -> str:
    """What a Python of its own prints on this code, given args; it must end well. environment: on top of env."""
    command = [sys.executable, *options, "-c", code, *map(str, args)]
    env = {**env, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()
