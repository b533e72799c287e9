"""override where calls are traced: torch.compile and its guards, export, make_fx, jit.trace; and in backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import close, leaves, normal, qkv
from redirected import attention_in, run_own
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError, checkpoint

import attention_ext
from attention_ext import override

always = partial(override, "always")


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with override("always"):
        return attend(q, k, v)


decorated = always()(attend)


def test_compiled_in_one_graph(device: str) -> None:
    inputs = qkv(device=device)
    with always() as o:
        assert attention_in(attend, *inputs) == ["ours"]
    assert o.taken >= 1 and o.left == 0
    assert attention_in(within, *inputs) == attention_in(decorated, *inputs) == ["ours"]
    assert attention_in(attend, *inputs) == ["torch"]


def test_compiled_preferred_leaves_calls_with_a_reason() -> None:
    with override() as o:
        assert attention_in(attend, *qkv()) == ["torch"]
    assert o.taken == 0 and o.left >= 1 and o.reasons == {"on cpu sdpa is PyTorch's operator": "in a program that is traced"}


@pytest.mark.gpu
def test_compiled_preferred_on_the_card() -> None:
    faster = torch.cuda.get_device_capability() == (9, 0)
    for E, want in ((512, "ours" if faster else "torch"), (64, "torch")):
        inputs = qkv((1,), (2,), L=300, E=E, dtype=torch.bfloat16, device="cuda")
        assert attention_in(attend, *inputs, within=override()) == [want]


def test_compiled_when(device: str) -> None:
    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v) + attend(q[..., :8], k[..., :8], v)

    o = override(lambda query, key, value: query.size(-1) > 8)
    assert attention_in(two, *qkv(device=device), within=o) == ["ours", "torch"]


def test_compiled_around_sdpa_kernel(device: str) -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            first = attend(q, k, v)
        return first + attend(q, k, v)

    o = always()
    assert attention_in(both, *qkv(device=device), within=o) == ["torch", "ours"]
    assert o.left >= 1 and list(o.reasons) == ["torch.nn.attention.sdpa_kernel says what runs"]
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_in(attend, *qkv(device=device), within=always()) == ["torch"]


def test_one_graph_inside_and_one_outside(device: str) -> None:
    torch._dynamo.reset()
    counter, inputs = CompileCounter(), qkv(device=device)
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    o = always()
    for _ in range(3):
        compiled(*inputs)
        with o:
            compiled(*inputs)
        with always():  # another one of the same kind
            compiled(*inputs)
    assert counter.frame_count == 2
    with override():
        compiled(*inputs)
    assert counter.frame_count == 3


def test_compiled_numbers_and_gradients(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_own(monkeypatch)
    torch._dynamo.reset()
    inputs, grad = leaves(*qkv(device=device)), normal(2, 3, 19, 16, device=device)
    want = torch.autograd.grad(attend(*inputs), inputs, grad)
    with always() as o:
        out = torch.compile(attend, fullgraph=True)(*inputs)
        close(out, attend(*inputs))
        got = torch.autograd.grad(out, inputs, grad)
    assert o.taken >= 2
    for one, other in zip(got, want, strict=True):
        close(one, other, 1e-5)


def test_one_graph_for_all_lengths(device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for when in ("always", "preferred"):
        counter.frame_count = 0
        with override(when):
            for L in (19, 300, 5):
                inputs = qkv(L=L, device=device)
                for t in inputs:
                    torch._dynamo.mark_dynamic(t, 2)
                compiled(*inputs)
        assert counter.frame_count == 1


@pytest.fixture
def no_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def encoder(training: bool, device: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device=device)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)


@pytest.mark.parametrize("training", [False, True])
def test_compiled_transformer(device: str, training: bool, no_fast_path: None) -> None:
    module, x = encoder(training, device), normal(2, 9, 16, device=device)
    with torch.set_grad_enabled(training):
        assert attention_in(lambda x: module(x, is_causal=False), x, within=always()) == ["ours", "ours"]
        want = module(x)
        torch._dynamo.reset()
        with always():
            close(torch.compile(module, fullgraph=True)(x), want)


@torch.no_grad()
def test_compiled_fast_path_is_counted_as_left(device: str) -> None:
    with always() as o:
        assert attention_in(encoder(False, device), normal(2, 9, 16, device=device)) == []
    assert o.taken == 0 and o.left >= 2 and "set_fastpath_enabled(False)" in next(iter(o.reasons))


def test_compiled_methods_of_tensors_in_python(device: str) -> None:
    """Tensor.unflatten calls super(), which Dynamo did not trace under a mode before torch 2.14."""

    def heads(x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        k = x.unflatten(dim=-1, sizes=(2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, q)

    assert attention_in(heads, normal(2, 5, 16, device=device), within=always()) == ["ours"]


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_export(device: str, strict: bool) -> None:
    length = torch.export.Dim("length", max=64)
    with always() as o:
        shapes = ({2: length},) * 3
        program = torch.export.export(Attend(), qkv(device=device), dynamic_shapes=shapes, strict=strict)
    assert o.taken >= 1 and "attention_ext.sdpa.default" in program.graph_module.code
    inputs = qkv(L=31, device=device)
    close(program.module()(*inputs), attend(*inputs))


def test_make_fx_and_jit_trace(device: str) -> None:
    inputs = qkv(device=device)
    with always() as o:
        graph = make_fx(attend, pre_dispatch=True)(*inputs)
        traced = torch.jit.trace(attend, inputs)
    assert o.taken >= 2 and "attention_ext.sdpa" in graph.code and "attention_ext::sdpa" in str(traced.graph)
    close(graph(*inputs), attend(*inputs))
    close(traced(*inputs), attend(*inputs))


def checkpointed(reentrant: bool, inputs: list[Tensor]) -> Tensor:
    out = checkpoint(lambda q, k, v: attend(q, k, v).sin(), *inputs, use_reentrant=reentrant)
    return out.square().sum()


STARTS = {
    "method": lambda loss, inputs: loss.backward(),
    "inputs": lambda loss, inputs: loss.backward(inputs=inputs),
    "backward": lambda loss, inputs: torch.autograd.backward([loss], inputs=inputs),
    "grad": lambda loss, inputs: torch.autograd.grad(loss, inputs),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_the_same_again(device: str, start: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if reentrant and start != "method":
        pytest.skip("a reentrant checkpoint takes Tensor.backward() without inputs alone")
    run_own(monkeypatch)
    inputs = leaves(*qkv(device=device))
    want = torch.autograd.grad(attend(*inputs).sin().square().sum(), inputs)
    with always() as o:
        got = STARTS[start](checkpointed(reentrant, inputs), inputs) or [t.grad for t in inputs]
    assert (o.taken, o.left) == (2, 0)
    for one, other in zip(got, want, strict=True):
        close(one, other)


def test_a_backward_pass_outside_is_an_error_and_not_wrong(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_own(monkeypatch)
    inputs = leaves(*qkv(device=device))
    with always():
        loss = checkpointed(False, inputs)
    with pytest.raises(CheckpointError):
        loss.backward()


def test_a_checkpoint_may_bring_its_context(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_own(monkeypatch)
    inputs, o = leaves(*qkv(device=device)), always()
    out = checkpoint(attend, *inputs, use_reentrant=False, context_fn=lambda: (o, o))
    out.sum().backward()
    assert o.taken == 2 and all(t.grad is not None for t in inputs)


def test_autocast_and_transforms(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_own(monkeypatch)
    inputs = qkv(device=device)
    with always() as o:
        with torch.autocast(device, torch.bfloat16):
            assert attend(*inputs).dtype == torch.bfloat16
        close(torch.vmap(attend)(*inputs), attend(*inputs))
        grads = torch.func.grad(lambda q: attend(q, *inputs[1:]).sum())(inputs[0])
    assert o.taken == 4
    close(grads, torch.func.grad(lambda q: attend(q, *inputs[1:]).sum())(inputs[0]))


def test_where_torch_asks_for_functions_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be run with the mode on runs as it does without this package."""
    from attention_ext import _redirect, _torch_private

    def asks(tensor: Tensor) -> bool:
        return tensor.some_torch_function

    assert _torch_private.without_protocol(asks) is None
    monkeypatch.setattr(_redirect, "_MULTI_HEAD", None)
    monkeypatch.setattr(_redirect, "_ENGINE", {})
    module, x = nn.MultiheadAttention(16, 2), normal(5, 2, 16)
    with always() as o:
        out = module(x, x, x, need_weights=False)[0]
        attention_ext.sdpa(*leaves(*qkv())).sum().backward()
    close(out, module(x, x, x, need_weights=False)[0])
    assert (o.taken, o.left) == (0, 0)
