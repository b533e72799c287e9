"""What _recall.py keeps and for how long, and what PyTorch's guard, which it goes by, tells apart."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from helpers import normal, qkv, sdpa
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import attention_ext
from attention_ext import _recall
from attention_ext._torch_private import alike, cpu_precision
from attention_ext.attention import recall
from attention_ext.linear import product, softmax

ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "other numbers": lambda t: t + 1,
    "another place": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}
APART: dict[str, Callable[[Tensor], object]] = {
    "dtype": lambda t: t.double(),
    "length": lambda t: t[:, :1],
    "order": lambda t: t.clone().mT.contiguous().mT,
    "expanded": lambda t: t[:, :1].expand(t.shape),
    "meta": lambda t: t.to("meta"),
    "class": lambda t: torch.nn.Parameter(t),
    "requires_grad": lambda t: t.clone().requires_grad_(),
    "negated when read": torch._neg_view,
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape),
    "mkldnn": lambda t: t.to_mkldnn(),
    "sparse": lambda t: t.to_sparse(),
    "functional": torch._to_functional_tensor,
}


@pytest.mark.parametrize("name", [*ALIKE, *APART])
def test_guard(name: str) -> None:
    tensor = normal(3, 4)
    other = (ALIKE | APART)[name](tensor)
    assert alike(tensor)(other) is (name in ALIKE)
    assert alike(tensor, normal(2))(other, normal(2)) is (name in ALIKE)
    assert alike(normal(2), tensor, normal(5))(normal(2), other, normal(5)) is (name in ALIKE)


def test_guard_of_one_tensor_in_two_places() -> None:
    tensor = normal(3, 4)
    check = alike(tensor, tensor)
    assert check(tensor, tensor) and check(tensor, tensor.clone()) and not check(tensor, tensor.double())


def test_guard_of_any_size() -> None:
    tensor = normal(3, 4)
    check = alike(tensor, normal(2), any_size=True)
    assert check(normal(5, 6).mT, normal(7)) and check(tensor[:0], normal(1))
    for name in ("dtype", "meta", "class", "requires_grad", "negated when read", "sparse", "functional"):
        assert not check(APART[name](tensor), normal(2)), name
    assert not check(tensor[0], normal(2)) and not check(tensor, None) and not check(tensor, 0.0)
    with torch.inference_mode():
        assert not check(tensor, normal(2))


def test_nothing_is_known_to_those_who_trace() -> None:
    """The guard does not see the modes that PyTorch's tracing is made of."""
    known, tensor = _recall.Known(), normal(3, 4)
    _recall.Sample(known, lambda: "outline", tensor).keep(lambda: "run")
    seen: list[object] = []

    def look(t: Tensor) -> Tensor:
        seen.append(known.find("outline", tensor))
        sample = _recall.Sample(known, lambda: "outline", tensor)
        seen.append(sample.counts or None)
        return t + 1

    for early in (False, True):
        make_fx(look, pre_dispatch=early)(tensor)
    torch.jit.trace(look, (tensor,), check_trace=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        look(torch.ones(2))
    assert seen == [None] * 8 and known.find("outline", tensor) == "run"


@pytest.mark.parametrize("name", ["sdpa_forward", "sdpa_backward", "linear_float32", "linear_batchnorm_softmax"])
def test_overloads_stay_what_they_are(name: str) -> None:
    """Inductor asks for the class of what it calls, and keeps things by it."""
    overload = getattr(torch.ops.attention_ext, name).default
    assert type(overload) is torch._ops.OpOverload and copy.deepcopy(overload) is overload
    assert hash(overload) == hash(getattr(torch.ops.attention_ext, name).default) and overload.name() == f"attention_ext::{name}"


def test_guard_sees_the_thread() -> None:
    tensor = normal(3, 4)
    check = alike(tensor)
    with torch.inference_mode():
        assert not check(tensor) and alike(tensor)(tensor)
    with torch.autocast("cpu"):
        assert not check(tensor)
    seen: list[bool] = []

    def look(t: Tensor) -> Tensor:
        seen.append(check(tensor))
        return t.sum()

    torch.func.vmap(look)(normal(2))
    torch.func.grad(look)(normal())
    torch.jit.trace(look, (tensor,), check_trace=False)
    assert seen == [False] * 3 and check(tensor)


def test_no_tensor_is_held(device: str) -> None:
    tensors = [*qkv(device=device), torch.ones(19, 19, dtype=torch.bool, device=device)]
    watched = [weakref.ref(t) for t in tensors]
    for _ in range(2):
        sdpa(*tensors)
    del tensors
    gc.collect()
    assert not any(reference() is not None for reference in watched)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recall, "_MOST", 5)
    monkeypatch.setattr(_recall, "_MOST_ALIKE", 3)
    known = _recall.Known()  # one that no test before has filled
    monkeypatch.setattr(recall, "_KNOWN", known)
    for L in range(1, 20):
        sdpa(*qkv(L=L))
        assert sum(map(len, known._runs.values())) <= 5
    q, k, v = qkv()
    for columns in range(1, 16):
        sdpa(q, k, v[..., :columns])
        assert all(len(same) <= 3 for runs in known._runs.values() for same in runs.values())


