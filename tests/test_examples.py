"""examples/kernelbench: each ModelNew has the interface, the state and the results of the benchmark's Model."""

from __future__ import annotations

import copy
import inspect
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import close, normal
from torch import Tensor, nn

FOLDER = Path(__file__).parent.parent / "examples" / "kernelbench"


def example(name: str) -> ModuleType:
    loader = SourceFileLoader(f"examples_{name}", str(FOLDER / f"{name}.py"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def test_problem97(device: str) -> None:
    problem = example("level1_problem97")
    q, k, v = (normal(2, 3, 5, 8, device=device) for _ in range(3))
    close(problem.ModelNew(*problem.get_init_inputs())(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v))


class Model(nn.Module):
    """Problem 84 as the benchmark has it."""

    def __init__(self, in_features, out_features, bn_eps=1e-5, bn_momentum=0.1, scale_shape=(1,)) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, eps=bn_eps, momentum=bn_momentum)
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.scale * self.bn(self.gemm(x)))


@pytest.mark.parametrize("scale_shape", [(1,), (12,), ()], ids=str)
def test_problem84(device: str, scale_shape: tuple[int, ...]) -> None:
    """Training as the harness runs it, then evaluation; state and copies included."""
    problem = example("level2_problem84")
    own, ours = (kind(20, 12, 1e-3, 0.3, scale_shape).to(device) for kind in (Model, problem.ModelNew))
    nn.init.normal_(own.scale)
    ours.load_state_dict(own.state_dict())
    assert list(ours.state_dict()) == list(own.state_dict()) and [*ours.children()] == [ours.gemm, ours.bn]
    for model in (ours, copy.deepcopy(ours)):
        right = copy.deepcopy(own)
        for rows in (9, 4):
            x = torch.rand(rows, 20).to(device)
            out, want = model(x), right(x)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
            for of in ((model, out), (right, want)):
                of[1].square().sum().backward()
        for (name, a), b in zip(model.named_parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)
        for (name, a), b in zip(model.named_buffers(), right.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(model.eval()(x[:1]), right.eval()(x[:1]), rtol=1e-4, atol=1e-5)
        model.train(), model.zero_grad()


def test_problem84_is_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = example("level2_problem84")
    assert problem.get_init_inputs() == [8192, 8192, 1e-5, 0.1, (1,)] and problem.batch_size == 1024
    ours, own = (inspect.signature(kind.__init__).parameters for kind in (problem.ModelNew, Model))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in own.values()]
    monkeypatch.setattr(problem, "in_features", 16)
    (x,) = problem.get_inputs("cpu")
    assert x.shape == (64, 16) and x.min() >= 0.0 and x.max() < 1.0
