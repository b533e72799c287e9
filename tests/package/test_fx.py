"""torch.fx.symbolic_trace of the public functions and the module, and the __torch_function__ protocol that it rests on."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import normal, qkv
from nn_pairs import SCALES, SWITCHES, check_buffers, pair
from paths import ROOT
from processes import python_after_torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import attention_ext
from attention_ext import linear_batchnorm_softmax, linear_float32, merge_partials


def linear(device: str) -> dict[str, Any]:
    return {"input": normal(6, 8, device=device), "weight": normal(4, 8, device=device), "bias": normal(4, device=device)}


def affine(device: str) -> dict[str, Any]:
    return linear(device) | {"bn_weight": normal(4, device=device), "bn_bias": normal(4, device=device)}


def statistics(device: str) -> dict[str, Any]:
    return {"running_mean": torch.zeros(4, device=device), "running_var": torch.ones(4, device=device)}


CALLS: dict[str, tuple[Callable[..., Any], Callable[[str], dict[str, Any]]]] = {
    "linear_float32": (linear_float32, linear),
    "linear_batchnorm_softmax": (linear_batchnorm_softmax, lambda d: affine(d) | statistics(d) | {"scale": 2.5}),
    "scale a tensor": (linear_batchnorm_softmax, lambda d: affine(d) | statistics(d) | {"scale": normal(4, device=d)}),
    "training": (linear_batchnorm_softmax, lambda d: affine(d) | statistics(d) | {"scale": 2.5, "training": True}),
    "merge_partials": (
        merge_partials,
        lambda d: {"outs": [normal(2, 5, 3, device=d) for _ in range(3)], "lses": [normal(2, 5, device=d) for _ in range(3)]},
    ),
}
calls = pytest.mark.parametrize("call", CALLS)


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    """Results, gradients of all that can have one, and what the call left in its arguments."""
    arguments = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, arguments)
    fixed = [arguments[name] for name in ("running_mean", "running_var") if name in arguments]
    wanted = [t.requires_grad_() for t in tree_leaves(arguments) if isinstance(t, Tensor) and all(t is not f for f in fixed)]
    results = tree_leaves(function(**arguments))
    grads = torch.autograd.grad(sum(t.square().sum() for t in results), wanted)
    return [*results, *grads, *fixed]


def copies(traced: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The traced module and what has to be the same."""
    traced.graph.lint()
    traced.recompile()
    yield traced
    yield copy.deepcopy(traced)
    yield pickle.loads(pickle.dumps(traced))


def targets(traced: fx.GraphModule) -> list[Any]:
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


@calls
def test_a_function_alone(device: str, call: str) -> None:
    function, make = CALLS[call]
    arguments = make(device)
    want = outcome(function, arguments)
    traced = fx.symbolic_trace(function)
    assert targets(traced) == [function]
    for module in copies(traced):
        torch.testing.assert_close(outcome(module, arguments), want)


