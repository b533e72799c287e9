"""Memory that torch's allocator has given out at the peak of a call: at long sequences, and of a forward and its backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from common import DEVICE, at_peak, attempt, extra_memory, log, own_kernels
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["PEAKS", "long_sequences", "peaks"]

OPS = torch.ops.attention_ext
PEAKS = ("g512",)  # cases whose peaks are measured


def peaks(case: Case) -> dict[str, dict[str, Any]]:
    """Bytes at the peak of a forward that keeps what its gradient needs, and of the backward after it, operands, result and
    gradients included: ours next to PyTorch's memory-efficient operator."""

    def efficient(*operands: Tensor, **options: Any) -> Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            return F.scaled_dot_product_attention(*operands, **options)

    operators = {"attention_ext": OPS.sdpa, "torch_efficient": efficient}
    found = {name: attempt(partial(both_ways, case, operator)) for name, operator in operators.items()}
    log(f"{case.name} peaks: {found}")
    return found


def both_ways(case: Case, operator: Callable[..., Tensor]) -> dict[str, int]:
    before = torch.cuda.memory_allocated()
    leaves = [t.requires_grad_() for t in case.inputs(str(DEVICE))]
    options = case.options(str(DEVICE))
    operands = torch.cuda.memory_allocated() - before
    forward, out = at_peak(lambda: operator(*leaves, **options))
    kept = torch.cuda.memory_allocated() - before
    backward, _ = at_peak(lambda: torch.autograd.grad(out, leaves, torch.ones_like(out)))
    return {"forward_bytes": operands + forward, "backward_bytes": kept + backward}


def long_sequences() -> dict[str, Any]:
    """Extra memory at S = 100,000, forward and backward."""
    out = {}
    for E in (64, 512, 1024):
        q = torch.randn(1, 1, 100_000, E, device=DEVICE, dtype=torch.bfloat16)
        k, v = torch.randn_like(q), torch.randn_like(q)
        case = Case("", 1, 1, 1, 100_000, 100_000, E, torch.bfloat16)
        forward = extra_memory(own_kernels(case, q, k, v))
        pipeline = extra_memory(own_kernels(case, q, k, v, kernel_name="pipeline"))
        result, lse = OPS.sdpa_forward(q, k, v, None, None, 0.0, False)
        taken, grads = at_peak(partial(OPS.sdpa_backward, result, None, q, k, v, None, result, lse, None, 0.0, False))
        extra = taken - sum(grad.nbytes for grad in grads)
        out[f"E={E}"] = {
            "forward_extra_bytes": forward,
            "pipeline_forward_extra_bytes": pipeline,
            "backward_extra_bytes": extra,
        }
        log(f"S = 100000, E = {E}: extra MiB {', '.join(f'{name} {b / 2**20:.1f}' for name, b in out[f'E={E}'].items())}")
    return out