def test_a_setting_that_changes_meanwhile_is_not_kept() -> None:
    known, settings = _recall.Known(), ["one"]
    tensor = torch.ones(3)
    sample = _recall.Sample(known, lambda: settings[0], tensor)
    settings[0] = "two"
    sample.keep(lambda: "run")
    assert known.find("one", tensor) is None and known.find("two", tensor) is None
    settings[0] = "one"
    sample.keep(lambda: "run")
    assert known.find("one", tensor) == "run"


def test_threads() -> None:
    """Each thread has its own grad mode."""
    q, k, v = qkv()
    q.requires_grad_()
    recorded: dict[bool, list[bool]] = {False: [], True: []}

    def work(enabled: bool) -> None:
        with torch.set_grad_enabled(enabled):
            recorded[enabled] += [sdpa(q, k, v).requires_grad for _ in range(200)]

    threads = [threading.Thread(target=work, args=(enabled,)) for enabled in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(recorded[True]) and not any(recorded[False]) and len(recorded[True]) == len(recorded[False]) == 400


@pytest.mark.parametrize("name", ["linear_float32", "linear_batchnorm_softmax"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__)
def test_linear(name: str, mode: Callable[[], object]) -> None:
    """The same bits, the running statistics too, and a gradient where one is wanted after a call that wanted none."""
    x, weight, bias = normal(6, 5), normal(4, 5), normal(4)
    results = []
    for _ in range(3):
        mean, var = torch.zeros(4), torch.ones(4)
        with mode():
            if name == "linear_float32":
                out = attention_ext.linear_float32(x, weight, bias)
                assert torch.equal(torch.ops.attention_ext.linear_float32(x, weight, bias), out)
                assert product.recall(x, weight, bias) is not None
            else:
                out = attention_ext.linear_batchnorm_softmax(
                    x, weight, bias, running_mean=mean, running_var=var, training=True, scale=0.5
                )
                one = torch.full((), 0.5)
                assert softmax.recall(x, weight, bias, None, None, mean, var, one, True, 1e-5) is not None
        results.append((out, mean, var))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))
    leaf = weight.clone().requires_grad_()
    with torch.no_grad():
        getattr(attention_ext, name)(x, leaf, bias, **({} if name == "linear_float32" else {"training": True}))
    out = getattr(attention_ext, name)(x, leaf, bias, **({} if name == "linear_float32" else {"training": True}))
    out.square().sum().backward()
    assert (leaf.grad is not None and "LinearFloat32" in str(out.grad_fn)) or "LinearBatchNormSoftmax" in str(out.grad_fn)


def test_linear_sees_the_precision_of_products() -> None:
    """What PyTorch may round is computed in float64, also in calls that are known."""
    x, weight = normal(8, 64), normal(16, 64)
    want = torch.nn.functional.linear(x.double(), weight.double()).float()
    attention_ext.linear_float32(x, weight)
    before = cpu_precision()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        for _ in range(2):
            assert torch.equal(attention_ext.linear_float32(x, weight), want)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("name", ["linear_float32", "linear_batchnorm_softmax"])
def test_linear_in_forward_mode(name: str) -> None:
    x, weight = normal(6, 5), normal(4, 5)
    options = {} if name == "linear_float32" else {"training": True}
    for _ in range(2):
        getattr(attention_ext, name)(x, weight, **options)
        with forward_ad.dual_level():
            out = getattr(attention_ext, name)(forward_ad.make_dual(x, torch.ones_like(x)), weight, **options)
            assert forward_ad.unpack_dual(out).tangent is not None