class Everything(nn.Module):
    """Every public function and the module, with attention in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(normal(6, 8)), nn.Parameter(normal(4, 6))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.mean, self.var = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(4))
        self.fused = attention_ext.nn.LinearBatchNormSoftmax(nn.Linear(4, 3), nn.BatchNorm1d(3), 1.5)

    def forward(self, q, k, v):  # before 2.14 torch.fx cannot store annotations that are strings
        out, lse = attention_ext.sdpa_with_lse(q, k[:, :, :4], v[:, :, :4])
        other, other_lse = attention_ext.sdpa_with_lse(q, k[:, :, 4:], v[:, :, 4:], is_causal=True, scale=0.3)
        out, lse = merge_partials([out, other], (lse, other_lse))
        rows = linear_float32(attention_ext.sdpa(out, k, v).flatten(0, 2), self.first)
        rows = linear_batchnorm_softmax(
            rows, self.second, running_mean=self.mean, running_var=self.var, scale=self.scale, training=True
        )
        return self.fused(rows), lse


def step(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Results, gradients of inputs and parameters, buffers."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    results = tree_leaves(module(*leaves))
    grads = torch.autograd.grad(sum(t.square().sum() for t in results), [*leaves, *module.parameters()])
    return [*results, *grads, *(buffer.clone() for buffer in module.buffers())]


def test_everything_in_a_module(device: str) -> None:
    """One graph of public functions and operators alone, which runs, compiles and is exported."""
    module, inputs = Everything().to(device), qkv(batch=(1,), heads=(2,), L=5, S=7, E=8, device=device)
    traced = fx.symbolic_trace(copy.deepcopy(module))
    ours = [target for target in targets(traced) if target is not operator.getitem]
    sdpa, with_lse = torch.ops.attention_ext.sdpa.default, torch.ops.attention_ext.sdpa_with_lse.default
    fused = attention_ext.nn.linear_batchnorm_softmax
    assert ours == [with_lse, with_lse, merge_partials, sdpa, linear_float32, linear_batchnorm_softmax, fused]
    want = step(module, *inputs)
    for again in copies(copy.deepcopy(traced)):
        torch.testing.assert_close(step(copy.deepcopy(again), *inputs), want)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(traced), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled, *inputs), want)
    exported = torch.export.export(copy.deepcopy(traced), inputs).module()
    torch.testing.assert_close(exported(*inputs), tuple(want[:2]))


FORMS = [*((switch, "parameter") for switch in SWITCHES), *(("default", scale) for scale in SCALES if scale != "parameter")]


@pytest.mark.parametrize(("switch", "scale"), FORMS)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_module(device: str, switch: str, scale: str, alone: bool, training: bool) -> None:
    """The graph has the state of the module it was traced from, and follows it from training to evaluation and back."""
    ours, _ = pair(device, switch, scale)
    root = (ours if alone else nn.Sequential(ours, nn.Linear(6, 2, device=device))).train(training)
    for traced in copies(fx.symbolic_trace(copy.deepcopy(root))):
        mine, own = copy.deepcopy(traced), copy.deepcopy(root)
        assert list(mine.state_dict()) == list(own.state_dict())
        for mode, rows in ((training, 5), (True, 9), (False, 4), (True, 0), (False, 3)):
            mine.train(mode), own.train(mode)
            x = normal(rows, 8, device=device)
            torch.testing.assert_close(step(mine, x), step(own, x))  # the count of batches among the buffers


@pytest.mark.parametrize("function", [linear_float32, linear_batchnorm_softmax, merge_partials], ids=lambda f: f.__name__)
def test_a_stored_graph_imports_the_package(tmp_path: Path, function: Callable[..., Any]) -> None:
    path = tmp_path / "traced.pkl"
    path.write_bytes(pickle.dumps(fx.symbolic_trace(function)))
    code = f"import pickle, sys, torch; pickle.load(open({str(path)!r}, 'rb')); print('attention_ext' in sys.modules)"
    assert python_after_torch(code, cwd=ROOT) == "True"


class Default(Tensor):
    pass


class Watched(Tensor):
    """Behaves as a subclass does by default."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Watching(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@calls
def test_a_subclass_sees_the_call(device: str, call: str) -> None:
    """Whichever argument is of it: once, as the public function, whose results are of the subclass. Compiled, they are as well."""
    function, make = CALLS[call]
    arguments = make(device)
    want = tree_leaves(function(**copy.deepcopy(arguments)))
    leaves, spec = tree_flatten(arguments)
    for at in (index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)):
        given = copy.deepcopy(leaves)
        given[at] = given[at].as_subclass(Watched)
        Watched.seen.clear()
        results = tree_leaves(function(**tree_unflatten(given, spec)))
        assert Watched.seen == [function]
        assert all(type(t) is Watched for t in results)
        torch.testing.assert_close([t.as_subclass(Tensor) for t in results], want)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    results = tree_leaves(compiled(**tree_map(lambda t: t.as_subclass(Default) if isinstance(t, Tensor) else t, arguments)))
    assert all(type(t) is Default for t in results)


@calls
def test_a_mode_sees_the_call(device: str, call: str) -> None:
    function, make = CALLS[call]
    arguments = make(device)
    want = tree_leaves(function(**copy.deepcopy(arguments)))
    with Watching() as mode:
        results = function(**arguments)
    assert mode.seen == [function]
    torch.testing.assert_close(tree_leaves(results), want)


def test_the_module_under_subclass_and_mode(device: str) -> None:
    function = attention_ext.nn.linear_batchnorm_softmax
    ours, own = pair(device)
    x = normal(5, 8, device=device)
    Watched.seen.clear()
    result = ours(x.as_subclass(Watched))
    assert Watched.seen == [function] and type(result) is Watched
    torch.testing.assert_close(result.as_subclass(Tensor), own(x), rtol=1e-4, atol=1e-5)
    with Watching() as mode:
        result = ours(x)
    assert mode.seen == [function]
    torch.testing.assert_close(result, own(x), rtol=1e-4, atol=1e-5)
    check_buffers(ours, own)
