"""Pythons that tests start."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from paths import SUPPORT

FORKS = """
import json, os, signal, sys, torch
for line in sys.stdin:
    task = json.loads(line)
    pid = os.fork()
    if pid == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(240)  # what takes longer hangs
for number, path in enumerate((os.devnull, task["stdout"], task["stderr"])):
    os.dup2(os.open(path, os.O_RDWR), number)
os.chdir(task["cwd"])
os.environ.update(task["environment"])
exec(task["code"], {"__name__": "__main__"})
"""


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


@functools.cache
def forking() -> subprocess.Popen[str]:
    """A Python that has imported torch, and forks for each line of its input. It ends with this process, which holds the pipe."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKS]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def python_after_torch(code: str, cwd: Path | None = None, **environment: str) -> str:
    """What `python` gives for code that begins with `import torch`, without the seconds which that takes: from a fork."""
    server = forking()
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        task = {"code": code, "cwd": str(cwd or Path.cwd()), "environment": environment}
        print(json.dumps(task | {"stdout": stdout.name, "stderr": stderr.name}), file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        printed, errors = stdout.read(), stderr.read()
    assert status == "0", f"exit code {status}\n{printed}{errors}"
    return printed.strip()
