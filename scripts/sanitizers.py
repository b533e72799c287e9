"""compute-sanitizer over a script of this repository."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from evidence import SHORT_COPY, unwritten_reads

__all__ = ["SANITIZERS", "log", "run", "run_sanitizer"]

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 480  # seconds of anything that is not timed, three times what it takes: a lent machine may give a command ten minutes
OURS = ["--kernel-name", "kernel_substring=attention_ext", "--error-exitcode", "9"]
SANITIZERS = {  # tool -> options
    "memcheck": OURS,
    "racecheck": OURS,
    "synccheck": [*OURS, "--num-cuda-barriers", "64"],  # of a block; the tool's own count of them can be too small
    "initcheck": ["--print-limit", "0"],  # watches all kernels: what one that it does not watch wrote is unwritten to it
}


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def run_sanitizer(tool: str, script: list[str], good: str, env: dict[str, str]) -> dict[str, Any]:
    """One compute-sanitizer tool over a script, whose output matches `good` if it came to its end and found nothing wrong."""
    command = ["compute-sanitizer", "--tool", tool, *SANITIZERS[tool], sys.executable, *script]
    begin = time.monotonic()
    # Every tensor gets memory of its own: in a block that several share, a read past the end of one goes unnoticed.
    returncode, stdout, stderr = run(command, env | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    summary = ["none", *re.findall(r"=+ (.*(?:SUMMARY|hazards).*)", stdout)][-1]
    reads = unwritten_reads(stdout) if tool == "initcheck" else []
    clean = returncode == 0 and re.search(good, stdout) is not None and not reads
    if not clean:
        log("".join(reads)[:3000] or (stdout + stderr)[-3000:])
    if tool == "initcheck":
        summary += f", {len(reads)} in kernels of this package, {stdout.count(SHORT_COPY)} at copies of less than 16 bytes"
    return {"clean": clean, "summary": summary, "seconds": time.monotonic() - begin}


def run(command: list[str], env: dict[str, str]) -> tuple[int, str, str]:
    """Exit code and what was printed; 124 after LONGEST seconds, 127 where there is no such program."""
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return 124, "", f"{command} did not finish in {LONGEST} s"
    except FileNotFoundError as error:
        return 127, "", str(error)
    return done.returncode, done.stdout, done.stderr
