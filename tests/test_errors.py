"""What is refused, real and fake: a RuntimeError that names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import FLOATS, sdpa, sdpa_backward, sdpa_forward, sdpa_with_lse
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

Make = Callable[..., Tensor]
NAN = float("nan")


def t(*shape: int, dtype: torch.dtype = torch.float32) -> tuple:
    """A tensor to be made later, on the device and under the mode of the test."""
    return shape, dtype


Q, K, V = t(2, 4, 5, 8), t(2, 4, 7, 8), t(2, 4, 7, 6)
# argument that the text names, query, key, value, attn_mask, other arguments
REFUSED = {
    "rank 1 query": ("query", t(8), K, V, None, {}),
    "rank 1 key": ("key", Q, t(8), V, None, {}),
    "rank 1 value": ("value", Q, K, t(7), None, {}),
    "rank 0 query": ("query", t(), K, V, None, {}),
    "integer query": ("query", *(t(2, 4, 5, 8, dtype=torch.int64),) * 3, None, {}),
    "boolean query": ("query", *(t(2, 4, 5, 8, dtype=torch.bool),) * 3, None, {}),
    "complex query": ("query", *(t(2, 4, 5, 8, dtype=torch.complex64),) * 3, None, {}),
    "float8 query": ("query", *(t(2, 4, 5, 8, dtype=torch.float8_e4m3fn),) * 3, None, {}),
    "dtype of key": ("key", Q, t(2, 4, 7, 8, dtype=torch.float16), V, None, {}),
    "dtype of key float64": ("key", Q, t(2, 4, 7, 8, dtype=torch.float64), V, None, {}),
    "dtype of value": ("value", Q, K, t(2, 4, 7, 6, dtype=torch.bfloat16), None, {}),
    "head dim of key": ("key", Q, t(2, 4, 7, 9), V, None, {}),
    "head dim of key 1": ("key", Q, t(2, 4, 7, 1), V, None, {}),
    "length of value": ("value", Q, K, t(2, 4, 6, 6), None, {}),
    "length of value 1": ("value", Q, K, t(2, 4, 1, 6), None, {}),
    "batch of key": ("key", Q, t(3, 4, 7, 8), V, None, {}),
    "batch of value": ("value", Q, K, t(3, 4, 7, 6), None, {}),
    "batch 0 of key": ("key", Q, t(0, 4, 7, 8), t(0, 4, 7, 6), None, {}),
    "heads of key": ("key", Q, t(2, 2, 7, 8), t(2, 2, 7, 6), None, {}),
    "heads of value": ("value", Q, K, t(2, 2, 7, 6), None, {}),
    "no key heads": ("key", Q, t(2, 0, 7, 8), t(2, 0, 7, 6), None, {}),
    "heads of key rank 3": ("key", t(4, 5, 8), t(3, 7, 8), t(3, 7, 6), None, {}),
    "grouped heads of key": ("key", Q, t(2, 3, 7, 8), t(2, 3, 7, 6), None, {"enable_gqa": True}),
    "more key heads": ("key", Q, t(2, 8, 7, 8), t(2, 8, 7, 6), None, {"enable_gqa": True}),
    "grouped heads of value": ("value", Q, t(2, 2, 7, 8), t(2, 3, 7, 6), None, {"enable_gqa": True}),
    "no grouped key heads": ("key", Q, t(2, 0, 7, 8), t(2, 0, 7, 6), None, {"enable_gqa": True}),
    "no grouped value heads": ("value", Q, K, t(2, 0, 7, 6), None, {"enable_gqa": True}),
    "batch of grouped key": ("key", Q, t(3, 2, 7, 8), t(3, 2, 7, 6), None, {"enable_gqa": True}),
    "grouped rank 2": ("query|enable_gqa", t(5, 8), t(7, 8), t(7, 6), None, {"enable_gqa": True}),
    "grouped rank 2 key": ("key", Q, t(7, 8), t(7, 6), None, {"enable_gqa": True}),
    "rank 0 mask": ("attn_mask", Q, K, V, t(), {}),
    "rank 1 mask": ("attn_mask", Q, K, V, t(7), {}),
    "rank 1 bool mask": ("attn_mask", Q, K, V, t(7, dtype=torch.bool), {}),
    "rank 5 mask": ("attn_mask", Q, K, V, t(1, 2, 4, 5, 7), {}),
    "rank 3 mask at rank 2": ("attn_mask", t(5, 8), t(7, 8), t(7, 6), t(1, 5, 7), {}),
    "mask of length L": ("attn_mask", Q, K, V, t(6, 7), {}),
    "mask of length S": ("attn_mask", Q, K, V, t(5, 6), {}),
    "mask transposed": ("attn_mask", Q, K, V, t(7, 5, dtype=torch.bool), {}),
    "mask per batch at the heads": ("attn_mask", Q, K, V, t(2, 5, 7), {}),
    "mask of batch": ("attn_mask", Q, K, V, t(3, 1, 5, 7), {}),
    "mask of batch where q has 1": ("attn_mask", t(1, 4, 5, 8), t(1, 4, 7, 8), t(1, 4, 7, 6), t(2, 4, 5, 7), {}),
    "mask longer than one query": ("attn_mask", t(2, 4, 1, 8), K, V, t(5, 7), {}),
    "mask longer than one key": ("attn_mask", Q, t(2, 4, 1, 8), t(2, 4, 1, 6), t(5, 7), {}),
    "mask of no keys": ("attn_mask", Q, K, V, t(5, 0), {}),
    "mask of key heads": ("attn_mask", Q, t(2, 2, 7, 8), t(2, 2, 7, 6), t(2, 5, 7), {"enable_gqa": True}),
    **{f"{d} mask": ("attn_mask", Q, K, V, t(5, 7, dtype=d), {}) for d in (torch.int64, torch.int32, torch.uint8, torch.int8)},
    **{f"{d} mask": ("attn_mask", Q, K, V, t(5, 7, dtype=d), {}) for d in (torch.float16, torch.bfloat16, torch.float64)},
    "complex mask": ("attn_mask", Q, K, V, t(5, 7, dtype=torch.complex64), {}),
    "mask and causal": ("attn_mask", Q, K, V, t(5, 7), {"is_causal": True}),
    "bool mask and causal": ("attn_mask", Q, K, V, t(5, 7, dtype=torch.bool), {"is_causal": True}),
    "broadcast mask and causal": ("attn_mask", Q, K, V, t(1, 1, 1, 7), {"is_causal": True}),
    **{f"dropout {p}": ("dropout_p", Q, K, V, None, {"dropout_p": p}) for p in (-0.1, 1.1, NAN, float("inf"), -1e-9)},
}


def build(spec: tuple | None, device: str) -> Tensor | None:
    return None if spec is None else torch.ones(spec[0], device=device).to(spec[1])


def refuses(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError) as caught:
        call()
    text = str(caught.value)
    head, _, rest = text.partition(": expected ")
    assert head in {f"attention_ext: {name}" for name in argument.split("|")}, text
    assert ", got " in rest and rest.split(", got ")[0] and rest.split(", got ")[1], text
    assert "\n" not in text.strip() and "/" not in text, f"not a sentence for a person: {text}"


def forward(q, k, v, mask=None, *, dropout_p: float = 0.0, is_causal: bool = False, **options):
    seed = torch.zeros(1, dtype=torch.int64, device=q.device) if 0 < dropout_p < 1 else None
    return sdpa_forward(q, k, v, mask, seed, dropout_p, is_causal, **options)


@pytest.mark.parametrize("op", [sdpa, sdpa_with_lse, forward], ids=["sdpa", "sdpa_with_lse", "sdpa_forward"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(device: str, case: str, op) -> None:
    argument, *specs, options = REFUSED[case]
    tensors = [build(spec, device) for spec in specs]
    refuses(argument, lambda: op(*tensors, **options))


@pytest.mark.parametrize("op", [sdpa, sdpa_with_lse, forward], ids=["sdpa", "sdpa_with_lse", "sdpa_forward"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_the_fake_kernel(device: str, case: str, op) -> None:
    argument, *specs, options = REFUSED[case]
    with FakeTensorMode():
        tensors = [build(spec, device) for spec in specs]
        refuses(argument, lambda: op(*tensors, **options))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_inference_mode(device: str, case: str) -> None:
    """There the kernels are called without the Python in front of them, and check for themselves."""
    argument, *specs, options = REFUSED[case]
    with torch.inference_mode():
        tensors = [build(spec, device) for spec in specs]
        refuses(argument, lambda: forward(*tensors, **options))


@pytest.mark.parametrize("op", [sdpa, sdpa_with_lse], ids=["sdpa", "sdpa_with_lse"])
@pytest.mark.parametrize("case", ["dtype of key", "heads of key", "rank 1 mask", "mask and causal", "int64 mask", "dropout 1.1"])
def test_refused_where_a_gradient_is_needed(device: str, case: str, op) -> None:
    name = case if case in REFUSED else f"torch.{case}"
    argument, *specs, options = REFUSED[name]
    tensors = [build(spec, device) for spec in specs]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    refuses(argument, lambda: op(*tensors, **options))


def test_mask_and_causal_is_refused_when_compiled(device: str) -> None:
    q = torch.randn(1, 2, 4, 8, device=device)
    compiled = torch.compile(lambda a, m: sdpa(a, a, a, m, 0.0, True), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="attn_mask"):
        compiled(q, torch.zeros(4, 4, device=device))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mask_and_causal_is_refused_in_every_dtype(device: str, dtype: torch.dtype) -> None:
    q = torch.zeros(1, 2, 4, 8, device=device, dtype=dtype)
    for mask in (torch.zeros(4, 4, device=device, dtype=dtype), torch.ones(4, 4, device=device, dtype=torch.bool)):
        refuses("attn_mask", lambda mask=mask: sdpa(q, q, q, mask, 0.0, True))


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("op", [sdpa, sdpa_with_lse, forward], ids=["sdpa", "sdpa_with_lse", "sdpa_forward"])
@pytest.mark.parametrize("argument", ["key", "value", "attn_mask"])
def test_devices_differ(device: str, argument: str, op, fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad():
        named = {name: build(spec, device) for name, spec in zip(("query", "key", "value"), (Q, K, V), strict=True)}
        named["attn_mask"] = build(t(5, 7), device)
        named[argument] = build(dict(zip(named, (Q, K, V, t(5, 7)), strict=True))[argument], "cpu" if device == "cuda" else "meta")
        refuses(argument, lambda: op(*named.values()))


@pytest.mark.parametrize("op", [sdpa, sdpa_with_lse], ids=["sdpa", "sdpa_with_lse"])
@pytest.mark.parametrize("argument", ["query", "key", "value", "attn_mask"])
def test_layouts(device: str, argument: str, op) -> None:
    named = {name: torch.eye(4, device=device) for name in ("query", "key", "value", "attn_mask")}
    named[argument] = named[argument].to_sparse()
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        op(**named)
    assert argument in str(caught.value)


@pytest.mark.parametrize("options", [{"scale": "1"}, {"is_causal": "no"}, {"dropout_p": None}, {"rate": 0.1}], ids=str)
def test_wrong_python_types_are_pytorchs_own_error(options: dict) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises((RuntimeError, TypeError)):
        sdpa(q, q, q, **options)


@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_none_for_a_tensor(argument: str) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises((RuntimeError, TypeError), match=argument):
        sdpa(**{"query": q, "key": q, "value": q, argument: None})


@pytest.mark.parametrize("fake", [False, True])
def test_seed_is_needed_for_dropout(device: str, fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad():
        q = torch.randn(1, 2, 4, 8, device=device)
        for seed in (None, torch.zeros(1, device=device), torch.zeros(2, dtype=torch.int64, device=device)):
            refuses_by_kernel("seed", lambda seed=seed: sdpa_forward(q, q, q, None, seed, 0.5, False))


def refuses_by_kernel(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=rf"^attention_ext: {argument}: expected .*, got "):
        call()


@pytest.mark.parametrize("fake", [False, True])
def test_unknown_kernel(device: str, fake: bool) -> None:
    if fake and device == "cuda":
        pytest.skip("which kernels CUDA has, its library says; it is not asked for fake tensors")
    with FakeTensorMode() if fake else torch.no_grad():
        q = torch.randn(1, 2, 4, 8, device=device)
        refuses_by_kernel("kernel_name", lambda: sdpa_forward(q, q, q, None, None, 0.0, False, kernel_name="no such kernel"))
        args = (q, None, q, q, q, None, q, q[..., 0], None, 0.0, False)
        refuses_by_kernel("kernel_name", lambda: sdpa_backward(*args, kernel_name="no such kernel"))


@pytest.mark.parametrize("op", [sdpa, sdpa_with_lse], ids=["sdpa", "sdpa_with_lse"])
def test_refused_under_vmap(device: str, op) -> None:
    """What one call refuses, a mapped call does: no rank is made up by the mapped dim."""
    q, vectors = torch.randn(3, 2, 4, 8, device=device), torch.randn(3, 8, device=device)
    refuses("query", lambda: torch.vmap(lambda t: op(t, q, q))(vectors))
    refuses("key", lambda: torch.vmap(lambda t: op(q, t, q))(vectors))
    refuses("attn_mask", lambda: torch.vmap(lambda m: op(q, q, q, m))(torch.randn(3, 4, device=device)))
    refuses("attn_mask", lambda: torch.vmap(lambda m: op(q, q, q, m))(torch.randn(5, 1, 3, 2, 4, 4, device=device)))
    refuses("query", lambda: torch.vmap(lambda t: op(t, t, t, enable_gqa=True))(q[0]))
    refuses("dropout_p", lambda: torch.vmap(lambda t: op(t, t, t, None, 0.5), randomness="same")(q))
    refuses("key", lambda: torch.vmap(lambda t: op(t, q[:, :, :, :7], q))(q))


BACKWARD = {
    "grad_out": {"grad_out": t(1, 1, 4, 8)},
    "out": {"out": t(1, 2, 4, 3)},
    "lse": {"lse": t(1, 2, 3)},
    "grad_lse": {"grad_lse": t(1, 2, 3)},
    "seed": {"dropout_p": 0.5},
    "mask_grad": {"mask_grad": True},
    "attn_mask": {"attn_mask": t(4, 4), "is_causal": True},
    "key": {"key": t(1, 2, 4, 9)},
    "value": {"value": t(1, 2, 5, 8)},
    "query": {"query": t(1, 2, 4, 8, dtype=torch.int64)},
    "grad_out of another dtype|grad_out": {"grad_out": t(1, 2, 4, 8, dtype=torch.float64)},
    "lse of another dtype|lse": {"lse": t(1, 2, 4, dtype=torch.float64)},
    "grad_lse of another dtype|grad_lse": {"grad_lse": t(1, 2, 4, dtype=torch.float16)},
    "dropout_p": {"dropout_p": 1.5},
}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("argument", BACKWARD)
def test_backward_refuses_what_does_not_fit(device: str, fake: bool, argument: str) -> None:
    specs = dict.fromkeys(("grad_out", "query", "key", "value", "out"), t(1, 2, 4, 8))
    specs |= {"grad_lse": None, "attn_mask": None, "lse": t(1, 2, 4), "seed": None, "dropout_p": 0.0, "is_causal": False}
    with FakeTensorMode() if fake else torch.no_grad():
        right = {n: build(s, device) if s is None or isinstance(s, tuple) else s for n, s in specs.items()}
        wrong = {n: build(s, device) if isinstance(s, tuple) else s for n, s in BACKWARD[argument].items()}
        assert len(sdpa_backward(**right)) == 4
        refuses(argument, lambda: sdpa_backward(**(right | wrong)))
