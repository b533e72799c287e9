"""Which calls on CUDA PyTorch's back ends run: one call that each takes, and one thing after the other that keeps it from it.

The card is pretended and the tensors are fake, so that metadata decides and no GPU is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from cases import Case
from choice import CAP, facts
from paths import ROOT
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_route import (
    BF16,
    FP16,
    FP32,
    fake,
    fake_qkv,
    forgotten,
    generous,  # noqa: F401 (a fixture for all tests here)
    needs_library,
    pretend,
    routed,
)

import attention_ext
from attention_ext import _torch_private
from attention_ext.attention import router
from attention_ext.attention.routes import ROUTES

HOPPER = (9, 0)
pytestmark = needs_library


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch):
    with forgotten(), FakeTensorMode():
        pretend(monkeypatch, HOPPER)
        yield


def bool_mask(*shape: int) -> Tensor:
    return fake(*shape, dtype=torch.bool)


# name: (sizes of fake_qkv, mask, options, target on 9.0)
TAKEN: dict[str, tuple[dict[str, Any], tuple[int, ...] | None, dict[str, Any], str]] = {
    "plain": ({}, None, {}, "cudnn"),
    "float16": ({"dtype": FP16}, None, {}, "cudnn"),
    "widest": ({"E": 256}, None, {}, "cudnn"),
    "above": ({"E": 264}, None, {}, "kernel"),
    "odd length": ({"L": 199}, None, {}, "cudnn"),
    "causal": ({}, None, {"is_causal": True}, "cudnn"),
    "causal, L and S apart": ({"S": 512}, None, {"is_causal": True}, "cudnn"),
    "grouped": ({"heads": (8, 2)}, None, {"enable_gqa": True}, "cudnn"),
    "one query": ({"L": 1, "S": 512}, None, {}, "cudnn"),
    "one wide query": ({"L": 1, "S": 512, "E": 256}, None, {}, "kernel"),
    "values of 128": ({"E": 192, "Ev": 128}, None, {}, "cudnn"),
    "values of 64": ({"E": 192, "Ev": 64}, None, {}, "kernel"),
    "scale": ({}, None, {"scale": 0.5}, "cudnn"),
    "bool mask": ({}, (1, 1, 256, 256), {}, "kernel"),
    "plain, gradient": ({"grad": True}, None, {}, "cudnn"),
    "odd length, gradient": ({"L": 192, "grad": True}, None, {}, "flash"),
    "odd length, causal, gradient": ({"L": 192, "grad": True}, None, {"is_causal": True}, "cudnn"),
    "causal, L and S apart, gradient": ({"S": 512, "grad": True}, None, {"is_causal": True}, "efficient"),
    "grouped, causal, L and S apart, gradient": (
        ({"S": 512, "heads": (8, 2), "grad": True}, None, {"is_causal": True, "enable_gqa": True}, "kernel")
    ),
    "one query, gradient": ({"L": 1, "S": 512, "grad": True}, None, {}, "kernel"),
    "values of 128, odd length, gradient": ({"E": 64, "Ev": 128, "L": 192, "grad": True}, None, {}, "efficient"),
    "bool mask, gradient": ({"grad": True}, (1, 1, 256, 256), {}, "efficient"),
    "bool mask of keys, gradient": ({"grad": True}, (2, 1, 1, 256), {}, "efficient"),
    "wide bool mask, gradient": ({"E": 192, "grad": True}, (1, 1, 256, 256), {}, "kernel"),
    "dropout": ({}, None, {"dropout_p": 0.1}, "flash"),
    "dropout, gradient": ({"E": 128, "grad": True}, None, {"dropout_p": 0.1}, "flash"),
    "dropout, causal, L and S apart": ({"S": 512}, None, {"dropout_p": 0.1, "is_causal": True}, "kernel"),
    "float32": ({"dtype": FP32}, None, {}, "kernel"),
    "float32, causal, gradient": ({"dtype": FP32, "grad": True}, None, {"is_causal": True}, "kernel"),
    "float32, dropout": ({"dtype": FP32}, None, {"dropout_p": 0.1}, "kernel"),
    "float64": ({"dtype": torch.float64}, None, {}, "kernel"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_runs(name: str) -> None:
    sizes, mask, options, target = TAKEN[name]
    got, reason = routed(*fake_qkv(**sizes), None if mask is None else bool_mask(*mask), **options)
    assert got == target, reason
    assert reason and "\n" not in reason and ". " not in reason


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (10, 0), (12, 0)])
def test_cards_without_a_record(name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """There a back end runs whatever it takes within the contract, by name; never cuDNN."""
    pretend(monkeypatch, capability)
    sizes, mask, options, on_hopper = TAKEN[name]
    half, E, Ev = sizes.get("dtype") in (None, FP16), sizes.get("E", 64), sizes.get("Ev", sizes.get("E", 64))
    square = "S" not in sizes or not options.get("is_causal", False)
    flash = half and mask is None and Ev == E and square and E <= 256
    efficient = half and not options.get("dropout_p") and not options.get("enable_gqa") and E <= 256
    expected = "kernel" if "float64" in name else "flash" if flash else "efficient" if efficient else "kernel"
    got, reason = routed(*fake_qkv(**sizes), None if mask is None else bool_mask(*mask), **options)
    assert got == expected, reason
    assert "flash" in on_hopper or "cudnn" not in got


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (12, 9)])
def test_other_cards(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability)
    assert routed(*fake_qkv())[0] == "kernel"


def shifted(t: Tensor) -> Tensor:
    return t.new_empty(t.numel() + 1)[1:].view(t.shape)


def rows_of(width: int) -> Any:
    return lambda t: t.new_empty(*t.shape[:-1], width)[..., : t.size(-1)]


# What is done to the key of a call that a back end takes, and a word of why it does not any more.
SPOILT_KEY: dict[str, tuple[Any, str]] = {
    "address": (shifted, "begin on 16-byte"),
    "rows": (rows_of(65), "rows on 16-byte"),
    "columns": (lambda t: t.new_empty(*t.shape[:-1], 128)[..., ::2], "adjacent columns"),
    "overlapping rows": (lambda t: t.as_strided(t.shape, (t.stride(0), t.stride(1), 32, 1)), "overlap"),
    "one row": (lambda t: t[:, :, :1].expand(t.shape), "overlap"),
    "expanded heads": (lambda t: t[:, :1].expand(t.shape), "not expanded"),
    "expanded batch": (lambda t: t[:1].expand(t.shape), "not expanded"),
    "broadcast batch": (lambda t: t[:1], "broadcast"),
    "broadcast heads": (lambda t: t[:, :1], "broadcast"),
}


@pytest.mark.parametrize("spoil", SPOILT_KEY)
@pytest.mark.parametrize("capability", [HOPPER, (8, 0)])
def test_memory(spoil: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability)
    query, key, value = fake_qkv()
    assert routed(query, key, value)[0] != "kernel"
    got, reason = routed(query, SPOILT_KEY[spoil][0](key), value)
    assert got == "kernel" and SPOILT_KEY[spoil][1] in reason


# Options, sizes and masks that no back end takes; a word of why.
REFUSED: dict[str, tuple[dict[str, Any], tuple[Any, ...] | None, dict[str, Any], str]] = {
    "float mask": ({}, ((256, 256), BF16), {}, "float mask"),
    "float32 mask next to half": ({}, ((256, 256), FP32), {}, "float mask"),
    "float32": ({"dtype": FP32}, None, {}, "TF32"),
    "dropout of 1": ({}, None, {"dropout_p": 1.0}, "dropout_p of 1"),
    "negative scale": ({}, None, {"scale": -1.0}, "positive"),
    "scale 0": ({}, None, {"scale": 0.0}, "positive"),
    "denormal scale": ({}, None, {"scale": 2.0**-127}, "normal"),
    "infinite scale": ({}, None, {"scale": float("inf")}, "normal"),
    "scale NaN": ({}, None, {"scale": float("nan")}, "normal"),
    "scale above float32": ({}, None, {"scale": 1e39}, "normal"),
    "E of 4": ({"E": 68}, None, {}, "multiples of 8"),
    "Ev of 4": ({"Ev": 68}, None, {}, "multiples of 8"),
    "no queries": ({"L": 0, "S": 5}, None, {}, "sizes of 0"),
    "no keys": ({"S": 0}, None, {}, "sizes of 0"),
    "no batch": ({"B": 0}, None, {}, "sizes of 0"),
    "no head dim": ({"E": 0, "Ev": 8}, None, {}, "sizes of 0"),
    "no width of values": ({"Ev": 0}, None, {}, "sizes of 0"),
    "large batch": ({"B": 65536, "heads": (1,), "L": 1, "S": 8}, None, {}, "65535"),
    "many heads": ({"B": 1, "heads": (65536,), "L": 8}, None, {}, "65535"),
    "many elements": ({"B": 64, "L": 1 << 16}, None, {}, "32 bits"),
    "scores of a head": (
        {"B": 1, "heads": (1,), "L": 1 << 16, "S": 1 << 15, "grad": True},
        ((1, 1 << 15), torch.bool),
        {},
        "32 bits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("capability", [HOPPER, (8, 0)])
def test_refused(name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability)
    sizes, mask, options, words = REFUSED[name]
    got, reason = routed(*fake_qkv(**sizes), None if mask is None else fake(*mask[0], dtype=mask[1]), **options)
    assert got == "kernel" and words in reason


def test_sums_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """B Hq ceil128(L) E of 2^31: FlashAttention-2's backward reads beyond its memory."""
    sizes = {"B": 1024, "heads": (128,), "L": 8, "E": 192}
    assert routed(*fake_qkv(**sizes), is_causal=True)[0] == "cudnn"
    got, reason = routed(*fake_qkv(**sizes, grad=True), is_causal=True)
    assert got == "kernel" and reason.count("the sums of a gradient in 32 bits") == 2
    pretend(monkeypatch, (8, 0))
    assert routed(*fake_qkv(**sizes, grad=True))[0] == "efficient"


