"""KernelBench level 2 problem 84, linear + batch norm + scale + softmax, as a ModelNew: inputs, interface and state of its Model.

    python examples/kernelbench/level2_problem84.py

The benchmark's harness never calls eval(): what it judges is the training mode, with the batch's statistics.
"""

import copy

import torch
import torch.nn as nn

from attention_ext.nn import LinearBatchNormSoftmax

batch_size = 1024
in_features = 8192
out_features = 8192
bn_eps = 1e-5
bn_momentum = 0.1
scale_shape = (1,)


class ModelNew(nn.Module):
    """(batch, in_features) -> (batch, out_features): softmax(scale * bn(gemm(x)), 1)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bn_eps: float = 1e-5,
        bn_momentum: float = 0.1,
        scale_shape: tuple[int, ...] = (1,),
    ) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, eps=bn_eps, momentum=bn_momentum)
        self.scale = nn.Parameter(torch.ones(scale_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Made anew: no part of the state, and the three are what they are at this call.
        return LinearBatchNormSoftmax(self.gemm, self.bn, self.scale)(x)


def get_inputs(device: str | None = None) -> list[torch.Tensor]:
    """Uniform in [0, 1), as the benchmark draws them; on a CPU a batch of 64."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return [torch.rand(batch_size if device == "cuda" else 64, in_features, device=device)]


def get_init_inputs() -> list[object]:
    return [in_features, out_features, bn_eps, bn_momentum, scale_shape]


if __name__ == "__main__":
    (x,) = get_inputs()
    model = ModelNew(*get_init_inputs()).to(x.device)
    own = copy.deepcopy(model)
    with torch.no_grad():
        out = model(x)
        want = torch.softmax(own.scale * own.bn(own.gemm(x)), 1)
    off = max((a - b).abs().max().item() for a, b in zip(model.bn.buffers(), own.bn.buffers(), strict=True))
    print(f"training mode, {tuple(x.shape)} on {x.device}: largest output {want.max().item():.2e}")
    print(f"largest difference from PyTorch's: {(out - want).abs().max().item():.2e}, of the running statistics {off:.2e}")
