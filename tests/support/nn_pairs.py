"""attention_ext.nn.LinearBatchNormSoftmax beside PyTorch's chain of the same three modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from attention_ext.nn import LinearBatchNormSoftmax

SWITCHES = {
    "default": {},
    "no affine": {"affine": False},
    "cumulative average": {"momentum": None},
    "momentum 0.9": {"momentum": 0.9},
    "momentum 1": {"momentum": 1.0},
    "no statistics": {"track_running_stats": False},
    "nothing": {"affine": False, "track_running_stats": False},
    "eps": {"eps": 1e-1},
}
switches = pytest.mark.parametrize("switch", SWITCHES)
SCALES = {
    "parameter": lambda: nn.Parameter(torch.tensor([0.7])),
    "per feature": lambda: nn.Parameter(torch.linspace(-2, 2, 6)),
    "tensor": lambda: torch.tensor(-1.5),
    "number": lambda: 2,
}


class Chain(nn.Module):
    """PyTorch's own."""

    def __init__(self, linear: nn.Linear, bn: nn.BatchNorm1d, scale: Tensor | float) -> None:
        super().__init__()
        self.linear, self.bn, self.scale = linear, bn, scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.scale * self.bn(self.linear(x)), 1)


def pair(device: str = "cpu", switch: str = "default", scale: str = "parameter", bias: bool = True) -> tuple[nn.Module, nn.Module]:
    """Ours and PyTorch's chain over copies of the same three."""
    linear, bn, factor = nn.Linear(8, 6, bias=bias), nn.BatchNorm1d(6, **SWITCHES[switch]), SCALES[scale]()
    for tensor in (bn.weight, bn.bias):
        if tensor is not None:
            nn.init.normal_(tensor)
    own = Chain(*copy.deepcopy((linear, bn, factor)))
    if isinstance(own.scale, Tensor):
        own.scale.data = own.scale.data.to(device)
    return LinearBatchNormSoftmax(linear, bn, factor).to(device), own.to(device)


def check_buffers(ours: nn.Module, own: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    mine, right = ours.bn.state_dict(), own.bn.state_dict()
    assert list(mine) == list(right)
    for name, tensor in right.items():
        assert mine[name].dtype == tensor.dtype
        torch.testing.assert_close(mine[name], tensor, rtol=rtol, atol=atol, msg=name)
