"""preferred: kinds of problem that were measured faster than PyTorch's operator, where a kernel for Hopper takes them. No GPU."""

from __future__ import annotations

import pytest
import torch
from choice import CAP, Plan

HALF, FLOAT, DOUBLE = 0, 2, 3  # DataType
BOOL = 1  # MaskType
WIDE = {"type": HALF, "N": 8, "L": 1024, "S": 1024, "E": 512, "Ev": 512}
SMALLEST = {"type": FLOAT, "N": 64, "L": 512, "S": 512, "E": 64, "Ev": 64}


@pytest.fixture(autouse=True)
def hopper_kernels() -> None:
    if "9.0a" not in torch.ops.attention_ext.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")


def plan(facts: dict[str, int], capability: int = 90) -> Plan:
    return Plan(*torch.ops.attention_ext.plan("forward", [*facts], [*facts.values()], capability, 132, CAP))


@pytest.mark.parametrize("more", [{}, {"E": 1024, "Ev": 1024}, {"E": 264, "S": 256}, {"N": 1}, {"mask": BOOL}], ids=str)
def test_half_types(more: dict[str, int]) -> None:
    assert plan(WIDE | more).preferred and not plan(WIDE | more, 80).preferred


OTHERS = ({"S": 64}, {"L": 64, "causal": 1}, {"Ev": 256}, {"E": 1032}, {"dropout": 1}, {"type": DOUBLE})


@pytest.mark.parametrize("more", OTHERS, ids=str)
def test_not_half_types(more: dict[str, int]) -> None:
    assert not plan(WIDE | more).preferred


ALIKE = ({}, {"E": 1024, "Ev": 1024}, {"L": 16384, "S": 16384, "N": 1}, {"E": 65}, {"causal": 1}, {"mask": BOOL})


@pytest.mark.parametrize("more", ALIKE, ids=str)
def test_float32(more: dict[str, int]) -> None:
    """Where its kernel runs by default."""
    found = plan(SMALLEST | more)
    assert found.preferred and found.kernel == "sm90_split_half", found.reason
    assert not plan(SMALLEST | more, 80).preferred


UNLIKE = ({"S": 511}, {"L": 511}, {"N": 63}, {"E": 63}, {"Ev": 1025}, {"dropout": 1}, {"S": 1 << 17}, {"type": DOUBLE})


@pytest.mark.parametrize("more", UNLIKE, ids=str)
def test_not_float32(more: dict[str, int]) -> None:
    assert not plan(SMALLEST | more).preferred
