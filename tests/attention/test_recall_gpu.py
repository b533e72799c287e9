"""Calls on CUDA that are like one before: what explain names runs, under every setting, and with the bits of the first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers import qkv, sdpa
from known_calls import forget, shifted
from launches import launches
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import attention_ext
from attention_ext.attention import recall

pytestmark = pytest.mark.gpu


@contextmanager
def deterministic(warn_only: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def switched(switch: Callable[[bool], None]) -> Iterator[None]:
    """A back end turned off past torch.nn.attention."""
    switch(False)
    try:
        yield
    finally:
        switch(True)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default": nullcontext,
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "efficient": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    "math and flash in this order": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "deterministic": lambda: deterministic(False),
    "deterministic, warning": lambda: deterministic(True),
    "no flash": lambda: switched(torch._C._set_sdp_use_flash),
    "no cudnn": lambda: switched(torch._C._set_sdp_use_cudnn),
}
PROBLEMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "64": ({"L": 128, "E": 64}, {}),
    "64 causal": ({"L": 191, "E": 64}, {"is_causal": True}),
    "128 odd": ({"L": 100, "E": 128}, {}),
    "grouped": ({"heads": (8, 2), "L": 128, "E": 64}, {"enable_gqa": True}),
    "512": ({"L": 128, "E": 512}, {}),
    "768": ({"L": 64, "E": 768}, {"is_causal": True}),
    "one query": ({"L": 1, "S": 257, "E": 128}, {}),
}


@pytest.mark.parametrize("call", [sdpa, attention_ext.sdpa], ids=["operator", "function"])
@pytest.mark.parametrize("grad", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_settings_are_seen(name: str, grad: bool, call: Callable[..., Tensor], anew: list[Any]) -> None:
    """Over three rounds of settings that change, each call is that of which nothing is known: the same bits and kernels."""
    sizes, options = PROBLEMS[name]
    inputs = [t.requires_grad_(grad) for t in qkv(**sizes, dtype=torch.bfloat16, device="cuda")]
    want: dict[str, tuple[Tensor, list[str]]] = {}
    for setting, context in SETTINGS.items():
        with context():
            forget()
            want[setting] = call(*inputs, **options).detach(), launches(lambda: (forget(), call(*inputs, **options)))
    forget()
    anew.clear()
    for turn in range(3):
        for setting, context in SETTINGS.items():
            with context():
                out, launched = want[setting]
                got = call(*inputs, **options)
                assert torch.equal(got, out) and got.stride() == out.stride() and got.requires_grad == grad, setting
                assert turn < 2 or launches(lambda: call(*inputs, **options)) == launched, setting
    assert len(anew) <= len(SETTINGS), "a setting that came back is known"


@pytest.mark.parametrize("name", PROBLEMS)
def test_where_operands_begin_is_seen(name: str) -> None:
    """Operands off the boundaries of 16 bytes go to another kernel, between aligned ones of the same strides."""
    sizes, options = PROBLEMS[name]
    inputs = qkv(**sizes, dtype=torch.bfloat16, device="cuda")
    want = attention_ext.sdpa(*inputs, **options)
    for place in range(3):
        off = [shifted(t) if n == place else t for n, t in enumerate(inputs)]
        for _ in range(2):
            torch.testing.assert_close(attention_ext.sdpa(*off, **options), want, rtol=2e-2, atol=2e-2)
            assert torch.equal(attention_ext.sdpa(*inputs, **options), want)


def test_two_devices_or_dtypes_of_one_shape(anew: list[Any]) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64) * 2:
        q, k, v = qkv(L=64, E=64, dtype=dtype, device="cuda")
        assert attention_ext.sdpa(q, k, v).dtype == dtype
    assert len(anew) == 4
    with pytest.raises(RuntimeError, match="attention_ext: key: expected the query's device"):
        attention_ext.sdpa(q, k.cpu(), v)


@pytest.mark.parametrize("E", [64, 512])
def test_a_captured_graph(E: int) -> None:
    q, k, v = qkv(L=64, E=E, dtype=torch.bfloat16, device="cuda")
    want = attention_ext.sdpa(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_ext.sdpa(q, k, v)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize("grad", [False, True])
def test_dropout_by_name(grad: bool) -> None:
    """The same numbers in a call that is known, with and without a gradient, as checkpointing needs them."""
    q, k, v = (t.requires_grad_(grad) for t in qkv(L=128, E=64, dtype=torch.bfloat16, device="cuda"))
    outs = []
    for _ in range(3):
        torch.manual_seed(1)
        outs.append(attention_ext.sdpa(q, k, v, dropout_p=0.3))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])
    assert recall.recall((q, k, v, None, 0.3, False, None, False)) is not None


class Through(TorchFunctionMode):
    """Calls inside take the whole way through the dispatcher."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("E", [64, 512])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_overloads(mode: Callable[[], AbstractContextManager[Any]], E: int) -> None:
    """Calls past the dispatcher have the bits of those through it, for other sizes and strides too."""
    q, k, v = qkv((2,), (4,), L=70, E=E, dtype=torch.bfloat16, device="cuda")
    mask, lengths = torch.rand(70, 70, device="cuda") < 0.8, torch.tensor([70, 33], dtype=torch.int32, device="cuda")
    forward, backward = torch.ops.attention_ext.sdpa_forward.default, torch.ops.attention_ext.sdpa_backward.default
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k, v, None, None, 0.0, False), {}),
        ((q, k, v, mask, None, 0.0, False), {"scale": 0.3}),
        ((q, q, q, None, None, 0.0, True), {}),
        ((q[:, :, :33], k, v, None, None, 0.0, False), {"key_lengths": lengths}),
        ((q.mT.contiguous().mT, k, v, None, None, 0.0, False), {}),
    ]
    for args, options in calls * 2:
        with mode():
            out, lse = forward(*args, **options)
            grads = backward(torch.ones_like(out), None, *args[:4], out, lse, *args[4:], **options)
            with Through():
                want_out, want_lse = forward(*args, **options)
                want = backward(torch.ones_like(out), None, *args[:4], out, lse, *args[4:], **options)
        assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
        assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


def test_overloads_are_seen_and_recorded() -> None:
    q, k, v = qkv(L=64, E=64, dtype=torch.bfloat16, device="cuda")

    def call(query: Tensor) -> Tensor:
        out: Tensor = torch.ops.attention_ext.sdpa_forward.default(query, k, v, None, None, 0.0, False)[0]
        return out

    leaf = q.clone().requires_grad_()
    for _ in range(2):
        want = call(q)
        with torch.no_grad():
            assert not call(leaf).requires_grad
        assert call(leaf).requires_grad
        for early in (False, True):
            assert "attention_ext.sdpa_forward.default" in str(make_fx(call, pre_dispatch=early)(q).graph)
        assert "attention_ext::sdpa_forward" in str(torch.jit.trace(call, (q,), check_trace=False).graph)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
            call(forward_ad.make_dual(q, torch.ones_like(q)))
        assert torch.equal(call(q), want)
