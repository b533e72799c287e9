#!/usr/bin/env python3
"""What scripts/make_routes.py decides by: own kernels beside each of PyTorch's back ends. JSON on stdout, progress on stderr.

    python bench/backends.py > bench/results/backends_<card>.json

The everyday calls in half precision with head dims up to 256, where PyTorch has fast back ends: the forward alone, replayed by a
CUDA graph so that the host's time is no part of it, and forward and backward together as they are queued. Ours is sdpa without any
route to PyTorch.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import DEVICE, attempt, first_line, in_turns, log
from everyday import EVERYDAY, OPERATORS, Everyday
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_ext._torch_private import chosen_by_torch
from attention_ext.attention import choice as routing

BACK_ENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WIDEST = 256
GRAPH_CALLS = 8


def operators(call: Everyday, operands: list[torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
    """Who: the call."""
    options = call.case.options(str(DEVICE))

    def by(back_end: SDPBackend | None) -> torch.Tensor:
        if back_end is None:
            return F.scaled_dot_product_attention(*operands, **options)
        with sdpa_kernel(back_end):
            return F.scaled_dot_product_attention(*operands, **options)

    ours = partial(OPERATORS["ours"], *operands, **options)
    return {"ours": ours, "torch": partial(by, None), **{name: partial(by, own) for name, own in BACK_ENDS.items()}}


def replayed(call: Callable[[], Any]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    return graph.replay


def measured(calls: dict[str, Callable[[], Any]], ready: Callable[[Callable[[], Any]], Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds, by who; without those that do not take the call."""
    usable = {}
    for who, own in calls.items():
        try:
            own()
            usable[who] = ready(own)
            usable[who]()
            torch.cuda.synchronize()
        except RuntimeError as error:
            log(f"    {who}: {first_line(error)}")
            usable.pop(who, None)
    return in_turns(usable)


def row(call: Everyday) -> dict[str, Any]:
    case, operands = call.case, list(call.case.inputs(str(DEVICE)))
    mask = case.options(str(DEVICE))["attn_mask"]
    default = chosen_by_torch(*operands, mask, 0.0, case.causal, enable_gqa=case.Hk != case.Hq)
    with torch.no_grad():
        forward = measured(operators(call, operands), replayed)
    found: dict[str, Any] = {"name": call.name, "default": default}
    found["forward"] = {who: ms / GRAPH_CALLS for who, ms in forward.items()}
    if call.backward:
        for tensor in operands:
            tensor.requires_grad_()
        calls = operators(call, operands)
        grad = torch.randn_like(calls["ours"]())
        both = {who: (lambda own=own: torch.autograd.grad(own(), operands, grad)) for who, own in calls.items()}
        found["both"] = measured(both, lambda own: own)
    return found


def main() -> int:
    rows = []
    routing.ROUTES = {torch.cuda.get_device_capability(DEVICE): {}}
    for call in EVERYDAY:
        case = call.case
        if max(case.E, case.Ev) > WIDEST or case.dtype == torch.float32 or call.biasgrad:
            continue
        rows.append(attempt(lambda call=call: row(call)))
        log(f"{call.name:36} {rows[-1]}")
    record = {
        "card": torch.cuda.get_device_name(DEVICE),
        "capability": list(torch.cuda.get_device_capability(DEVICE)),
        "torch": torch.__version__.partition("+")[0],
        "cudnn": "{}.{}".format(*divmod(torch.backends.cudnn.version() // 100, 100)),
        "unit": "ms",
        "rows": [row for row in rows if "name" in row],
    }
    json.dump(record, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