def test_mask_that_requires_grad() -> None:
    assert routed(*fake_qkv(dtype=FP32), fake(256, 256, dtype=FP32).requires_grad_())[0] == "kernel"


def test_heads_of_values() -> None:
    query, key, _ = fake_qkv(heads=(8, 4))
    got, reason = routed(query, key, fake(2, 2, 256, 64), enable_gqa=True)
    assert got == "kernel" and "heads" in reason


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_ranks(rank: int) -> None:
    leading = {2: (), 3: (4,), 5: (2, 3, 4)}[rank]
    query, key = fake(*leading, 256, 64), fake(*leading, 128, 64)
    assert routed(query, key, key)[0] == "cudnn"
    assert attention_ext.sdpa(query.float(), key.float(), key.float()).shape == query.shape


def test_rank_5_that_does_not_merge() -> None:
    whole = fake(2, 4, 8, 256, 64)
    for t in (whole[:, :3], whole.transpose(0, 1)):
        got, reason = routed(t, t, t)
        assert got == "kernel" and "merge" in reason
    other = fake(4, 2, 8, 256, 64)  # merged to the same batch, which is not what broadcasting gives
    with pytest.raises(RuntimeError, match="broadcast"):
        routed(whole, other, other)
    one, two = fake(2, 1, 8, 256, 64), fake(1, 2, 8, 256, 64)
    assert routed(one, two, two)[0] == "kernel"
    assert routed(whole, whole, whole, bool_mask(256, 256))[0] == "kernel"


