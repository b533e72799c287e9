"""What sdpa_backward refuses, real and fake: the same words from the checks in Python and from the CUDA kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from helpers import sdpa_backward
from refusals import FAKE_DEVICES, build, refuses, t
from torch._subclasses.fake_tensor import FakeTensorMode

ROWS, GRAD = (f"shape {shape}, torch.float32 on {{device}}, got shape " for shape in ((1, 2, 4), (1, 2, 4, 8)))
SAME = ", torch.float32 on {device}"
# what differs from a call that is taken; the words
BACKWARD = {
    "grad_out": ({"grad_out": t(1, 1, 4, 8)}, GRAD + "(1, 1, 4, 8)" + SAME),
    "out": ({"out": t(1, 2, 4, 3)}, GRAD + "(1, 2, 4, 3)" + SAME),
    "lse": ({"lse": t(1, 2, 3)}, ROWS + "(1, 2, 3)" + SAME),
    "grad_lse": ({"grad_lse": t(1, 2, 3)}, ROWS + "(1, 2, 3)" + SAME),
    "rank of lse|lse": ({"lse": t(2, 4)}, ROWS + "(2, 4)" + SAME),
    "batch of query|query": ({"key": t(3, 2, 4, 8)}, "shape (3, 2, 4, 8)" + SAME + ", got shape (1, 2, 4, 8)" + SAME),
    "batch of key|key": ({"key": t(2, 4, 8)}, GRAD + "(2, 4, 8)" + SAME),
    "heads of value|value": ({"value": t(1, 1, 4, 8)}, GRAD + "(1, 1, 4, 8)" + SAME),
    "seed": ({"dropout_p": 0.5}, "a 1-element int64 tensor for dropout_p = 0.5, got None"),
    "mask_grad": ({"mask_grad": True}, "False where attn_mask is None or of dtype bool, got True"),
    "attn_mask": (
        {"attn_mask": t(4, 4), "is_causal": True},
        "None together with is_causal=True, got a mask of shape (4, 4)",
    ),
    "key": ({"key": t(1, 2, 4, 9)}, "the query's head dim E = 8 as its last size, got shape (1, 2, 4, 9)"),
    "value": ({"value": t(1, 2, 5, 8)}, "the key's length S = 4 as its second to last size, got shape (1, 2, 5, 8)"),
    "query": (
        {"query": t(1, 2, 4, 8, dtype=torch.int64)},
        "dtype float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "grad_out of another dtype|grad_out": (
        {"grad_out": t(1, 2, 4, 8, dtype=torch.float64)},
        GRAD + "(1, 2, 4, 8), torch.float64 on {device}",
    ),
    "lse of another dtype|lse": ({"lse": t(1, 2, 4, dtype=torch.float64)}, ROWS + "(1, 2, 4), torch.float64 on {device}"),
    "grad_lse of another dtype|grad_lse": (
        {"grad_lse": t(1, 2, 4, dtype=torch.float16)},
        ROWS + "(1, 2, 4), torch.float16 on {device}",
    ),
    "dropout_p": ({"dropout_p": 1.5}, "a probability in [0, 1], got 1.5"),
    "no grad_out|grad_out": ({"grad_out": None}, "a tensor, got None"),
    "no out|out": ({"out": None}, "a tensor, got None"),
}


def backward_refuses(mode: AbstractContextManager, device: str, argument: str) -> None:
    specs = dict.fromkeys(("grad_out", "query", "key", "value", "out"), t(1, 2, 4, 8))
    specs |= {"grad_lse": None, "attn_mask": None, "lse": t(1, 2, 4), "seed": None, "dropout_p": 0.0, "is_causal": False}
    changes, words = BACKWARD[argument]
    with mode:
        right = {n: build(s, device) if s is None or isinstance(s, tuple) else s for n, s in specs.items()}
        wrong = {n: build(s, device) if isinstance(s, tuple) else s for n, s in changes.items()}
        assert len(sdpa_backward(**right)) == 4
        refuses(argument.split("|")[-1], lambda: sdpa_backward(**(right | wrong)), words.format(device=right["query"].device))


@pytest.mark.parametrize("argument", BACKWARD)
def test_backward_refuses_what_does_not_fit(device: str, argument: str) -> None:
    backward_refuses(nullcontext(), device, argument)


@pytest.mark.parametrize("device", FAKE_DEVICES)
@pytest.mark.parametrize("argument", BACKWARD)
def test_backward_of_fake_tensors_refuses_what_does_not_fit(device: str, argument: str) -> None:
    backward_refuses(FakeTensorMode(), device, argument)


@pytest.mark.parametrize("argument", BACKWARD)
def test_backward_in_inference_mode_refuses_what_does_not_fit(device: str, argument: str) -> None:
    """There the kernels check for themselves; None for a tensor is refused before it reaches those on CUDA."""
    if device == "cuda" and argument.startswith("no "):
        pytest.skip("PyTorch's own error")
    backward_refuses(torch.inference_mode(), device, argument)
