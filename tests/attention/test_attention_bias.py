"""Masks of torch.nn.attention.bias, whose class is their meaning and whose memory holds nothing; and classes of other people."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import HALVES, close, leaves, normal, qkv, sdpa, sdpa_backward, sdpa_forward, sdpa_with_lse
from torch import Tensor

import attention_ext

BIASES = ("causal_upper_left", "causal_lower_right")
OPERATORS = {
    "function": attention_ext.sdpa,
    "operator": sdpa,
    "overload": sdpa.default,
    "function, lse": lambda *args, **options: attention_ext.sdpa_with_lse(*args, **options)[0],
    "operator, lse": lambda *args, **options: sdpa_with_lse(*args, **options)[0],
}


@pytest.fixture(params=BIASES)
def bias(request: pytest.FixtureRequest):
    """Makes a bias of (L, S); PyTorch warns of rows without a key, which are 0 here."""
    from torch.nn.attention import bias

    def make(L: int, S: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(bias, request.param)(L, S)

    make.lower_right = request.param == "causal_lower_right"
    return make


def mask_of(bias, L: int, S: int) -> Tensor:
    return torch.ones(L, S, dtype=torch.bool).tril(S - L if bias.lower_right else 0)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("L", "S"), [(5, 7), (7, 7), (7, 5), (1, 9)])
def test_values_and_gradients(device: str, bias, operator: str, L: int, S: int) -> None:
    """Those of the boolean mask that the class stands for, and of PyTorch's operator where that has no row without a key."""
    inputs = qkv(L=L, S=S, device=device)
    mine = leaves(*inputs)
    out = OPERATORS[operator](*mine, bias(L, S))
    assert type(out) is Tensor and repr(out)
    theirs = leaves(*inputs)
    want = sdpa(*theirs, mask_of(bias, L, S).to(device))
    close(out, want)
    grad = normal(*out.shape, device=device)
    for got, right in zip(torch.autograd.grad(out, mine, grad), torch.autograd.grad(want, theirs, grad), strict=True):
        close(got, right)
    if L <= S and device == "cpu":  # there PyTorch expands the mask; on CUDA its lower right one is a kernel of half types
        close(out, F.scaled_dot_product_attention(*inputs, bias(L, S)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_types_as_pytorch(device: str, bias, dtype: torch.dtype) -> None:
    q, k, v = qkv(L=64, S=128, E=64, dtype=dtype, device=device)
    out, lse = sdpa_with_lse(q, k, v, bias(64, 128))
    want, want_lse = sdpa_with_lse(q, k, v, mask_of(bias, 64, 128).to(device))
    close(out, want)
    close(lse, want_lse)
    assert type(lse) is Tensor
    close(out, F.scaled_dot_product_attention(q, k, v, bias(64, 128)))


def test_autocast(device: str, bias) -> None:
    """Whatever autocast does to masks, this one is not data that can be cast."""
    q, k, v = qkv(L=5, S=7, device=device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of the memory behind the mask
    try:
        mask = bias(5, 7)
    finally:
        torch.set_default_dtype(before)
    with torch.autocast(device, torch.bfloat16):
        out, lse = sdpa(q, k, v, mask), sdpa_with_lse(q, k, v, mask)[1]
        want, want_lse = sdpa_with_lse(q, k, v, mask_of(bias, 5, 7).to(device))
    assert type(out) is Tensor and out.dtype == want.dtype
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("operator", ["function", "function, lse"])
def test_compiled(device: str, bias, operator: str) -> None:
    call = OPERATORS[operator]
    q, k, v = qkv(L=5, S=7, device=device)
    compiled = torch.compile(lambda q, k, v, mask: call(q, k, v, mask), backend="aot_eager", fullgraph=True)
    close(compiled(q, k, v, bias(5, 7)), call(q, k, v, bias(5, 7)))


def test_explain(device: str, bias) -> None:
    q, k, v = qkv(L=5, S=7, device=device)
    got = attention_ext.explain(q, k, v, bias(5, 7))
    causal = not bias.lower_right
    want = attention_ext.explain(q, k, v, None if causal else mask_of(bias, 5, 7).to(device), is_causal=causal)
    assert got == want


def test_vmap(device: str, bias) -> None:
    q, k, v = qkv(L=5, S=7, device=device)
    out = torch.vmap(lambda a, b, c: sdpa(a, b, c, bias(5, 7)))(q, k, v)
    close(out, sdpa(q, k, v, mask_of(bias, 5, 7).to(device)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_refusals(device: str, bias, operator: str) -> None:
    call, (q, k, v) = OPERATORS[operator], qkv(L=5, S=7, device=device)
    with pytest.raises(
        RuntimeError, match=r"^attention_ext: attn_mask: expected None together with is_causal=True, got a CausalBias"
    ):
        call(q, k, v, bias(5, 7), 0.0, True)
    for L, S in ((4, 7), (5, 8)):
        with pytest.raises(
            RuntimeError, match=r"^attention_ext: attn_mask: expected a CausalBias of the sizes \(L, S\) = \(5, 7\)"
        ):
            call(q, k, v, bias(L, S))
    with pytest.raises(RuntimeError, match=r"^attention_ext: query: expected a tensor of numbers, got a CausalBias"):
        call(bias(5, 7), bias(5, 7), bias(5, 7))


def test_only_cast_to_the_class(device: str, bias) -> None:
    q, k, v = qkv(L=5, S=7, device=device)
    cast = torch.zeros(5, 7, device=device).as_subclass(type(bias(5, 7)))
    with pytest.raises(RuntimeError, match=r"^attention_ext: attn_mask: expected a CausalBias with a variant"):
        sdpa(q, k, v, cast)


class Lower(Tensor):
    """Somebody's mask whose meaning is in its class: for PyTorch's operator, and for nothing else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return func(*args[:3], is_causal=True)
        return super().__torch_function__(func, types, args, kwargs)


class Data(Tensor):
    """A class that is what its data is."""


def test_unknown_classes_are_refused_by_name(device: str) -> None:
    q, k, v = qkv(L=5, S=7, device=device)
    mask = torch.zeros(5, 7, device=device).as_subclass(Lower)
    expected = r"^attention_ext: attn_mask: expected a plain tensor.*, got a Lower"
    for call in (*OPERATORS.values(), attention_ext.explain):
        with pytest.raises(RuntimeError, match=expected):
            call(q, k, v, mask)
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False)
    with pytest.raises(RuntimeError, match=expected):
        sdpa_forward(q, k, v, mask, None, 0.0, False)
    with pytest.raises(RuntimeError, match=expected):
        sdpa_backward(out, None, q, k, v, mask, out, lse, None, 0.0, False)
    with pytest.raises(RuntimeError, match=expected):
        torch.ops.attention_ext.qk_scores(q, k, mask)


def test_classes_of_data_are_taken(device: str) -> None:
    q, k, v = qkv(L=5, S=7, device=device)
    mask = normal(5, 7, device=device)
    for given in (mask.as_subclass(Data), torch.nn.Parameter(mask), torch.nn.Parameter(mask, requires_grad=False)):
        close(sdpa(q, k, v, given).detach().as_subclass(Tensor), sdpa(q, k, v, mask))


@pytest.mark.parametrize("argument", ["input", "weight", "bias"])
def test_linear_operators_refuse_them(device: str, argument: str) -> None:
    from torch.nn.attention.bias import causal_upper_left

    named = {"input": normal(2, 3, device=device), "weight": normal(4, 3, device=device), "bias": normal(4, device=device)}
    named[argument] = causal_upper_left(4, 3)
    with pytest.raises(RuntimeError, match=rf"^attention_ext: {argument}: expected a tensor of numbers, got a CausalBias"):
        attention_ext.linear_float32(**named)
    with pytest.raises(RuntimeError, match=rf"^attention_ext: {argument}: expected a tensor of numbers, got a CausalBias"):
        attention_ext.linear_batchnorm_softmax(**named, scale=1.0, training=True)
