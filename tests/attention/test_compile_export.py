"""opcheck, torch.compile without graph breaks, torch.export with dynamic sizes; fake results lie as real ones do."""

from __future__ import annotations

import io

import pytest
import torch
from helpers import FLOATS, HALVES, close, compare, leaves, normal, qkv, run, sdpa, sdpa_backward, sdpa_forward
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export

ops = torch.ops.attention_ext


def swapped(tensor: Tensor) -> Tensor:
    """The same values in (B, L, H, E) order."""
    return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)


def samples(dtype: torch.dtype, device: str) -> dict[str, tuple[list[Tensor | None], dict]]:
    """name -> (query, key, value, attn_mask), other arguments."""

    def make(*args, mask: Tensor | None = None, order=lambda t: t, **sizes) -> list[Tensor | None]:
        return [*(order(t) for t in qkv(*args, dtype=dtype, device=device, **sizes)), mask]

    keep = torch.ones(4, 5, dtype=torch.bool, device=device)
    keep[1] = False
    return {
        "plain": (make(L=4, S=5, E=8), {}),
        "causal": (make(L=5, S=4, E=8, Ev=6), {"is_causal": True}),
        "BLHE": (make(L=4, S=5, E=8, order=swapped), {"is_causal": True, "scale": 0.3}),
        "negative scale": (make(L=4, S=5, E=8), {"is_causal": True, "scale": -0.5}),
        "bool mask": (make(L=4, S=5, E=8, mask=keep), {}),
        "float mask": (make(L=4, S=5, E=8, mask=normal(3, 1, 5, dtype=dtype, device=device)), {}),
        "float32 mask": (make(L=4, S=5, E=8, mask=normal(4, 5, device=device).expand(2, 3, 4, 5)), {}),
        "grouped": (make(heads=(4, 2), L=4, S=5, E=8, mask=keep), {"enable_gqa": True}),
        "grouped BLHE": (make(heads=(4, 2), L=4, S=5, E=8, order=swapped), {"enable_gqa": True, "is_causal": True}),
        "rank 2": (make((), (), L=4, S=5, E=3), {}),
        "rank 3": (make((), L=4, S=5, E=3, order=swapped), {}),
        "rank 5": (make((2, 1), L=1, S=5, E=3), {}),
        "one of all": (make((1,), (1,), L=1, E=1), {}),
        "no keys": (make(L=4, S=0, E=8), {}),
        "no head dim": (make(L=4, S=5, E=0, Ev=3), {}),
    }


NAMES = list(samples(torch.float32, "cpu"))


