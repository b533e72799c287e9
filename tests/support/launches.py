"""What a call launches on the GPU, as PyTorch's profiler sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def launches(call: Callable[[], object]) -> list[str]:
    """The names of the kernels that a call launches, in their order."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
