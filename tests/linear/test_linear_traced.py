"""The linear operators under opcheck, fake tensors, compile, export, autocast, CUDA graphs and torch's float32 settings."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import FLOATS, HALVES, close, leaves, normal
from linear_reference import Layer, layer64, make, own_product, product64
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export

import attention_ext

linear_float32 = torch.ops.attention_ext.linear_float32
fused = torch.ops.attention_ext.linear_batchnorm_softmax
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def products(device: str) -> dict[str, tuple[Tensor, ...]]:
    x, w, b = normal(5, 8, device=device), normal(6, 8, device=device), normal(6, device=device)
    return {
        "plain": (x, w),
        "bias": (x, w, b),
        "rank 1": (x[0], w, b),
        "rank 4": (normal(2, 3, 1, 8, device=device), w, b),
        "permuted": (normal(3, 2, 4, 8, device=device).permute(2, 0, 1, 3), w),
        "transposed": (normal(8, 5, device=device).t(), normal(8, 6, device=device).t()),
        "no rows": (x[:0], w, b),
        "no columns": (x[:, :0], w[:, :0], b),
    }


def layers(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Layer]:
    base = make(5, 8, 6, dtype=dtype, device=device)
    return {
        "train": base,
        "eval": replace(base, training=False),
        "train without statistics": replace(base, running_mean=None, running_var=None, bias=None),
        "plain": replace(base, bn_weight=None, bn_bias=None, scale=base.scale[0]),
        "scale per feature": replace(base, scale=base.bn_bias * 2),
        "strided": replace(base, input=base.input.t().contiguous().t(), weight=base.weight.repeat(1, 2)[:, ::2], training=False),
        "no rows": replace(base, input=base.input[:0], training=False),
    }


@pytest.mark.each_value
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", products("cpu"))
def test_opcheck_linear_float32(device: str, name: str, grad: bool) -> None:
    args = products(device)[name]
    torch.library.opcheck(linear_float32.default, tuple(leaves(*args)) if grad else args)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", layers("cpu"))
def test_opcheck(device: str, name: str, grad: bool, dtype: torch.dtype) -> None:
    layer = layers(device, dtype)[name]
    if grad:  # the running statistics stay as they are
        wanted = {n: t.detach().requires_grad_() for n, t in layer.tensors().items() if not n.startswith("running")}
        layer = replace(layer, **wanted)
    torch.library.opcheck(fused.default, tuple(layer.args()))


def test_opcheck_of_an_empty_batch_when_training(device: str) -> None:
    """Its statistics are NaN, which opcheck takes for a difference between eager and compiled calls."""
    layer = replace(make(5, 8, 6, device=device), input=torch.empty(0, 8, device=device, requires_grad=True))
    torch.library.opcheck(
        fused.default, tuple(layer.args()), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    torch._dynamo.reset()
    compiled = torch.compile(lambda: fused(*layer.args()), fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(compiled, fused(*layer.args()), equal_nan=True)


def test_fake_results_lie_as_real_ones(device: str) -> None:
    calls = [(linear_float32, list(args)) for args in products(device).values()]
    calls += [(fused, layer.args()) for dtype in FLOATS for layer in layers(device, dtype).values()]
    for op, args in calls:
        real = op(*args)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(t) if isinstance(t, Tensor) else t for t in args))
        for a, b in zip(*((r,) if isinstance(r, Tensor) else r for r in (real, fake)), strict=True):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients(device: str, backend: str) -> None:
    layer = make(9, 8, 11, device=device)
    names = ("input", "weight", "bias", "bn_weight", "bn_bias", "scale")
    running_mean, running_var = layer.running_mean, layer.running_var

    def call(*tensors: Tensor) -> Tensor:
        out, mean, var, linear = fused(*tensors[:5], running_mean, running_var, tensors[5], True, 1e-5)
        return out.square().sum() + mean.sin().sum() + linear_float32(linear, tensors[1].t()).sum() + var.sum()

    torch._dynamo.reset()
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend=backend)):
        tensors = leaves(*(getattr(layer, n) for n in names))
        out = run(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_one_graph_for_all_numbers_of_rows(device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    layer = make(8, 12, 10, device=device)

    def call(x: Tensor) -> Tensor:
        return attention_ext.linear_batchnorm_softmax(
            linear_float32(x, layer.weight[:, :12]), layer.weight[:, :10], scale=2, training=True
        )

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for rows in (8, 2, 300, 65):
        x = normal(rows, 12, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), call(x))
    assert counter.frame_count == 1


class Functional(torch.nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.training_mode = layer.training
        for name, tensor in layer.tensors().items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        hidden = attention_ext.linear_float32(x, torch.eye(x.size(1), device=x.device))
        return attention_ext.linear_batchnorm_softmax(
            hidden, self.weight, self.bias, bn_weight=self.bn_weight, bn_bias=self.bn_bias, running_mean=self.running_mean,
            running_var=self.running_var, scale=self.scale, training=self.training_mode, momentum=0.3,
        )  # fmt: skip


@modes
def test_export_with_dynamic_rows(device: str, training: bool) -> None:
    layer = make(8, 12, 10, training=training, device=device)
    rows = Dim("rows", min=2 if training else 1, max=4096)
    program = export(Functional(layer.map(torch.clone)), (layer.input,), dynamic_shapes=({0: rows},))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    for module in (program.module(), torch.export.load(stored).module()):
        eager = Functional(layer.map(torch.clone))
        for n in (2, 3, 64, 4096, *([] if training else [1])):
            x = normal(n, 12, device=device)
            torch.testing.assert_close(module(x), eager(x), rtol=1e-5, atol=1e-6)
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(module, name), getattr(eager, name), rtol=1e-5, atol=1e-6)
            assert torch.equal(getattr(eager, name), getattr(layer, name)) != training


def test_jit_trace(device: str) -> None:
    layer = make(device=device)
    traced = torch.jit.trace(lambda x, w: fused(x, w, *layer.args()[2:])[0] + linear_float32(x, w), (layer.input, layer.weight))
    x = normal(7, 12, device=device)
    torch.testing.assert_close(traced(x, layer.weight), fused(x, *layer.args()[1:])[0] + linear_float32(x, layer.weight))


def own_chain(layer: Layer) -> Tensor:
    a, linear = layer, F.linear(layer.input, layer.weight, layer.bias)
    x = F.batch_norm(linear, a.running_mean, a.running_var, a.bn_weight, a.bn_bias, a.training, 0.0, a.eps)
    return torch.softmax(a.scale * x, -1)


@modes
@pytest.mark.parametrize("region", HALVES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [(), (1,), (10,)], ids=str)
def test_autocast(device: str, scale: tuple[int, ...], dtype: torch.dtype, region: torch.dtype, training: bool) -> None:
    """The dtype is that of PyTorch's chain in the same region, eager and compiled; the values are those of lowered operands."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer = make(9, dtype=dtype, bn_dtype=wide, scale=scale, training=training, device=device)
    layer = replace(layer, weight=layer.weight.to(wide).requires_grad_(), bias=layer.bias.to(wide))
    torch._dynamo.reset()
    args = layer.args()
    with torch.autocast(device, dtype=region):
        out, own = fused(*args)[0], own_chain(layer)
        compiled = torch.compile(lambda: fused(*args)[0], fullgraph=True, backend="aot_eager")()
    assert out.dtype == own.dtype == compiled.dtype
    lowered = layer
    if dtype != torch.float64:
        operands = {n: getattr(layer, n).detach().to(region) for n in ("input", "weight", "bias")}
        lowered = replace(layer, **operands)
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else region).eps
    close(out, layer64(lowered)[0], 4 * unit)
    assert torch.equal(out, compiled)
    (grad,) = torch.autograd.grad(out.square().sum(), layer.weight)
    assert grad.dtype == wide and grad.isfinite().all() and grad.any()


