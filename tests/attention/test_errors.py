"""What is refused, real and fake: a RuntimeError that names the argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, sdpa, sdpa_backward, sdpa_forward, sdpa_with_lse
from kernels import KERNELS
from refusals import FAKE_DEVICES, REFUSED, WORDS, K, Q, V, build, refuses, t
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

DENSE = "a dense (strided) tensor, got "


def forward(q, k, v, mask=None, *, dropout_p: float = 0.0, is_causal: bool = False, **options):
    seed = torch.zeros(1, dtype=torch.int64, device=q.device) if 0 < dropout_p < 1 else None
    return sdpa_forward(q, k, v, mask, seed, dropout_p, is_causal, **options)


OPS = pytest.mark.parametrize("op", [sdpa, sdpa_with_lse, forward], ids=["sdpa", "sdpa_with_lse", "sdpa_forward"])


@OPS
@pytest.mark.parametrize("case", REFUSED)
def test_refused(device: str, case: str, op) -> None:
    argument, *specs, options = REFUSED[case]
    tensors = [build(spec, device) for spec in specs]
    refuses(argument, lambda: op(*tensors, **options), WORDS[case])


@OPS
@pytest.mark.parametrize("device", FAKE_DEVICES)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_the_fake_kernel(device: str, case: str, op) -> None:
    argument, *specs, options = REFUSED[case]
    with FakeTensorMode():
        tensors = [build(spec, device) for spec in specs]
        refuses(argument, lambda: op(*tensors, **options), WORDS[case])


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_inference_mode(device: str, case: str) -> None:
    """There the kernels are called without the Python in front of them, and check for themselves."""
    argument, *specs, options = REFUSED[case]
    with torch.inference_mode():
        tensors = [build(spec, device) for spec in specs]
        refuses(argument, lambda: forward(*tensors, **options), WORDS[case])


@pytest.mark.parametrize("op", [sdpa, sdpa_with_lse], ids=["sdpa", "sdpa_with_lse"])
@pytest.mark.parametrize("case", ["dtype of key", "heads of key", "rank 1 mask", "mask and causal", "int64 mask", "dropout 1.1"])
def test_refused_where_a_gradient_is_needed(device: str, case: str, op) -> None:
    name = case if case in REFUSED else f"torch.{case}"
    argument, *specs, options = REFUSED[name]
    tensors = [build(spec, device) for spec in specs]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    refuses(argument, lambda: op(*tensors, **options), WORDS[name])


def test_mask_and_causal_is_refused_when_compiled(device: str) -> None:
    q = torch.randn(1, 2, 4, 8, device=device)
    compiled = torch.compile(lambda a, m: sdpa(a, a, a, m, 0.0, True), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="attn_mask"):
        compiled(q, torch.zeros(4, 4, device=device))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mask_and_causal_is_refused_in_every_dtype(device: str, dtype: torch.dtype) -> None:
    q = torch.zeros(1, 2, 4, 8, device=device, dtype=dtype)
    for mask in (torch.zeros(4, 4, device=device, dtype=dtype), torch.ones(4, 4, device=device, dtype=torch.bool)):
        words = "None together with is_causal=True, got a mask of shape (4, 4)"
        refuses("attn_mask", lambda mask=mask: sdpa(q, q, q, mask, 0.0, True), words)


def devices_differ(device: str, argument: str, op) -> None:
    named = {name: build(spec, device) for name, spec in zip(("query", "key", "value"), (Q, K, V), strict=True)}
    named["attn_mask"] = build(t(5, 7), device)
    own, other = named["query"].device, "cpu" if device == "cuda" else "meta"
    named[argument] = build(dict(zip(named, (Q, K, V, t(5, 7)), strict=True))[argument], other)
    refuses(argument, lambda: op(*named.values()), f"the query's device {own}, got {other}")


@OPS
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("argument", ["key", "value", "attn_mask"])
def test_devices_differ(device: str, argument: str, inference: bool, op) -> None:
    with torch.inference_mode(inference):
        devices_differ(device, argument, op)


@OPS
@pytest.mark.parametrize("device", FAKE_DEVICES)
@pytest.mark.parametrize("argument", ["key", "value", "attn_mask"])
def test_devices_of_fake_tensors_differ(device: str, argument: str, op) -> None:
    with FakeTensorMode():
        devices_differ(device, argument, op)


def of_layout(layout: str, device: str) -> Tensor:
    """(2, 4, 4) or, in rows, (4, 4); of the nested ones a dim is ragged."""
    parts = [torch.ones(3, 4), torch.ones(4, 4)]
    made = {
        "coo": lambda: torch.eye(4).to_sparse(),
        "csr": lambda: torch.eye(4).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
    }
    return made[layout]().to(device)


LAYOUTS = {
    "coo": "layout torch.sparse_coo",
    "csr": "layout torch.sparse_csr",
    "nested": "a nested tensor",
    "jagged": "a nested tensor",
}


@OPS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("argument", ["query", "key", "value", "attn_mask"])
def test_layouts(device: str, argument: str, layout: str, op) -> None:
    named = {name: torch.eye(4, device=device) for name in ("query", "key", "value", "attn_mask")}
    named[argument] = of_layout(layout, device)
    refuses(argument, lambda: op(*named.values()), DENSE + LAYOUTS[layout])


@OPS
@pytest.mark.parametrize("layout", ["coo", "jagged"])  # those that torch makes fake tensors of
@pytest.mark.parametrize("argument", ["query", "key", "value", "attn_mask"])
def test_layouts_of_fake_tensors(argument: str, layout: str, op) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    named = {name: torch.eye(4) for name in ("query", "key", "value", "attn_mask")}
    named[argument] = of_layout(layout, "cpu")
    fakes = [mode.from_tensor(tensor) for tensor in named.values()]
    with mode:
        refuses(argument, lambda: op(*fakes), DENSE + LAYOUTS[layout])


@pytest.mark.parametrize("options", [{"scale": "1"}, {"is_causal": "no"}, {"dropout_p": None}, {"rate": 0.1}], ids=str)
def test_wrong_python_types_are_pytorchs_own_error(options: dict) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises((RuntimeError, TypeError)):
        sdpa(q, q, q, **options)


@OPS
@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_none_for_a_tensor(device: str, argument: str, op) -> None:
    named = {name: torch.ones(1, 2, 4, 8, device=device) for name in ("query", "key", "value")} | {argument: None}
    refuses(argument, lambda: op(*named.values()), "a tensor, got None")


@OPS
@pytest.mark.parametrize("device", FAKE_DEVICES)
@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_none_for_a_fake_tensor(device: str, argument: str, op) -> None:
    with FakeTensorMode():
        named = {name: torch.ones(1, 2, 4, 8, device=device) for name in ("query", "key", "value")} | {argument: None}
        refuses(argument, lambda: op(*named.values()), "a tensor, got None")


def both_with_seed(device: str) -> None:
    q = torch.ones(1, 2, 4, 8, device=device)
    own, other = q.device, "cpu" if device == "cuda" else "meta"
    want = f"a 1-element int64 tensor on {own}, got shape "
    for seed, words in (
        (None, "a 1-element int64 tensor for dropout_p = 0.5, got None"),
        (torch.zeros(1, device=device), f"{want}(1,), torch.float32 on {own}"),
        (torch.zeros(2, dtype=torch.int64, device=device), f"{want}(2,), torch.int64 on {own}"),
        (torch.zeros(0, dtype=torch.int64, device=device), f"{want}(0,), torch.int64 on {own}"),
        (torch.zeros(1, dtype=torch.int64, device=other), f"{want}(1,), torch.int64 on {other}"),
    ):
        for dropout_p in (0.5, 0.0) if seed is not None else (0.5,):
            forward, backward = (
                (q, q, q, None, seed, dropout_p, False),
                (q, None, q, q, q, None, q, q[..., 0], seed, dropout_p, False),
            )
            refuses("seed", lambda args=forward: sdpa_forward(*args), words)
            refuses("seed", lambda args=backward: sdpa_backward(*args), words)


@pytest.mark.parametrize("inference", [False, True])
def test_seed_is_needed_for_dropout(device: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        both_with_seed(device)


@pytest.mark.parametrize("device", FAKE_DEVICES)
def test_seed_is_needed_for_dropout_by_the_fake_kernels(device: str) -> None:
    with FakeTensorMode():
        both_with_seed(device)


NAMES = {  # device: what sdpa_forward and sdpa_backward expect
    "cpu": ('"auto" or "reference" for CPU tensors', '"auto" or "reference" for CPU tensors'),
    "cuda": (
        '"auto" or one of the kernels "pipeline", "sm90_256", "sm90_512", "sm90_1024", "sm90_pipeline" and "sm90_split_half"',
        '"auto" or one of the kernels "pipeline", "sm90_256", "sm90_pipeline" and "sm90_split_half"',
    ),
}


def unknown_kernel(device: str) -> None:
    forward_names, backward_names = NAMES[device]
    q = torch.ones(1, 2, 4, 8, device=device)
    for name in ("no such kernel", "", "Auto", "reference" if device == "cuda" else "pipeline"):
        words = f'{forward_names}, got "{name}"'
        refuses("kernel_name", lambda name=name: sdpa_forward(q, q, q, None, None, 0.0, False, kernel_name=name), words)
        args = (q, None, q, q, q, None, q, q[..., 0], None, 0.0, False)
        words = f'{backward_names}, got "{name}"'
        refuses("kernel_name", lambda name=name, args=args: sdpa_backward(*args, kernel_name=name), words)


@pytest.mark.parametrize("inference", [False, True])
def test_unknown_kernel(device: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        unknown_kernel(device)


@pytest.mark.parametrize("device", FAKE_DEVICES)
def test_unknown_kernel_of_fake_tensors(device: str) -> None:
    """And no other name is unknown."""
    with FakeTensorMode():
        unknown_kernel(device)
        q = torch.ones(1, 2, 4, 8, device=device)
        for kernel in KERNELS:
            if kernel.device == device:
                assert sdpa_forward(q, q, q, None, None, 0.0, False, kernel_name=kernel.name)[0].shape == q.shape
                args = (q, None, q, q, q, None, q, q[..., 0], None, 0.0, False)
                assert sdpa_backward(*args, kernel_name=kernel.backward)[0].shape == q.shape


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


def test_backward_refuses_layouts(device: str) -> None:
    right = {name: torch.ones(4, 4, device=device) for name in ("grad_out", "query", "key", "value", "out")}
    right |= {"grad_lse": None, "attn_mask": None, "lse": torch.ones(4, device=device), "seed": None}
    right |= {"dropout_p": 0.0, "is_causal": False}
    for argument in ("grad_out", "query", "key", "value", "attn_mask", "out"):
        for layout, words in LAYOUTS.items():
            wrong = right | {argument: of_layout(layout, device)}
            refuses(argument, lambda wrong=wrong: sdpa_backward(**wrong), DENSE + words)