def test_only_sdpa() -> None:
    call, _ = router.checked(*fake_qkv())
    assert router.route(call).target == "cudnn" and router.route_with_lse(call).target == "kernel"


def test_explain() -> None:
    def explained(*tensors: Tensor, **options: Any) -> attention_ext.Explanation:
        found = attention_ext.explain(*tensors, **options)
        assert str(found).startswith(f"{found.kernel}, because {found.reason}; ") and not found.preferred
        return found

    flash = explained(*fake_qkv(L=192, grad=True))
    assert flash.kernel == "torch: flash" and "not cudnn: its gradients can be NaN" in flash.reason and "9.0" in flash.reason
    masked = explained(*fake_qkv(grad=True), bool_mask(2, 1, 256, 250 + 6))
    assert masked.kernel == "torch: efficient" and masked.workspace == 2 * (2 * 256 * 256 + 2 * 8 * 256 * 64)
    rows = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in fake_qkv(L=250, grad=True)]
    expanded = explained(*rows, bool_mask(2, 1, 1, 250).expand(2, 8, 250, 250))
    assert expanded.workspace == 2 * 256 * 2, "as large as the mask is in memory"
    own = explained(*fake_qkv(E=264))
    assert "PyTorch's operator does not run: " in own.reason and "up to a head dim of 256" in own.reason


def test_no_call_is_both_preferred_and_borrowed() -> None:
    """This package's verdict that it is faster (csrc/plan) and the table of back ends exclude each other."""
    for E in (64, 128, 192, 256, 264, 512, 1024):
        for dtype in (BF16, FP32):
            of = facts(Case("", 2, 8, 8, 256, 256, E, dtype))
            problem = (list(of), [int(value) for value in of.values()])
            preferred = _torch_private.runs_host_code(torch.ops.attention_ext.plan.default, "forward", *problem, 90, 132, CAP)[3]
            assert not (preferred and routed(*fake_qkv(E=E, dtype=dtype))[0] != "kernel")


def test_a_gradient_of_the_mask_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such calls were measured faster as well."""
    monkeypatch.setattr(router, "_kernel_plan", lambda call: ("sm90_512", "of a reason", 0, True))
    query, key, value = fake_qkv(E=512)
    mask = fake(256, 256).requires_grad_()
    assert attention_ext.preferred(query, key, value, mask.detach()) and attention_ext.preferred(query, key, value, mask)


def test_the_table_is_that_of_the_record() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_routes.py", "--check"], check=True)
    files = sorted((ROOT / "bench" / "results").glob("backends_*.json"))
    assert files and set(ROUTES) == {tuple(json.loads(path.read_text())["capability"]) for path in files}
