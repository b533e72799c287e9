"""The choice of PyTorch's back ends in traced programs: the same as in eager mode, no guards, and nothing of the MATH back end.

Fake tensors on CUDA, whose lengths are symbols; no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx
from torch_route import (
    BF16,
    EFFICIENT,
    FLASH,
    fake,
    fake_qkv,
    forgotten,
    generous,  # noqa: F401 (a fixture for all tests here)
    needs_library,
    pretend,
    routed,
    symbolic_mode,
    symbolic_qkv,
    targets,
)  # fmt: skip

import attention_ext

pytestmark = needs_library
OURS = {"sdpa_forward"}
MATH = {"matmul", "bmm", "_scaled_dot_product_attention_math"}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with forgotten():
        pretend(monkeypatch, (9, 0))
        yield


# name: (lengths, dtype, options, whether a gradient is wanted, target)
SYMBOLIC = {
    "plain": ((128,), BF16, {}, False, "cudnn"),
    "plain, gradient": ((128,), BF16, {}, True, "flash"),
    "causal": ((128,), BF16, {"is_causal": True}, False, "cudnn"),
    "causal, gradient": ((128,), BF16, {"is_causal": True}, True, "cudnn"),
    "L and S": ((128, 256), BF16, {}, False, "cudnn"),
    "L and S, causal": ((128, 256), BF16, {"is_causal": True}, False, "kernel"),
    "L and S, causal, gradient": ((128, 256), BF16, {"is_causal": True}, True, "efficient"),
    "dropout": ((128,), BF16, {"dropout_p": 0.1}, True, "flash"),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_no_guard(name: str) -> None:
    """What is decided holds for every length and leaves no condition on it: one compilation is for all of them."""
    lengths, dtype, options, gradient, target = SYMBOLIC[name]
    mode = symbolic_mode()
    query, key, value = symbolic_qkv(mode, *lengths, dtype=dtype)
    assert isinstance(query.shape[2], torch.SymInt)
    with mode:
        query.requires_grad_(gradient)
        attention_ext.explain(query, key, value, **options)  # the checks, which are older, may guard
        before = len(mode.shape_env.guards)
        got, reason = routed(query, key, value, **options)
    assert got == target, reason
    assert len(mode.shape_env.guards) == before, mode.shape_env.guards[before:]


def test_known_multiples_are_known() -> None:
    """128 n keys, for any n."""
    mode = symbolic_mode()
    query, _, _ = symbolic_qkv(mode, 5)
    with mode:
        key = fake(2, 8, 128 * query.shape[2], 64)
        assert routed(query.requires_grad_(), key, key)[0] == "cudnn"


def test_length_that_may_be_1() -> None:
    """PyTorch's operator would have to ask, which a program for a length that data decides cannot answer."""
    mode = symbolic_mode()
    length = mode.shape_env.create_unbacked_symint()
    torch._check(length >= 1)
    with mode:
        query = fake(2, 8, length, 64)
        got, reason = routed(query, query, query)
    assert got == "flash" and "whether a length is 1" in reason


def test_symbolic_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile(dynamic=True) has it as a symbol: it is compiled for, as by PyTorch's operator. torch.export must not do so."""
    for exporting, target in ((False, "cudnn"), (True, "kernel")):
        monkeypatch.setattr(torch.compiler, "is_exporting", lambda exporting=exporting: exporting)
        mode = symbolic_mode()
        query, _, _ = symbolic_qkv(mode, 64)
        with mode:
            wide = fake(2, 8, 128, query.shape[2])
            assert routed(wide, wide, wide)[0] == target
        assert isinstance(wide.shape[3].node.maybe_as_int(), int) != exporting


def test_offsets() -> None:
    with FakeTensorMode():
        flat = fake(2 * 8 * 256 * 64 + 8)
        for offset, target in ((0, "cudnn"), (8, "cudnn"), (1, "kernel"), (4, "kernel")):
            query = flat[offset : offset + 2 * 8 * 256 * 64].view(2, 8, 256, 64)
            assert routed(query, query, query)[0] == target


def traced(f, *tensors: Tensor) -> set[str]:
    return targets(make_fx(f)(*tensors))


# Autograd's engine asks the device of fake tensors, too, for a context.
DIRECTIONS = pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["forward", "backward"])


