"""Which tests run and in how many processes; fixtures: the device, a seeded generator, an allocator full of NaN, baselines."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from pairs import every_pair

CORES = len(os.sched_getaffinity(0))
ONE_PROCESS = (  # files and tests whose cases stay together: too much memory to run side by side, or one fixture that takes long
    "test_large.py",
    "test_packaging.py",
    *("test_dtensor.py::test_on_two_ranks", "test_two_devices_sharding.py"),
    *("test_parallel.py::test_as_in_one_process", "test_two_devices_parallel.py"),
)
MOST_WORKERS = 10  # of pytest-xdist: so many are known to fit into one GPU's 80 GB
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if workers > 1:  # a share of the cores for each and for what it starts; torch reads this when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, CORES // workers)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch  # noqa: E402
from helpers import baselines_taken  # noqa: E402
from known_calls import counted_anew, forget  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every combination of a test's parameters, not just every pair of values")
    share = "i/n: of the selected tests numbers i, i + n, ..., what is in ONE_PROCESS as one (processes side by side)"
    parser.addoption("--share", default="0/1", help=share)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_report_header(config: pytest.Config) -> str:
    return f"cases: {'all' if runs_whole(config) else 'those for every pair of values of two parameters of a test (all: --whole)'}"


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    return min((yield), MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Of -n without --dist: test by test to whichever process is free, what is in ONE_PROCESS to one."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return Scheduling(config, log)


def together(nodeid: str) -> str:
    """The same for cases that one process is to run."""
    test = nodeid.partition("[")[0]
    return next((scope for scope in (test.partition("::")[0], test) if Path(scope).name in ONE_PROCESS), nodeid)


def runs_whole(config: pytest.Config) -> bool:
    """With --whole; and of files and tests that are named, everything runs."""
    return config.getoption("--whole") or not all(Path(argument).is_dir() for argument in config.args)


def keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not runs_whole(config):
        keep(config, items, every_pair(items))
    first, step = map(int, config.getoption("--share").split("/"))
    if step > 1:
        order = list(dict.fromkeys(together(item.nodeid) for item in items))
        mine = set(order[first::step])
        keep(config, items, [item for item in items if together(item.nodeid) in mine])
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


@pytest.fixture(autouse=True)
def baselines(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Which baseline each comparison of the test took, as properties of its report (--junitxml)."""
    baselines_taken.clear()
    yield
    for name in baselines_taken:
        record_property("baseline", name)


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


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Nothing is known of any call at first; an entry for each call of sdpa that is checked and routed."""
    forget()
    return counted_anew(monkeypatch)
