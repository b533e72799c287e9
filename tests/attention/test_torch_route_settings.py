"""Settings of the process, and cards, that decide which of PyTorch's back ends runs: back ends turned off, determinism, no card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_route import (
    fake,
    fake_qkv,
    forgotten,
    generous,  # noqa: F401 (a fixture for all tests here)
    needs_library,
    pretend,
    routed,
)

from attention_ext import _torch_private

HOPPER = (9, 0)
pytestmark = needs_library


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with forgotten(), FakeTensorMode():
        pretend(monkeypatch, HOPPER)
        yield


@pytest.mark.parametrize(
    ("back_ends", "plain", "gradient", "masked"),
    [
        ([SDPBackend.MATH], "kernel", "kernel", "kernel"),
        ([SDPBackend.FLASH_ATTENTION], "flash", "flash", "kernel"),
        ([SDPBackend.CUDNN_ATTENTION], "kernel", "kernel", "kernel"),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], "cudnn", "cudnn", "kernel"),
        ([SDPBackend.EFFICIENT_ATTENTION], "kernel", "kernel", "efficient"),
    ],
)
def test_back_ends_turned_off(back_ends: list[SDPBackend], plain: str, gradient: str, masked: str) -> None:
    with sdpa_kernel(back_ends):
        assert routed(*fake_qkv())[0] == plain
        assert routed(*fake_qkv(grad=True))[0] == gradient
        assert routed(*fake_qkv(grad=True), fake(256, 256, dtype=torch.bool))[0] == masked


def test_order_of_the_user() -> None:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert routed(*fake_qkv())[0] == "flash"


def test_cudnn_that_does_not_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch 2.10: the flash kernels as far as they are faster."""
    pretend(monkeypatch, HOPPER, cudnn_first=False)
    assert routed(*fake_qkv())[0] == "flash" and routed(*fake_qkv(E=128))[0] == "kernel"
    assert routed(*fake_qkv(E=256, grad=True))[0] == "flash"


@pytest.mark.parametrize(
    ("warn_only", "plain", "gradient", "masked"), [(False, "flash", "flash", "efficient"), (True, "cudnn", "kernel", "kernel")]
)
def test_deterministic(warn_only: bool, plain: str, gradient: str, masked: str) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert routed(*fake_qkv())[0] == plain
        assert routed(*fake_qkv(grad=True))[0] == gradient
        assert routed(*fake_qkv(grad=True), fake(256, 256, dtype=torch.bool))[0] == masked
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_another_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = _torch_private._FLASH_REGISTRY
    if registry is None:
        pytest.skip("this torch has no registry of implementations")
    monkeypatch.setattr(registry, "_FLASH_ATTENTION_ACTIVE", ("FA3", None))
    got, reason = routed(*fake_qkv(L=192, grad=True))
    assert got == "kernel" and "put in its place" in reason
    assert routed(*fake_qkv(), dropout_p=0.5)[0] == "kernel"


@pytest.mark.parametrize(("capability", "E", "p", "target"), [
    ((8, 6), 200, 0.0, "efficient"), ((8, 6), 256, 0.0, "flash"), ((8, 6), 256, 0.1, "kernel"), ((8, 0), 200, 0.1, "flash"),
    ((12, 0), 224, 0.0, "efficient"),
])  # fmt: skip
def test_gradients_that_flash_has_not(capability: tuple[int, int], E: int, p: float, target: str, monkeypatch) -> None:
    pretend(monkeypatch, capability)
    assert routed(*fake_qkv(E=E, grad=True), dropout_p=p)[0] == target
    assert routed(*fake_qkv(E=E))[0] == "flash"


@pytest.mark.parametrize("capability", [(9, 0), (8, 6), None])
def test_dropout_does_not_look_at_the_gradient(capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reentrant checkpointing runs a call under no_grad first, and the second run must draw what the first has drawn."""
    pretend(monkeypatch, capability)
    targets = []
    for E in (64, 128, 200, 256):
        inputs = fake_qkv(E=E, grad=True)
        targets.append(routed(*inputs, dropout_p=0.1)[0])
        with torch.no_grad():
            assert routed(*inputs, dropout_p=0.1)[0] == targets[-1]
    assert targets[:2] == ["flash", "flash"]


def test_a_gradient_is_wanted_where_autograd_records_it() -> None:
    query, key, value = fake_qkv(L=192)
    value.requires_grad_()
    assert routed(query, key, value)[0] == "flash"
    with torch.no_grad():
        assert routed(query, key, value)[0] == "cudnn"


def test_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """What traces without one goes by name, or to this package's kernels: PyTorch's operator would record its MATH back end."""
    pretend(monkeypatch, None)
    assert routed(*fake_qkv())[0] == "flash" and routed(*fake_qkv(E=256))[0] == "kernel"
    assert routed(*fake_qkv(E=256, grad=True))[0] == "flash" and routed(*fake_qkv(E=200, grad=True))[0] == "kernel"
    assert routed(*fake_qkv(grad=True), fake(256, 256, dtype=torch.bool))[0] == "efficient"