def run_fake(backward: bool, *tensors: Tensor, **options) -> list[Tensor]:
    """out, and the gradients of query, key and value."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    out = attention_ext.sdpa(*leaves, **options)
    assert out.requires_grad
    return [out, *(torch.autograd.grad(out.sum(), leaves[:3]) if backward else ())]


@DIRECTIONS
@pytest.mark.parametrize(
    ("sizes", "mask", "options", "operator"),
    [
        ({"L": 192}, None, {}, FLASH),
        ({"L": 192}, None, {"dropout_p": 0.1, "is_causal": True}, FLASH),
        ({"L": 192, "heads": (8, 2)}, None, {"enable_gqa": True}, FLASH),
        ({"S": 512}, None, {"is_causal": True}, EFFICIENT),
        ({"S": 250}, (2, 1, 1, 250), {}, EFFICIENT),
        ({"S": 250}, (256, 1), {}, EFFICIENT),
    ],
)
def test_graphs_go_by_name(sizes: dict, mask: tuple[int, ...] | None, options: dict, operator: str, backward: bool) -> None:
    """The results lie as the operands do."""
    with FakeTensorMode():
        query, key, value = fake_qkv(**sizes)
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
        masks = [] if mask is None else [fake(*mask, dtype=torch.bool)]
        found = traced(lambda *inputs: run_fake(backward, *inputs, **options), query, key, value, *masks)
        out, *grads = run_fake(backward, query, key, value, *masks, **options)
    assert {operator, *([f"{operator}_backward"] if backward else [])} <= found and not found & (MATH | OURS)
    assert out.stride() == query.stride() and out.dtype == query.dtype
    assert [grad.shape for grad in grads] == [t.shape for t in (query, key, value)][: len(grads)]


@DIRECTIONS
@pytest.mark.parametrize("rank", [2, 3, 5])
def test_results_of_other_ranks(rank: int, backward: bool) -> None:
    leading = {2: (), 3: (4,), 5: (2, 3, 4)}[rank]
    with FakeTensorMode():
        query, key = fake(*leading, 192, 64), fake(*leading, 320, 64)
        for result, operand in zip(run_fake(backward, query, key, key), (query, query, key, key), strict=False):
            assert (result.shape, result.stride(), result.dtype) == (operand.shape, operand.stride(), operand.dtype)


@pytest.mark.gpu
def test_both_routes_in_one_graph() -> None:
    """AOTAutograd's joint graph of attention by FlashAttention-2 and by this package's kernels."""
    from functorch.compile import aot_function

    seen: list[set[str]] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.append(targets(graph))
        return graph

    def f(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        narrow = attention_ext.sdpa(query[..., :64], key[..., :64], value[..., :64])
        return attention_ext.sdpa(query, key, value).sum() + narrow.sum()

    with FakeTensorMode():
        inputs = fake_qkv(L=192, E=512, grad=True)
        aot_function(f, keep, keep)(*inputs).backward()
        assert all(t.grad is not None and t.grad.shape == t.shape for t in inputs)
    forward, backward = seen
    assert {FLASH, "sdpa_forward"} <= forward and {f"{FLASH}_backward", "sdpa_backward"} <= backward
    assert not (forward | backward) & MATH


class Attend(torch.nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, *inputs: Tensor) -> Tensor:
        return attention_ext.sdpa(*inputs, **self.options)


@pytest.mark.parametrize(
    ("dtype", "masked", "options", "operator"),
    [
        (BF16, False, {}, FLASH),
        (BF16, False, {"is_causal": True}, FLASH),
        (BF16, True, {}, EFFICIENT),
    ],
)
def test_export_with_dynamic_lengths(dtype: torch.dtype, masked: bool, options: dict, operator: str, monkeypatch) -> None:
    """Without a GPU, and with one whose kind must not get into the program: by name, and with what a gradient needs."""
    length = Dim("length", min=2, max=4096)
    for capability in (None, (9, 0)):
        pretend(monkeypatch, capability)
        with FakeTensorMode():
            inputs = [*fake_qkv(L=192, dtype=dtype), *([fake(2, 1, 1, 192, dtype=torch.bool)] if masked else [])]
        shapes = (*({2: length},) * 3, *([{3: length}] if masked else []))
        program = export(Attend(**options), tuple(inputs), dynamic_shapes={"inputs": shapes}).run_decompositions()
        found = targets(program.graph_module)
        assert operator in found and not found & (MATH | OURS)
        if operator == EFFICIENT:
            (node,) = (node for node in program.graph.nodes if operator in str(node.target))
            assert node.args[4] is True, "the log-sum-exp is what a later backward pass needs"
