"""FSDP2 and tensor parallelism on two GPUs over NCCL: the checks of parallel_checks.py, which test_parallel.py runs on the CPU.

Those of models of transformers run where it is installed.
"""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

import parallel_checks
import ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return ranks.outcomes("cuda", tmp_path_factory.mktemp("ranks"), "parallel_checks")


@pytest.mark.parametrize("name", parallel_checks.CHECKS)
def test_on_two_devices(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == ["", ""], "\n".join(outcomes[name])