def needing_grad(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """opcheck wants its inputs as they are, so a leaf with the same strides."""
    return leaves(*tensors)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck_sdpa(device: str, name: str, dtype: torch.dtype) -> None:
    tensors, options = samples(dtype, device)[name]
    torch.library.opcheck(ops.sdpa.default, needing_grad(tensors), options)
    if dtype == torch.float32:
        torch.library.opcheck(ops.sdpa.default, tensors, options)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck_sdpa_forward(device: str, name: str, dtype: torch.dtype) -> None:
    tensors, options = samples(dtype, device)[name]
    causal, rest = options.get("is_causal", False), {n: o for n, o in options.items() if n != "is_causal"}
    torch.library.opcheck(ops.sdpa_forward.default, (*needing_grad(tensors), None, 0.0, causal), rest)
    if name == "plain":
        seed = torch.tensor([7], device=device)
        torch.library.opcheck(ops.sdpa_forward.default, (*needing_grad(tensors), seed, 0.4, causal), rest)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck_sdpa_backward(device: str, name: str, dtype: torch.dtype) -> None:
    tensors, options = samples(dtype, device)[name]
    causal, rest = options.get("is_causal", False), {n: o for n, o in options.items() if n != "is_causal"}
    out, lse = sdpa_forward(*tensors, None, 0.0, causal, **rest)
    rest["mask_grad"] = tensors[3] is not None and tensors[3].is_floating_point()
    for grad_lse in (None, torch.ones_like(lse)):
        args = (torch.ones_like(out), grad_lse, *tensors, out, lse, None, 0.0, causal)
        torch.library.opcheck(ops.sdpa_backward.default, args, rest)


def same_layout(real: Tensor, fake: Tensor) -> bool:
    return (real.shape, real.stride(), real.dtype, real.device) == (fake.shape, fake.stride(), fake.dtype, fake.device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fake_results_lie_as_real_ones(device: str, name: str, dtype: torch.dtype) -> None:
    """out, lse and gradients, of sdpa and of both kernels."""
    tensors, options = samples(dtype, device)[name]
    causal, rest = options.get("is_causal", False), {n: o for n, o in options.items() if n != "is_causal"}

    def everything(*inputs: Tensor | None) -> list[Tensor]:
        inputs = leaves(*inputs)
        out = sdpa(*inputs, **options)
        grads = torch.autograd.grad(out.sum(), [t for t in inputs if t is not None and t.requires_grad])
        with torch.no_grad():
            raw, lse = sdpa_forward(*inputs, None, 0.0, causal, **rest)
            with_mask = inputs[3] is not None and inputs[3].is_floating_point()
            g = torch.ones_like(raw)
            kernel = sdpa_backward(g, None, *inputs, raw, lse, None, 0.0, causal, mask_grad=with_mask, **rest)
        return [out, *grads, raw, lse, *kernel]

    with FakeTensorMode() as mode:
        fakes = everything(*(None if t is None else mode.from_tensor(t) for t in tensors))
    for index, (real, fake) in enumerate(zip(everything(*tensors), fakes, strict=True)):
        assert same_layout(real, fake), (index, real.shape, real.stride(), fake.shape, fake.stride())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("E", [64, 512])
def test_fake_cuda_tensors_need_no_gpu(dtype: torch.dtype, E: int) -> None:
    with FakeTensorMode():  # beside a CPU-only torch a fake CUDA tensor that requires grad aborts the process in torch itself
        q = torch.empty(2, 5, 3, E, dtype=dtype, device="cuda", requires_grad=torch.version.cuda is not None)
        try:
            out = sdpa(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2))
        except RuntimeError as error:  # only a build or a torch without CUDA may refuse, and it must say so
            assert str(error).startswith("attention_ext: query: expected a CPU tensor, got one on cuda"), error
            assert "built without CUDA" in str(error) or (torch.version.cuda is None and "has no CUDA" in str(error)), error
            return
        assert out.shape == (2, 3, 5, E) and out.stride() == (15 * E, E, 3 * E, 1)
        assert out.dtype == dtype and out.device.type == "cuda"
        t = q.detach().transpose(1, 2)
        raw, lse = sdpa_forward(t, t, t, None, None, 0.0, False)
        for grad in sdpa_backward(raw, None, t, t, t, None, raw, lse, None, 0.0, False)[:3]:
            assert grad.shape == t.shape and grad.stride() == t.stride() and grad.device.type == "cuda"


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_forward_and_backward(device: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, m: sdpa(q + 1, k, v, m).mul(2), fullgraph=True, dynamic=dynamic)
    for B, L, S in [(2, 9, 11), (3, 5, 64)][: 1 + dynamic]:
        inputs, mask = qkv((B,), L=L, S=S, E=8, device=device), normal(L, S, device=device)
        grad = normal(B, 3, L, 8)
        out, grads = run(compiled, leaves(*inputs, mask), grad)
        want, want_grads = run(lambda q, k, v, m: sdpa(q + 1, k, v, m).mul(2), leaves(*inputs, mask), grad)
        torch.testing.assert_close((out, *grads), (want, *want_grads), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_one_graph_for_all_sizes(device: str, causal: bool, kind: str) -> None:
    """Marked dynamic, so that a size burnt into the graph is an error and not a second graph."""
    torch._dynamo.reset()
    counter, gqa = CompileCounter(), kind == "grouped"
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=causal, enable_gqa=gqa), fullgraph=True, backend=counter)
    for B, L, S in [(3, 9, 11), (2, 5, 64), (64, 512, 7), (5, 65, 65)]:
        q, k, v = qkv((B,), (4, 2) if gqa else (2,), L=L, S=S, E=8, device=device)
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 0)
            torch._dynamo.mark_dynamic(t, 2)
        close(compiled(q, k, v), sdpa(q, k, v, is_causal=causal, enable_gqa=gqa), 1e-6)
    assert counter.frame_count == 1


