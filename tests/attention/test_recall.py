"""A call of sdpa that is like one before runs without checks and choice: with the same bits, and only where nothing has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers import qkv, sdpa
from known_calls import forget, shifted
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import attention_ext

BOTH_WAYS = pytest.mark.parametrize("call", [sdpa, attention_ext.sdpa], ids=["operator", "function"])
MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def by_rows(t: Tensor) -> Tensor:
    """The same numbers with the heads inside the rows."""
    return t.transpose(-2, -3).contiguous().transpose(-2, -3)


def problems(device: str) -> dict[str, tuple[list[Tensor | None], dict[str, Any]]]:
    dtypes = (torch.float32,) if device == "cpu" else (torch.bfloat16, torch.float32)
    found: dict[str, tuple[list[Tensor | None], dict[str, Any]]] = {}
    for dtype in dtypes:
        q, k, v = qkv((2,), (4,), L=65, S=65, E=64, dtype=dtype, device=device)
        short, wide = qkv((2,), (4, 2), L=33, S=65, E=64, dtype=dtype, device=device), qkv(L=33, E=512, dtype=dtype, device=device)
        mask = torch.rand(65, 65, device=device) < 0.8
        cases: dict[str, tuple[list[Tensor | None], dict[str, Any]]] = {
            "plain": ([q, k, v], {}),
            "causal": ([q, k, v], {"is_causal": True}),
            "scale": ([q, k, v], {"scale": 0.3}),
            "bool mask": ([q, k, v, mask], {}),
            "float mask": ([q, k, v, mask.to(dtype)], {}),
            "parameter as mask": ([q, k, v, torch.nn.Parameter(mask.to(dtype))], {}),
            "grouped": (list(short), {"enable_gqa": True}),
            "512": (list(wide), {}),
            "one tensor": ([q, q, q], {}),
            "key is value": ([q, k, k], {}),
            "heads inside rows": ([by_rows(t) for t in (q, k, v)], {}),
            "misaligned": ([shifted(t) for t in (q, k, v)], {}),
            "broadcast": ([q, k[:1], v[:, :1]], {}),
            "rows that overlap": ([q, k[:, :, :1].expand(k.shape), v], {}),
            "rank 3": ([q[0], k[0], v[0]], {}),
            "rank 5": ([t.unflatten(1, (2, 2)) for t in (q, k, v)], {}),
            "no keys": ([q, k[:, :, :0], v[:, :, :0]], {}),
            "values of 32": ([q, k, v[..., :32]], {}),
        }
        found |= {f"{str(dtype).removeprefix('torch.')} {name}": case for name, case in cases.items()}
    return found


@BOTH_WAYS
@pytest.mark.parametrize("mode", MODES)
def test_bits(device: str, mode: str, call: Callable[..., Tensor], anew: list[Any]) -> None:
    for name, (inputs, options) in problems(device).items():
        with MODES[mode]():
            forget()
            before = len(anew)
            first, *more = [call(*inputs, **options) for _ in range(3)]
        known = "no keys" not in name  # there is nothing in memory to know it by
        assert len(anew) - before == (1 if known else 3), name
        for out in more:
            assert torch.equal(out, first) and out.stride() == first.stride() and out.dtype == first.dtype, name


@BOTH_WAYS
def test_bits_of_gradients(device: str, call: Callable[..., Tensor], anew: list[Any]) -> None:
    for name, (inputs, options) in problems(device).items():
        results = []
        for _ in range(3):
            leaves = [t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in inputs]
            wanted = [t for t in leaves if t is not None and t.requires_grad]
            out = call(*leaves, **options)
            results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), wanted)))
        first, *more = results
        assert all(torch.equal(a, b) for other in more for a, b in zip(other, first, strict=True)), name
    assert len(anew) < 2 * len(problems(device))


class Mode(TorchDispatchMode):
    """Records the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


@contextmanager
def logged() -> Iterator[None]:
    logger = logging.getLogger("attention_ext")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)


CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "dtype": lambda q, k, v: ([q.double(), k.double(), v.double()], {}),
    "dtype of the mask": lambda q, k, v: ([q, k, v, torch.zeros(19, 19, device=q.device)], {}),
    "length": lambda q, k, v: ([q, k[..., :7, :], v[..., :7, :]], {}),
    "width of the values": lambda q, k, v: ([q, k, v[..., :8]], {}),
    "strides of the query": lambda q, k, v: ([by_rows(q), k, v], {}),
    "strides of the value": lambda q, k, v: ([q, k, by_rows(v)], {}),
    "requires_grad": lambda q, k, v: ([q, k.clone().requires_grad_(), v], {}),
    "is_causal": lambda q, k, v: ([q, k, v], {"is_causal": True}),
    "scale": lambda q, k, v: ([q, k, v], {"scale": 0.5}),
    "dropout_p": lambda q, k, v: ([q, k, v], {"dropout_p": 0.1}),
    "enable_gqa": lambda q, k, v: ([q, k, v], {"enable_gqa": True}),
    "class": lambda q, k, v: ([q.as_subclass(Subclass), k, v], {}),
    "a copy that is negated when read": lambda q, k, v: ([torch._neg_view(-q), k, v], {}),
}
SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "a dispatch mode": Mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "forward mode": forward_ad.dual_level,
    "the log": logged,
}


@BOTH_WAYS
@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_told_apart(device: str, change: str, call: Callable[..., Tensor], anew: list[Any]) -> None:
    q, k, v = qkv(device=device)
    for _ in range(2):
        call(q, k, v)
    assert len(anew) == 1
    inputs, options = CHANGES[change](q, k, v)
    call(*inputs, **options)
    assert len(anew) == 2
    call(q, k, v)
    assert len(anew) == 2


@BOTH_WAYS
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_other_surroundings_are_told_apart(device: str, name: str, call: Callable[..., Tensor], anew: list[Any]) -> None:
    q, k, v = qkv(device=device)
    call(q, k, v)
    if name == "autocast" and device == "cuda":
        pytest.skip("a region for CPU tensors")
    with SURROUNDINGS[name]():
        call(q, k, v)
    assert len(anew) == 2
    call(q, k, v)
    assert len(anew) == 2


def test_a_transform_is_told_apart(device: str, anew: list[Any]) -> None:
    q, k, v = qkv(device=device)
    want = attention_ext.sdpa(q, k, v)
    mapped = torch.func.vmap(lambda t: attention_ext.sdpa(t, k, v))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(mapped[0], want, rtol=1e-5, atol=1e-5)
    grad = torch.func.grad(lambda t: attention_ext.sdpa(t, k, v).sum())(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(attention_ext.sdpa(leaf, k, v).sum(), leaf)[0], rtol=1e-4, atol=1e-5)
    assert len(anew) >= 4


def test_a_function_mode_sees_the_operator(device: str) -> None:
    q, k, v = qkv(device=device)
    attention_ext.sdpa(q, k, v)
    seen = []

    class FunctionMode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with FunctionMode():
        attention_ext.sdpa(q, k, v)
    assert torch.ops.attention_ext.sdpa.default in seen


def test_a_dispatch_mode_sees_the_operators_inside(device: str) -> None:
    q, k, v = qkv(device=device)
    for _ in range(2):
        attention_ext.sdpa(q, k, v)
        with Mode() as mode:
            attention_ext.sdpa(q, k, v)
        assert any("attention" in name or "sdpa" in name for name in mode.seen)


@BOTH_WAYS
def test_refusals_stay(device: str, call: Callable[..., Tensor]) -> None:
    q, k, v = qkv(device=device)
    for _ in range(2):
        call(q, k, v)
        for inputs, options, argument in (
            ([q, k, v[..., :5, :]], {}, "value"),
            ([q, k.double(), v], {}, "key"),
            ([q, k, v, torch.ones(3, 3, device=device, dtype=torch.bool)], {}, "attn_mask"),
            ([q, k, v], {"dropout_p": 1.5}, "dropout_p"),
            ([q.to_sparse(), k, v], {}, "query"),
        ):
            with pytest.raises(RuntimeError, match=f"attention_ext: {argument}: expected"):
                call(*inputs, **options)
        with pytest.raises((TypeError, RuntimeError)):
            call(q, k, v, dropout_p=[0.0])


def test_the_log_is_not_lost(device: str, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv(device=device)
    for level, lines in ((logging.WARNING, 0), (logging.INFO, 2), (logging.WARNING, 0), (logging.INFO, 2)):
        caplog.clear()
        caplog.set_level(level, "attention_ext")
        for call in (attention_ext.sdpa, sdpa):
            call(q, k, v)
        assert len([record for record in caplog.records if record.name == "attention_ext"]) == lines


def test_dropout_draws_anew(device: str) -> None:
    q, k, v = qkv(L=64, S=64, device=device)
    outs = [attention_ext.sdpa(q, k, v, dropout_p=0.5) for _ in range(3)]
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    torch.manual_seed(5)
    again = attention_ext.sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(attention_ext.sdpa(q, k, v, dropout_p=0.5), again)
