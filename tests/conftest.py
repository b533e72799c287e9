"""Fixtures: the device, a seeded generator, and an allocator full of NaN."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="0/1", help="i/n: of the selected tests numbers i, i + n, ... (processes side by side)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.hookimpl(trylast=True)  # behind -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, config.getoption("--share").split("/"))
    if step > 1:
        config.hook.pytest_deselected(items=[item for number, item in enumerate(items) if number % step != first])
        items[:] = items[first::step]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20260101)


def fill_with_nan() -> None:
    if not torch.cuda.is_available():
        return
    large = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(2)]
    small = [torch.full((1 << bits,), float("nan"), device="cuda") for bits in range(7, 18) for _ in range(8)]
    torch.cuda.synchronize()
    del large, small


@pytest.fixture
def poison(device: str) -> None:
    """Memory that the next allocations will reuse holds NaN, so a read of what was never written shows."""
    if device == "cuda":
        fill_with_nan()


@pytest.fixture
def poison_all() -> None:
    """The same for tests whose device is that of a kernel."""
    fill_with_nan()


@pytest.fixture
def deterministic() -> object:
    """Deterministic algorithms for the length of one test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
