"""FSDP2 and tensor parallelism on two ranks of the CPU: the checks of parallel_checks.py, and examples/parallel.py by torchrun."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

import parallel_checks
import ranks
from loader import script
from paths import ROOT
from processes import importing

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed, or older: pip install 'attention_ext[transformers]'",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return ranks.outcomes("cpu", tmp_path_factory.mktemp("ranks"), "parallel_checks")


@pytest.mark.parametrize("name", parallel_checks.CHECKS)
def test_as_in_one_process(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == ["", ""], "\n".join(outcomes[name])


def test_the_comparison_finds_a_wrong_gradient() -> None:
    """One that is a hundredth too large, as where a rank's share is not averaged; and the same results pass."""
    model = parallel_checks.make_own("sdpa")
    one = parallel_checks.train(model, [torch.arange(24).view(4, 6)])
    exact = parallel_checks.train(parallel_checks.make_own("eager").double(), [torch.arange(24).view(4, 6)])
    eps = torch.finfo(torch.float32).eps
    parallel_checks.compare(one, one, exact, eps)
    name = "gradient of layers.0.proj.q.weight"
    with pytest.raises(AssertionError, match=name):
        parallel_checks.compare(one | {name: one[name] * 1.01}, one, exact, eps)


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("processes, tensor", [(2, 1), (2, 2), (4, 2)])
def test_the_example(processes: int, tensor: int, tmp_path: Path) -> None:
    """It prints the losses of one process; both ways at once too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(ROOT / "examples" / "parallel.py"), "--steps=3", "--when=always", f"--tensor={tensor}"]
    env = importing(ROOT) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    example = script("parallel.py", "examples")
    with parallel_checks.registered():
        model = example.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=example.RATE)
        wanted = [example.train_step(model, optimizer, example.make_batch(step)) for step in range(3)]
    assert printed == pytest.approx(wanted, abs=2e-4) and wanted[2] < wanted[0] - 0.01
