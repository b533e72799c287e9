"""attention_ext.nn.LinearBatchNormSoftmax under compile, export, parametrizations and autocast."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers import HALVES, normal
from nn_pairs import SCALES, check_buffers, pair, switches
from torch import nn
from torch.export import Dim, export


@switches
def test_compiled(device: str, switch: str) -> None:
    """One graph, buffers and the count of batches included."""
    ours, own = pair(device, switch)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for rows in (5, 9, 0, 9):
        x = normal(rows, 8, device=device)
        torch.testing.assert_close(compiled(x), own(x), rtol=1e-4, atol=1e-5)
        check_buffers(ours, own)
    ours.eval(), own.eval()
    torch.testing.assert_close(compiled(x), own(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("switch", ["default", "cumulative average", "nothing"])
@pytest.mark.parametrize("training", [True, False])
def test_exported(device: str, switch: str, training: bool) -> None:
    ours, own = pair(device, switch)
    ours.train(training), own.train(training)
    rows = Dim("rows", min=2, max=1024)
    program = export(copy.deepcopy(ours), (normal(5, 8, device=device),), dynamic_shapes=({0: rows},))
    module = program.module()
    for n in (2, 7, 1024):
        x = normal(n, 8, device=device)
        torch.testing.assert_close(module(x), own(x), rtol=1e-3, atol=1e-5)
    for name, tensor in own.bn.named_buffers():
        torch.testing.assert_close(module.get_buffer(f"bn.{name}"), tensor, rtol=1e-4, atol=1e-6)


def test_parametrizations(device: str) -> None:
    ours, own = pair(device)
    for module in (ours, own):
        nn.utils.parametrizations.weight_norm(module.linear)
        nn.utils.parametrize.register_parametrization(module.bn, "weight", nn.Softplus())
    x = normal(5, 8, device=device)
    grads = []
    for module in (ours, own):
        out = module(x)
        grads.append([out, *torch.autograd.grad(out.square().sum(), list(module.linear.parameters()))])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_autocast(device: str) -> None:
    for scale, region in itertools.product(SCALES, HALVES):
        ours, own = pair(device, scale=scale)
        x = normal(5, 8, device=device)
        with torch.autocast(device, dtype=region):
            out, right = ours(x), own(x)
        assert out.dtype == right.dtype
        torch.testing.assert_close(out, right, rtol=0.0, atol=0.05)
        assert ours.bn.running_mean.dtype == torch.float32
        out.float().square().sum().backward()
        assert ours.linear.weight.grad.dtype == torch.float32
