"""What the linear operators refuse, real and fake, and in which words: the argument, what was expected, what came."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attention_ext

linear_float32 = torch.ops.attention_ext.linear_float32
fused = torch.ops.attention_ext.linear_batchnorm_softmax
HALF, F64, INT = torch.float16, torch.float64, torch.int64


def t(*shape: int, dtype: torch.dtype = torch.float32) -> tuple:
    """A tensor to be made later, on the device and under the mode of the test."""
    return shape, dtype


SIX = "{}: expected shape (6,), torch.float32 on {{device}}, got shape {}, torch.float32 on {{device}}"
# what differs from a call that is taken, the words after "attention_ext: "; {device} is that of the test
PRODUCT: dict[str, tuple[dict[str, Any], str]] = {
    "half input": ({"input": t(4, 8, dtype=HALF)}, "input: expected dtype float32, got torch.float16"),
    "double input": ({"input": t(4, 8, dtype=F64)}, "input: expected dtype float32, got torch.float64"),
    "integer input": ({"input": t(4, 8, dtype=INT)}, "input: expected dtype float32, got torch.int64"),
    "rank 0": ({"input": t()}, "input: expected rank 1 or more, got shape () of rank 0"),
    "half weight": ({"weight": t(6, 8, dtype=HALF)}, "weight: expected the input's dtype torch.float32, got torch.float16"),
    "rank of weight 1": ({"weight": t(8)}, "weight: expected a matrix (features, K), got shape (8,) of rank 1"),
    "rank of weight 3": ({"weight": t(2, 6, 8)}, "weight: expected a matrix (features, K), got shape (2, 6, 8) of rank 3"),
    "columns": ({"weight": t(6, 7)}, "weight: expected a matrix of as many columns as the input's K = 8, got shape (6, 7)"),
    "one column": ({"weight": t(6, 1)}, "weight: expected a matrix of as many columns as the input's K = 8, got shape (6, 1)"),
    "transposed": ({"weight": t(8, 6)}, "weight: expected a matrix of as many columns as the input's K = 8, got shape (8, 6)"),
    "length of bias": ({"bias": t(7)}, SIX.format("bias", "(7,)")),
    "bias of one": ({"bias": t(1)}, SIX.format("bias", "(1,)")),
    "rank of bias": ({"bias": t(1, 6)}, SIX.format("bias", "(1, 6)")),
    "half bias": (
        {"bias": t(6, dtype=HALF)},
        SIX.format("bias", "(6,)").replace("got shape (6,), torch.float32", "got shape (6,), torch.float16"),
    ),
}
STATS = {"running_mean": t(6), "running_var": t(6)}
DOUBLES = {"input": t(4, 8, dtype=F64), "weight": t(6, 8, dtype=F64), "bias": t(6, dtype=F64)}
FUSED: dict[str, tuple[dict[str, Any], str]] = {
    "integer input": (
        {"input": t(4, 8, dtype=INT)},
        "input: expected dtype float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "rank 1": ({"input": t(8)}, "input: expected a matrix (rows, K), got shape (8,) of rank 1"),
    "rank 3": ({"input": t(2, 4, 8)}, "input: expected a matrix (rows, K), got shape (2, 4, 8) of rank 3"),
    "half weight": PRODUCT["half weight"],
    "rank of weight": PRODUCT["rank of weight 1"],
    "columns": PRODUCT["columns"],
    "length of bias": PRODUCT["length of bias"],
    "half bias": PRODUCT["half bias"],
    "mean alone": ({"running_var": None}, "running_var: expected a tensor together with running_mean, got None"),
    "variance alone": ({"running_mean": None}, "running_mean: expected a tensor together with running_var, got None"),
    "no statistics": (
        {"running_mean": None, "running_var": None},
        "running_mean: expected a tensor where training is False, got None",
    ),
    **{f"length of {n}": ({n: t(5)}, SIX.format(n, "(5,)")) for n in ("bn_weight", "bn_bias", "running_mean", "running_var")},
    **{
        f"half {n}": ({n: t(6, dtype=HALF)}, f"{n}: expected dtype torch.float32, got torch.float16")
        for n in ("bn_weight", "bn_bias", "running_mean", "running_var", "scale")
    },
    "bfloat16 beside half": (
        {"input": t(4, 8, dtype=HALF), "weight": t(6, 8, dtype=HALF), "bias": None, "bn_bias": t(6, dtype=torch.bfloat16)},
        "bn_bias: expected the input's dtype torch.float16 or torch.float32, got torch.bfloat16",
    ),
    "float32 beside double": (DOUBLES, "bn_weight: expected dtype torch.float64, got torch.float32"),
    "rank of bn_weight": ({"bn_weight": t(1, 6)}, SIX.format("bn_weight", "(1, 6)")),
    "length of scale": ({"scale": t(5)}, "scale: expected shape (), (1,) or (6,), got shape (5,)"),
    "rank of scale": ({"scale": t(1, 6)}, "scale: expected shape (), (1,) or (6,), got shape (1, 6)"),
    "integer scale": ({"scale": t(1, dtype=INT)}, "scale: expected dtype torch.float32, got torch.int64"),
    "one row": (
        {"input": t(1, 8), "training": True},
        "input: expected more than 1 value per channel when training, got shape (1, 8)",
    ),
    "negative eps": ({"eps": -1e-5}, "eps: expected a number that is not negative, got -1e-05"),
    "eps 0 when training": ({"eps": 0.0, "training": True}, "eps: expected a positive number when training, got 0.0"),
    "eps NaN": ({"eps": float("nan")}, "eps: expected a number that is not negative, got nan"),
}
VALUE_ERRORS = ("one row", "negative eps", "eps 0 when training", "eps NaN")
CASES = [("linear_float32", case) for case in PRODUCT] + [("linear_batchnorm_softmax", case) for case in FUSED]
MODES = {"real": nullcontext, "fake": FakeTensorMode, "grad": nullcontext, "inference": torch.inference_mode}


def build(spec: Any, device: str) -> Any:
    return torch.ones(spec[0], device=device).to(spec[1]) if isinstance(spec, tuple) else spec


def arguments(name: str, device: str, **changes: Any) -> dict[str, Any]:
    right: dict[str, Any] = {"input": t(4, 8), "weight": t(6, 8), "bias": t(6)}
    if name == "linear_batchnorm_softmax":
        right |= {"bn_weight": t(6), "bn_bias": t(6), **STATS, "scale": t(1), "training": False, "eps": 1e-5}
    return {key: build(value, device) for key, value in (right | changes).items()}


def refused(call: Callable[[], object], error: type[Exception] = RuntimeError) -> str:
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    return str(caught.value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "case"), CASES)
def test_refused(device: str, name: str, case: str, mode: str) -> None:
    """In inference mode on CUDA the kernels check for themselves."""
    changes, words = (PRODUCT if name == "linear_float32" else FUSED)[case]
    operator = getattr(torch.ops.attention_ext, name)
    with MODES[mode]():
        given = arguments(name, device, **changes)
        if mode == "grad":
            given["weight"] = given["weight"].requires_grad_() if given["weight"].is_floating_point() else given["weight"]
        text = refused(lambda: operator(**given), ValueError if name != "linear_float32" and case in VALUE_ERRORS else RuntimeError)
        at = given["input"].device
    assert text == "attention_ext: " + words.format(device=at)


@pytest.mark.parametrize("name", ["linear_float32", "linear_batchnorm_softmax"])
def test_what_the_cases_differ_from_is_taken(device: str, name: str) -> None:
    for mode in MODES.values():
        with mode():
            getattr(torch.ops.attention_ext, name)(**arguments(name, device))


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("argument", ["weight", "bias", "bn_weight", "bn_bias", "running_mean", "running_var", "scale"])
def test_devices_differ(device: str, argument: str, mode: str) -> None:
    other = "cpu" if device == "cuda" else "meta"
    with MODES[mode]():
        for name in ("linear_float32", "linear_batchnorm_softmax"):
            given = arguments(name, device)
            if argument in given:
                given[argument] = given[argument].to(other)
                text = refused(lambda given=given, name=name: getattr(torch.ops.attention_ext, name)(**given))
                assert text.startswith(f"attention_ext: {argument}: expected ") and text.endswith(other), text


@pytest.mark.parametrize("name", ["linear_float32", "linear_batchnorm_softmax"])
@pytest.mark.parametrize("argument", ["input", "weight"])
def test_layouts(device: str, name: str, argument: str) -> None:
    given = arguments(name, device)
    given[argument] = given[argument].to_sparse()
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.attention_ext, name)(**given)
    if caught.type is not NotImplementedError:  # PyTorch's own, where no kernel is registered for the layout
        assert str(caught.value).startswith(f"attention_ext: {argument}: expected a dense")


@pytest.mark.parametrize("argument", ["input", "weight", "scale"])
def test_none_for_a_tensor(argument: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=argument):
        fused(**(arguments("linear_batchnorm_softmax", "cpu") | {argument: None}))


def functional(**given: Any) -> Tensor:
    return attention_ext.linear_batchnorm_softmax(**given)


def test_the_functional_form_refuses_as_the_operator(device: str) -> None:
    """And changes no buffer when it refuses."""
    given = arguments("linear_batchnorm_softmax", device, training=True)
    before = given["running_mean"].clone(), given["running_var"].clone()
    assert "more than 1 value per channel when training" in refused(
        lambda: functional(**(given | {"input": given["input"][:1]})), ValueError
    )
    assert refused(lambda: functional(**(given | {"input": given["input"][None]}))).startswith("attention_ext: input: expected ")
    assert refused(lambda: functional(**given, momentum=None)).startswith("attention_ext: momentum: expected a number ")
    without = given | {"running_mean": None, "running_var": None, "training": False}
    assert "running_mean: expected a tensor where training is False" in refused(lambda: functional(**without))
    assert torch.equal(before[0], given["running_mean"]) and torch.equal(before[1], given["running_var"])


def test_vmap_refuses_what_one_call_refuses(device: str) -> None:
    given = arguments("linear_float32", device)
    x, w = given["input"], given["weight"]
    assert "input: expected rank 1" in refused(lambda: torch.vmap(lambda s: linear_float32(s, w))(x[0]))
    assert "weight: expected a matrix (" in refused(lambda: torch.vmap(lambda s: linear_float32(x, s))(w))
    assert "bias: expected shape (6,)" in refused(lambda: torch.vmap(lambda b: linear_float32(x, w, b))(w[:, :5]))
    given = arguments("linear_batchnorm_softmax", device)
    rows = given.pop("input")
    assert "input: expected a matrix (" in refused(lambda: torch.vmap(lambda s: fused(s, **given))(rows))
    given["training"] = True
    assert "more than 1 value" in refused(lambda: torch.vmap(lambda s: fused(s, **given))(rows[:, None]), ValueError)
