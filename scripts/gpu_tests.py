"""The tests of a GPU and the randomised examples, in processes: a part of scripts/gpu_check."""

import concurrent.futures
import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from evidence import last_json
from sanitizers import LONGEST, log, run

__all__ = ["PROCESSES", "RANDOMISED", "run_randomised", "run_tests", "shares"]

ROOT = Path(__file__).resolve().parent.parent
RANDOMISED = [sys.executable, str(ROOT / "tests" / "support" / "randomised.py"), "--device", "cuda"]
PROCESSES = 10  # of pytest
ALONE = ("attention/test_large.py", "attention/test_contract_traced.py")  # long files, with a process each


def shares(cards: int = 1) -> list[list[str]]:
    """What each process of pytest is to run, PROCESSES of them a card."""
    others, rest = [".", *(f"--ignore={file}" for file in ALONE)], cards * PROCESSES - len(ALONE)
    return [[file] for file in ALONE] + [[*others, f"--share={number}/{rest}"] for number in range(rest)]


def run_tests(shares: list[list[str]], *envs: dict[str, str]) -> list[ET.Element]:
    """The whole of pytest -m gpu, a process for each share, the environments by turns: the cases of their reports, and an error
    where one did not finish."""
    folder = Path(tempfile.mkdtemp())
    reports = [folder / f"report_{number}.xml" for number in range(len(shares))]

    def run_share(share: list[str], report: Path, env: dict[str, str]) -> int | None:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--whole", "-p", "no:cacheprovider", "--maxfail=50"]
        # A module that cannot be imported is one error, and all others run.
        command += ["--continue-on-collection-errors", f"--junitxml={report}", *share]
        with contextlib.suppress(subprocess.TimeoutExpired):
            # In tests/: the package in the folder above would be imported before the wheel's.
            env = env | {"OMP_NUM_THREADS": "1"}
            return subprocess.run(command, env=env, cwd=ROOT / "tests", check=False, timeout=LONGEST).returncode
        return None

    with concurrent.futures.ThreadPoolExecutor(len(shares)) as pool:  # all at once, however few cores there are
        codes = list(pool.map(run_share, shares, reports, itertools.cycle(envs)))
    cases: list[ET.Element] = []
    for share, report, code in zip(shares, reports, codes, strict=True):
        cases += ET.parse(report).getroot().iter("testcase") if report.exists() else []
        if code not in (0, 1):  # all passed, some failed
            cases.append(ET.Element("testcase", classname=f"pytest ended with {code}", name=" ".join(share)))
            ET.SubElement(cases[-1], "error")
    return cases


def run_randomised(examples: int, env: dict[str, str]) -> dict[str, Any]:
    """tests/support/randomised.py on the GPU: how many examples, and those that failed."""
    begin = time.monotonic()
    returncode, stdout, stderr = run([*RANDOMISED, "--examples", str(examples), "--workers", "5", "--json"], env)
    found = last_json(stdout)
    if found is None or "count" not in found or "failures" not in found:
        log((stdout + stderr)[-3000:])
        return {"asked": examples, "count": 0, "failures": [f"it ended with {returncode} and without a result"], "failed": 1}
    failures = found["failures"]
    for failure in failures[:10]:
        log(f"randomised: {failure}")
    return {
        "asked": examples,
        "count": found["count"],
        "failed": len(failures),
        "failures": [str(failure)[:2000] for failure in failures[:20]],
        "seconds": time.monotonic() - begin,
    }