def test_inductor_restrides_the_inputs(device: str) -> None:
    q = normal(2, 5, 3, 8, device=device).transpose(1, 2)

    def f(x: Tensor) -> Tensor:
        return sdpa(x.mT.contiguous().mT + 1, x, x).transpose(1, 2).flatten(2)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, fullgraph=True)(q), f(q))


@pytest.mark.parametrize("name", NAMES)
def test_compile_samples(device: str, name: str) -> None:
    tensors, options = samples(torch.float32, device)[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: sdpa(*t, **options), fullgraph=True, backend="aot_eager")
    want, want_grads = run(sdpa, leaves(*tensors), torch.ones_like(sdpa(*tensors, **options)), **options)
    out, grads = run(compiled, leaves(*tensors), torch.ones_like(want))
    torch.testing.assert_close((out, *grads), (want, *want_grads), rtol=1e-5, atol=1e-5)


def test_compiled_dropout_is_fresh_at_each_call(device: str) -> None:
    q, k, eye = *qkv(L=16, device=device)[:2], torch.eye(16, device=device).expand(2, 3, 16, 16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: sdpa(q, k, eye, None, 0.5) != 0, fullgraph=True, backend="aot_eager")
    a, b = compiled(), compiled()
    assert not torch.equal(a, b) and 0.3 < a.float().mean() < 0.7


class Attend(torch.nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return sdpa(q, k, v, mask, **self.options)


SIZES = [(1, 1, 1), (1, 9, 1), (2, 1, 9), (5, 33, 64), (64, 512, 64), (1, 64, 512)]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "scale": -0.5}], ids=str)
def test_export_with_dynamic_sizes(device: str, options: dict) -> None:
    b, l, s = Dim("b", min=1, max=64), Dim("l", min=1, max=512), Dim("s", min=1, max=512)
    dynamic = ({0: b, 2: l}, {0: b, 2: s}, {0: b, 2: s}, None)
    program = export(Attend(**options), qkv((3,), (2,), L=9, S=7, E=8, device=device), dynamic_shapes=dynamic[:3])
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    for module in (program.module(), torch.export.load(stored).module()):
        for B, L, S in SIZES:
            q, k, v = qkv((B,), (2,), L=L, S=S, E=8, device=device)
            options_of = {"causal": options.get("is_causal", False), "scale": options.get("scale")}
            compare(q, k, v, backward=False, op=lambda q, k, v, m, module=module, **_: module(q, k, v), **options_of)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_export_where_batch_and_length_tie(device: str, options: dict) -> None:
    b, l = Dim("b", min=1, max=64), Dim("l", min=1, max=512)
    program = export(Attend(**options), qkv((3,), (2,), L=9, E=8, device=device), dynamic_shapes=({0: b, 2: l},) * 3)
    for B, L in [(1, 1), (1, 9), (2, 1), (5, 33), (64, 9), (3, 512)]:
        (q, k, v), causal = qkv((B,), (2,), L=L, E=8, device=device), options.get("is_causal", False)
        compare(q, k, v, causal=causal, backward=False, op=lambda q, k, v, m, **_: program.module()(q, k, v))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_export_keeps_a_broadcast_dim_apart_from_a_dynamic_one(device: str, kind: str) -> None:
    """The mask (b, 1, 1, s) at b = 1, s = 1: its static 1s broadcast, its dynamic ones are the batch and the length."""
    b, l, s = Dim("b", min=1, max=64), Dim("l", min=1, max=512), Dim("s", min=1, max=512)
    dynamic = ({0: b, 2: l}, {0: b, 2: s}, {0: b, 2: s}, {0: b, 3: s})

    def inputs(B: int, L: int, S: int) -> tuple[Tensor, ...]:
        mask = normal(B, 1, 1, S, device=device)
        return (*qkv((B,), (2,), L=L, S=S, E=8, device=device), mask if kind == "float" else mask > -0.5)

    module = export(Attend(), inputs(3, 9, 7), dynamic_shapes=dynamic).module()
    for B, L, S in SIZES:
        compare(*inputs(B, L, S), backward=False, op=lambda q, k, v, m, **_: module(q, k, v, m))


def test_jit_trace(device: str) -> None:
    inputs = qkv(L=5, device=device)
    traced = torch.jit.trace(lambda q, k, v: sdpa(q, k, v, is_causal=True), inputs)
    again = qkv(L=5, device=device)
    torch.testing.assert_close(traced(*again), sdpa(*again, is_causal=True))
