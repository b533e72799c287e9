"""DTensor operands on two GPUs over NCCL: the checks of sharding_checks.py, which test_dtensor.py runs on the CPU."""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

import ranks
import sharding_checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return ranks.outcomes("cuda", tmp_path_factory.mktemp("ranks"), "sharding_checks")


@pytest.mark.parametrize("name", sharding_checks.CHECKS)
def test_on_two_devices(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == ["", ""], "\n".join(outcomes[name])
