"""override in eager code: which calls it takes, which it leaves and what it says of them; modules, threads, nesting."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import close, leaves, normal, qkv
from redirected import run_own
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_early
from torch.overrides import TorchFunctionMode

import attention_ext
from attention_ext import _when, override

always = partial(override, "always")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    run_own(monkeypatch)


@pytest.mark.parametrize(
    "call", [lambda *a, **k: F.scaled_dot_product_attention(*a, **k), imported_early, torch._C._nn.scaled_dot_product_attention]
)
def test_takes_the_operator_by_each_of_its_names(device: str, call, own: None) -> None:
    q, k, v = qkv(heads=(4, 2), L=5, S=7, device=device)
    mask = torch.rand(5, 7, device=device) < 0.8
    want = call(q, k, v, mask, scale=0.3, enable_gqa=True)
    with always() as o:
        close(call(q, k, v, mask, scale=0.3, enable_gqa=True), want)
        close(call(query=q, key=k, value=v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=0.3, enable_gqa=True), want)
    assert (o.taken, o.left, o.reasons) == (2, 0, {})
    call(q, k, v, mask, enable_gqa=True)
    assert o.taken == 2


def test_gradients(device: str, own: None) -> None:
    q, k, v = leaves(*qkv(device=device))
    want = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))
    with always() as o:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert out.grad_fn is not None and "ScaledDotProduct" not in type(out.grad_fn).__name__
        for got, right in zip(torch.autograd.grad(out.sum(), (q, k, v)), want, strict=True):
            close(got, right)
    assert o.taken == 1


def test_preferred_leaves_what_was_not_measured_faster(device: str) -> None:
    q, k, v = qkv(device=device)
    with override() as o:
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q[..., :8], k[..., :8], v)
    (reason,) = o.reasons
    assert (o.taken, o.left) == (0, 2) and ("on cpu" if device == "cpu" else "faster") in reason
    assert "(2, 3, 19, 16)" in o.reasons[reason] and reason in repr(o) and "2 left" in repr(o)


# E, Ev, dtype, dropout_p, whether preferred() with many keys is True on Hopper
CALLS = [
    (512, 512, torch.float16, 0.0, True), (1024, 264, torch.bfloat16, 0.0, True), (256, 256, torch.float16, 0.0, False),
    (512, 256, torch.float16, 0.0, False), (512, 512, torch.float32, 0.0, True), (512, 512, torch.float16, 0.1, False),
    (1032, 512, torch.float16, 0.0, False), (516, 512, torch.float16, 0.0, False), (64, 64, torch.float32, 0.0, True),
    (1024, 65, torch.float32, 0.0, True), (56, 64, torch.float32, 0.0, False), (64, 1025, torch.float32, 0.0, False),
    (512, 512, torch.float32, 0.1, False), (512, 512, torch.float64, 0.0, False),
]  # fmt: skip


@pytest.mark.parametrize(("E", "Ev", "dtype", "dropout_p", "faster"), CALLS)
def test_preferred_is_the_rule_of_preferred(
    E: int, Ev: int, dtype: torch.dtype, dropout_p: float, faster: bool, monkeypatch
) -> None:
    monkeypatch.setattr(_when, "capability", lambda index: (9, 0))
    with torch._subclasses.FakeTensorMode():
        q, v = (torch.empty(4, 16, 512, size, dtype=dtype, device="cuda") for size in (E, Ev))
        assert (_when._why_not_preferred(q, v, dropout_p) == "") == faster
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        q, v = (torch.empty(4, 16, 512, size, dtype=dtype, device="cuda") for size in (E, Ev))
        assert attention_ext.preferred(q, q, v, None, dropout_p) == faster


def test_preferred_knows_the_card(monkeypatch) -> None:
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(1, 1, 512, 512, dtype=torch.float16, device="cuda")
        for card, reason in (((9, 0), ""), ((8, 0), "it was measured faster on compute capability 9.0 alone")):
            monkeypatch.setattr(_when, "capability", lambda index, card=card: card)
            assert _when._why_not_preferred(q, q, 0.0) == reason


@pytest.mark.gpu
def test_preferred_takes_what_it_should_on_the_card() -> None:
    q, k, v = qkv((1,), (2,), L=300, E=512, dtype=torch.float16, device="cuda")
    faster = torch.cuda.get_device_capability() == (9, 0)
    with override() as o:
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(*(t[..., :64] for t in (q, k, v)))
    assert (o.taken, o.left) == ((1, 1) if faster else (0, 2))


def test_when_is_asked_with_the_operands(device: str) -> None:
    q, k, v = qkv(L=5, S=7, device=device)
    with override(lambda query, key, value: key.size(-2) > query.size(-2)) as o:
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, key=q, value=q)
    assert (o.taken, o.left) == (1, 1) and list(o.reasons) == ["when(query, key, value) is false"]


@pytest.mark.parametrize("when", ["prefered", None, 1])
def test_refuses_another_when(when: object) -> None:
    with pytest.raises(ValueError, match="when: expected 'preferred', 'always' or a function of query, key and value, got"):
        override(when)


def test_an_error_is_the_one_of_sdpa(device: str) -> None:
    q, k, v = qkv(device=device)
    with always(), pytest.raises(RuntimeError, match="attention_ext: key: expected"):
        F.scaled_dot_product_attention(q, k[..., :8], v)


@pytest.mark.parametrize("outside", [False, True])
def test_leaves_calls_inside_sdpa_kernel(device: str, outside: bool) -> None:
    q, k, v = qkv(device=device)
    first, second = (sdpa_kernel(SDPBackend.MATH), o := always())[:: 1 if outside else -1]
    with first, second:
        F.scaled_dot_product_attention(q, k, v)
    assert (o.taken, o.left) == (0, 1) and "sdpa_kernel" in next(iter(o.reasons))
    with o:
        F.scaled_dot_product_attention(q, k, v)
    assert (o.taken, o.left) == (1, 1)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_leaves_nested_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([normal(3, 2, 8), normal(5, 2, 8)], layout=layout)
    nested = nested.transpose(1, 2) if layout == torch.jagged else torch.nested.nested_tensor([normal(2, 3, 8), normal(2, 5, 8)])
    want = F.scaled_dot_product_attention(nested, nested, nested)
    with always() as o:
        out = F.scaled_dot_product_attention(nested, nested, nested)
    assert (o.taken, o.left) == (0, 1)
    for got, right in zip(out.unbind(), want.unbind(), strict=True):
        close(got, right)


def test_a_class_with_a_meaning_of_its_own_sees_the_call() -> None:
    class Named(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "its own" if func is imported_early else super().__torch_function__(func, types, args, kwargs)

    q = normal(2, 3, 8).as_subclass(Named)
    with always() as o:
        assert F.scaled_dot_product_attention(q, q, q) == "its own"
    assert o.left == 1 and "Named" in next(iter(o.reasons))


def test_takes_masks_of_torch_with_their_meaning(device: str, own: None) -> None:
    q, k, v = qkv(L=5, S=7, device=device)
    bias = causal_lower_right(5, 7)
    want = F.scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool, device=device).tril(2))
    with always() as o:
        out = F.scaled_dot_product_attention(q, k, v, bias)
    close(out, want)
    assert o.taken == 1 and type(out) is Tensor


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_multi_head_attention(device: str, training: bool, grad: bool, own: None) -> None:
    """In evaluation without gradients PyTorch has a fast path of its own, which a mode switches off."""
    module = nn.MultiheadAttention(32, 4, batch_first=True, device=device).train(training)
    x, mask = normal(2, 9, 32, device=device), torch.rand(9, 9, device=device) < 0.2
    mask.fill_diagonal_(False)
    with torch.set_grad_enabled(grad):
        want = module(x, x, x, attn_mask=mask, need_weights=False)[0]
        with always() as o:
            close(module(x, x, x, attn_mask=mask, need_weights=False)[0], want)
            assert o.taken == 1
            module(x, x, x, attn_mask=mask)  # with need_weights: two products and a softmax
    assert (o.taken, o.left) == (1, 1) and "need_weights=True" in next(iter(o.reasons))


@pytest.mark.parametrize("training", [False, True])
def test_transformer(device: str, training: bool, own: None) -> None:
    module = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True, device=device).train(training)
    source, target = normal(2, 9, 16, device=device), normal(2, 5, 16, device=device)
    padding = torch.zeros(2, 9, dtype=torch.bool, device=device)
    padding[1, 6:] = True
    options = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_is_causal": True}
    options["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(5, device=device)
    with torch.set_grad_enabled(training):
        want = module(source, target, **options)
        with always() as o:
            close(module(source, target, **options), want)
    assert (o.taken, o.left) == (6, 0)


def test_the_innermost_is_asked_first_and_the_next_takes_what_it_leaves() -> None:
    q, k, v = qkv()
    with always() as outer:
        with override(lambda query, key, value: key.size(-1) > 8) as inner:
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q[..., :8], k[..., :8], v)
        with outer:
            F.scaled_dot_product_attention(q, k, v)
    assert (inner.taken, inner.left, outer.taken, outer.left) == (1, 1, 2, 0)


def test_other_modes_outside_see_what_is_left_and_what_is_taken() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    q, k, v = qkv()
    with Seen():
        with override():
            F.scaled_dot_product_attention(q, k, v)
        assert "scaled_dot_product_attention" in names and "sdpa.default" not in names
        names.clear()
        with always():
            F.scaled_dot_product_attention(q, k, v)
        assert "scaled_dot_product_attention" not in names and "sdpa.default" in names


def test_direct_calls_of_this_package_are_no_calls_of_the_operator(device: str) -> None:
    q, k, v = qkv(device=device)
    with always() as outer, always() as inner:
        attention_ext.sdpa(q, k, v)
        torch.ops.attention_ext.sdpa(q, k, v)
    assert (outer.taken, outer.left, inner.taken, inner.left) == (0, 0, 0, 0)


def test_decorator(device: str) -> None:
    o = always()

    @o
    def attend(q: Tensor) -> Tensor:
        """Its own words."""
        return F.scaled_dot_product_attention(q, q, q)

    q = normal(2, 5, 8, device=device)
    attend(q)
    with pytest.raises(TypeError, match="query"):
        attend(None)
    F.scaled_dot_product_attention(q, q, q)
    assert o.taken == 1 and attend.__name__ == "attend" and attend.__doc__ == "Its own words."


def test_is_for_the_thread_that_enters_it() -> None:
    o, (q, k, v) = always(), qkv()

    def others() -> None:
        F.scaled_dot_product_attention(q, k, v)
        with o:
            for _ in range(50):
                F.scaled_dot_product_attention(q, k, v)

    with o:
        threads = [threading.Thread(target=others) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (o.taken, o.left) == (200, 0)


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv()
    with caplog.at_level(logging.INFO, logger="attention_ext"), override():
        F.scaled_dot_product_attention(q, k, v)
    (said,) = caplog.messages
    assert said.startswith("scaled_dot_product_attention on cpu torch.float32: torch, because on cpu")