@pytest.mark.parametrize("region", HALVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_autocast_leaves_linear_float32_in_float32(device: str, dtype: torch.dtype, region: torch.dtype) -> None:
    x, w = leaves(normal(9, 200, dtype=dtype, device=device), normal(6, 200, device=device))
    with torch.autocast(device, dtype=region):
        out = linear_float32(x, w)
        grads = torch.autograd.grad(out.square().sum(), (x, w))
    assert out.dtype == torch.float32 and [g.dtype for g in grads] == [dtype, torch.float32]
    close(out, product64(x, w), 2e-6)
    close(grads[1], 2 * product64(out.t(), x.t()), 2e-6)
    with torch.autocast(device, dtype=region), torch.autocast(device, enabled=False), pytest.raises(RuntimeError):
        linear_float32(x.half(), w)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "ieee"])
def test_torch_may_round_products_on_the_cpu(precision: str) -> None:
    """Where PyTorch's own product may drop digits on some processors, ours is that of float64, rounded once."""
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    x, w = normal(17, 300), normal(9, 300)
    try:
        setting.fp32_precision = precision
        out, layer = linear_float32(x, w), fused(x, w, None, None, None, None, None, torch.ones(1), True, 1e-5)
    finally:
        setting.fp32_precision = before
    want = own_product(x, w) if precision == "ieee" else product64(x, w).float()
    assert torch.equal(out, want) and torch.equal(layer[3], want)


def calls(layer: Layer) -> list[Tensor]:
    tensors = leaves(layer.input, layer.weight)
    out = fused(*tensors, *layer.args()[2:])[0] + linear_float32(*tensors)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


def test_threads(device: str) -> None:
    layer = make(33, 40, 17, device=device)
    want, got = calls(layer), {}

    def work(n: int) -> None:
        got[n] = [calls(layer) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(got) == [0, 1, 2, 3]
    for results in got.values():
        for result in results:
            torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("special", [1.0, float("inf")])
@modes
def test_cuda_graph(training: bool, special: float) -> None:
    """Captured on a side stream and replayed on new numbers, an infinity among them: no branch is taken on the host."""
    layer = make(300, 1000, 130, training=training, device="cuda")
    static: dict[str, Any] = {}

    def call() -> None:
        static["out"] = [*fused(*layer.args()), linear_float32(layer.input, layer.weight)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    layer.input.copy_(normal(300, 1000, device="cuda"))
    layer.input[3, 4] *= special
    graph.replay()
    torch.cuda.synchronize()
    want = [*fused(*layer.args()), linear_float32(layer.input, layer.weight)]
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(static["out"], want, strict=True))


@pytest.mark.gpu
def test_side_stream() -> None:
    """A long copy on the side stream comes first; a kernel on the default stream would read what was there before."""
    layer = make(300, 1000, 130, device="cuda")
    other = normal(300, 1000, device="cuda")
    want = linear_float32(other, layer.weight)
    target, busy = torch.full_like(other, float("nan")), torch.empty(1 << 28, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            busy.fill_(1.0)
        target.copy_(other)
        got = linear_float32(target, layer.weight)
    torch.cuda.synchronize()
    assert torch.equal(got, want)
