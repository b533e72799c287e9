"""examples/kernelbench: each ModelNew has the interface, the state and the results of the benchmark's Model."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from helpers import close, normal
from loader import script
from torch import Tensor, nn
from torch.func import functional_call

FOLDER = "examples/kernelbench"


def test_problem97(device: str) -> None:
    problem = script("level1_problem97.py", FOLDER)
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


def pair84(device: str, scale_shape: tuple[int, ...] = (1,)) -> tuple[nn.Module, nn.Module]:
    """The benchmark's and ours with the same state."""
    kinds = Model, script("level2_problem84.py", FOLDER).ModelNew
    own, ours = (kind(20, 12, 1e-3, 0.3, scale_shape).to(device) for kind in kinds)
    nn.init.normal_(own.scale)
    ours.load_state_dict(own.state_dict())
    return own, ours


@pytest.mark.parametrize("scale_shape", [(1,), (12,), ()], ids=str)
def test_problem84(device: str, scale_shape: tuple[int, ...]) -> None:
    """Training as the harness runs it, then evaluation; state and copies included."""
    own, ours = pair84(device, scale_shape)
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


def test_problem84_with_another_state(device: str) -> None:
    """Parameters given for one call, put in place of the loaded ones, or assigned are those that count."""
    own, ours = pair84(device)
    x = torch.rand(9, 20).to(device)

    def compare(call) -> None:
        torch.testing.assert_close(call(ours), call(own), rtol=1e-4, atol=1e-5)

    def loss(scale: Tensor, model: nn.Module) -> Tensor:
        return functional_call(model, {"scale": scale}, (x,)).square().sum()

    compare(lambda model: model(x))
    for model in (own, ours):  # transforms cannot update the statistics
        model.eval()
    before = ours(x)
    compare(lambda model: functional_call(model, {"scale": own.scale * 3 + 1}, (x,)))
    compare(lambda model: torch.func.grad(loss)(own.scale.detach() * 3, model))
    other, _ = pair84(device)
    for model in (own, ours):
        model.load_state_dict({name: t.clone() for name, t in other.state_dict().items()}, assign=True)
    compare(lambda model: model(x))
    for model in (own, ours):
        model.scale = nn.Parameter(torch.full((1,), -2.0, device=device))
    compare(lambda model: model(x))
    assert not torch.allclose(ours(x), before, rtol=1e-2)


def test_problem84_is_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = script("level2_problem84.py", FOLDER)
    assert problem.get_init_inputs() == [8192, 8192, 1e-5, 0.1, (1,)] and problem.batch_size == 1024
    ours, own = (inspect.signature(kind.__init__).parameters for kind in (problem.ModelNew, Model))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in own.values()]
    monkeypatch.setattr(problem, "in_features", 16)
    (x,) = problem.get_inputs("cpu")
    assert x.shape == (64, 16) and x.min() >= 0.0 and x.max() < 1.0
