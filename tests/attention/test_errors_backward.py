"""What sdpa_backward refuses, real and fake, in the words of the checks in Python and of the CUDA kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from helpers import sdpa_backward
from refusals import FAKE_DEVICES, build, refuses, t
from torch._subclasses.fake_tensor import FakeTensorMode

GRAD = "shape (1, 2, 4, 8), torch.float32 on {device}, got shape "
ROWS = "shape (1, 2, 4), torch.float32 on {device}, got shape "
# what differs from a call that is taken; the words of the checks in Python; those of the CUDA kernel
BACKWARD = {
    "grad_out": ({"grad_out": t(1, 1, 4, 8)}, GRAD + "(1, 1, 4, 8)", "shape (1, 2, 4, 8), got (1, 1, 4, 8)"),
    "out": ({"out": t(1, 2, 4, 3)}, GRAD + "(1, 2, 4, 3)", "shape (1, 2, 4, 8), got (1, 2, 4, 3)"),
    "lse": ({"lse": t(1, 2, 3)}, ROWS + "(1, 2, 3)", "shape (1, 2, 4), got (1, 2, 3)"),
    "grad_lse": ({"grad_lse": t(1, 2, 3)}, ROWS + "(1, 2, 3)", "shape (1, 2, 4), got (1, 2, 3)"),
    "seed": (
        {"dropout_p": 0.5},
        "a 1-element int64 tensor for dropout_p = 0.5, got None",
        "a tensor when dropout_p is not 0, got None",
    ),
    "mask_grad": ({"mask_grad": True}, *("False where attn_mask is None or of dtype bool, got True",) * 2),
    "attn_mask": (
        {"attn_mask": t(4, 4), "is_causal": True},
        "None together with is_causal=True, got a mask of shape (4, 4)",
        "None with is_causal, got a mask",
    ),
    "key": (
        {"key": t(1, 2, 4, 9)},
        "the query's head dim E = 8 as its last size, got shape (1, 2, 4, 9)",
        "head dim 8 as the query has, got 9",
    ),
    "value": (
        {"value": t(1, 2, 5, 8)},
        "the key's length S = 4 as its second to last size, got shape (1, 2, 5, 8)",
        "4 rows as the key has, got 5",
    ),
    "query": (
        {"query": t(1, 2, 4, 8, dtype=torch.int64)},
        "dtype float16, bfloat16, float32 or float64, got torch.int64",
        "dtype float16, bfloat16, float32 or float64, got int64",
    ),
    "grad_out of another dtype|grad_out": (
        {"grad_out": t(1, 2, 4, 8, dtype=torch.float64)},
        GRAD + "(1, 2, 4, 8), torch.float64 on {device}",
        "dtype float32, got float64",
    ),
    "lse of another dtype|lse": (
        {"lse": t(1, 2, 4, dtype=torch.float64)},
        ROWS + "(1, 2, 4), torch.float64 on {device}",
        "dtype float32, got float64",
    ),
    "grad_lse of another dtype|grad_lse": (
        {"grad_lse": t(1, 2, 4, dtype=torch.float16)},
        ROWS + "(1, 2, 4), torch.float16 on {device}",
        "dtype float32, got float16",
    ),
    "dropout_p": ({"dropout_p": 1.5}, "a probability in [0, 1], got 1.5", "a number from 0 to 1, got 1.500000"),
    "no grad_out|grad_out": ({"grad_out": None}, "a tensor, got None", None),
    "no out|out": ({"out": None}, "a tensor, got None", None),
}


def backward_refuses(mode: AbstractContextManager, device: str, argument: str, by_kernel: bool = False) -> None:
    specs = dict.fromkeys(("grad_out", "query", "key", "value", "out"), t(1, 2, 4, 8))
    specs |= {"grad_lse": None, "attn_mask": None, "lse": t(1, 2, 4), "seed": None, "dropout_p": 0.0, "is_causal": False}
    changes, words, of_the_kernel = BACKWARD[argument]
    with mode:
        right = {n: build(s, device) if s is None or isinstance(s, tuple) else s for n, s in specs.items()}
        wrong = {n: build(s, device) if isinstance(s, tuple) else s for n, s in changes.items()}
        assert len(sdpa_backward(**right)) == 4
        words = f"{of_the_kernel} (sdpa_backward)" if by_kernel else words.format(device=right["query"].device)
        refuses(argument.split("|")[-1], lambda: sdpa_backward(**(right | wrong)), words)


@pytest.mark.parametrize("argument", BACKWARD)
def test_backward_refuses_what_does_not_fit(device: str, argument: str) -> None:
    backward_refuses(nullcontext(), device, argument)


@pytest.mark.parametrize("device", FAKE_DEVICES)
@pytest.mark.parametrize("argument", BACKWARD)
def test_backward_of_fake_tensors_refuses_what_does_not_fit(device: str, argument: str) -> None:
    backward_refuses(FakeTensorMode(), device, argument)


@pytest.mark.gpu
@pytest.mark.parametrize("argument", [name for name, (_, _, words) in BACKWARD.items() if words])
def test_backward_in_inference_mode_refuses_what_does_not_fit(argument: str) -> None:
    backward_refuses(torch.inference_mode(), "cuda", argument, by_kernel=True)
