"""What attention refuses, in which words, and the tensors to try it with: for the tests of errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention_ext._libraries import CUDA_PROBLEM

NAN = float("nan")
# Of fake tensors, which need no GPU.
FAKE_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(CUDA_PROBLEM is not None, reason=str(CUDA_PROBLEM)))]


def t(*shape: int, dtype: torch.dtype = torch.float32) -> tuple:
    """A tensor to be made later, on the device and under the mode of the test."""
    return shape, dtype


def build(spec: tuple | None, device: str) -> Tensor | None:
    return None if spec is None else torch.ones(spec[0], device=device).to(spec[1])


def refuses(argument: str, call: Callable[[], object], words: str | None = None) -> None:
    """The sentence names one of these arguments, what was expected and what came: the words behind "expected ", if given."""
    with pytest.raises(RuntimeError) as caught:
        call()
    text = str(caught.value)
    head, _, rest = text.partition(": expected ")
    assert head in {f"attention_ext: {name}" for name in argument.split("|")}, text
    assert ", got " in rest and rest.split(", got ")[0] and rest.split(", got ")[1], text
    assert "\n" not in text.strip() and "/" not in text, f"not a sentence for a person: {text}"
    assert words is None or rest == words, f"{rest}\nis not\n{words}"


Q, K, V = t(2, 4, 5, 8), t(2, 4, 7, 8), t(2, 4, 7, 6)
# argument that the text names, query, key, value, attn_mask, other arguments
REFUSED = {
    "rank 1 query": ("query", t(8), K, V, None, {}),
    "rank 1 key": ("key", Q, t(8), V, None, {}),
    "rank 1 value": ("value", Q, K, t(7), None, {}),
    "rank 0 query": ("query", t(), K, V, None, {}),
    "integer query": ("query", *(t(2, 4, 5, 8, dtype=torch.int64),) * 3, None, {}),
    "boolean query": ("query", *(t(2, 4, 5, 8, dtype=torch.bool),) * 3, None, {}),
    "complex query": ("query", *(t(2, 4, 5, 8, dtype=torch.complex64),) * 3, None, {}),
    "float8 query": ("query", *(t(2, 4, 5, 8, dtype=torch.float8_e4m3fn),) * 3, None, {}),
    "dtype of key": ("key", Q, t(2, 4, 7, 8, dtype=torch.float16), V, None, {}),
    "dtype of key float64": ("key", Q, t(2, 4, 7, 8, dtype=torch.float64), V, None, {}),
    "dtype of value": ("value", Q, K, t(2, 4, 7, 6, dtype=torch.bfloat16), None, {}),
    "head dim of key": ("key", Q, t(2, 4, 7, 9), V, None, {}),
    "head dim of key 1": ("key", Q, t(2, 4, 7, 1), V, None, {}),
    "length of value": ("value", Q, K, t(2, 4, 6, 6), None, {}),
    "length of value 1": ("value", Q, K, t(2, 4, 1, 6), None, {}),
    "batch of key": ("key", Q, t(3, 4, 7, 8), V, None, {}),
    "batch of value": ("value", Q, K, t(3, 4, 7, 6), None, {}),
    "batch 0 of key": ("key", Q, t(0, 4, 7, 8), t(0, 4, 7, 6), None, {}),
    "heads of key": ("key", Q, t(2, 2, 7, 8), t(2, 2, 7, 6), None, {}),
    "heads of value": ("value", Q, K, t(2, 2, 7, 6), None, {}),
    "no key heads": ("key", Q, t(2, 0, 7, 8), t(2, 0, 7, 6), None, {}),
    "heads of key rank 3": ("key", t(4, 5, 8), t(3, 7, 8), t(3, 7, 6), None, {}),
    "grouped heads of key": ("key", Q, t(2, 3, 7, 8), t(2, 3, 7, 6), None, {"enable_gqa": True}),
    "more key heads": ("key", Q, t(2, 8, 7, 8), t(2, 8, 7, 6), None, {"enable_gqa": True}),
    "grouped heads of value": ("value", Q, t(2, 2, 7, 8), t(2, 3, 7, 6), None, {"enable_gqa": True}),
    "no grouped key heads": ("key", Q, t(2, 0, 7, 8), t(2, 0, 7, 6), None, {"enable_gqa": True}),
    "no grouped value heads": ("value", Q, K, t(2, 0, 7, 6), None, {"enable_gqa": True}),
    "batch of grouped key": ("key", Q, t(3, 2, 7, 8), t(3, 2, 7, 6), None, {"enable_gqa": True}),
    "grouped rank 2": ("query|enable_gqa", t(5, 8), t(7, 8), t(7, 6), None, {"enable_gqa": True}),
    "grouped rank 2 key": ("key", Q, t(7, 8), t(7, 6), None, {"enable_gqa": True}),
    "rank 0 mask": ("attn_mask", Q, K, V, t(), {}),
    "rank 1 mask": ("attn_mask", Q, K, V, t(7), {}),
    "rank 1 bool mask": ("attn_mask", Q, K, V, t(7, dtype=torch.bool), {}),
    "rank 5 mask": ("attn_mask", Q, K, V, t(1, 2, 4, 5, 7), {}),
    "rank 3 mask at rank 2": ("attn_mask", t(5, 8), t(7, 8), t(7, 6), t(1, 5, 7), {}),
    "mask of length L": ("attn_mask", Q, K, V, t(6, 7), {}),
    "mask of length S": ("attn_mask", Q, K, V, t(5, 6), {}),
    "mask transposed": ("attn_mask", Q, K, V, t(7, 5, dtype=torch.bool), {}),
    "mask per batch at the heads": ("attn_mask", Q, K, V, t(2, 5, 7), {}),
    "mask of batch": ("attn_mask", Q, K, V, t(3, 1, 5, 7), {}),
    "mask of batch where q has 1": ("attn_mask", t(1, 4, 5, 8), t(1, 4, 7, 8), t(1, 4, 7, 6), t(2, 4, 5, 7), {}),
    "mask longer than one query": ("attn_mask", t(2, 4, 1, 8), K, V, t(5, 7), {}),
    "mask longer than one key": ("attn_mask", Q, t(2, 4, 1, 8), t(2, 4, 1, 6), t(5, 7), {}),
    "mask of no keys": ("attn_mask", Q, K, V, t(5, 0), {}),
    "mask of key heads": ("attn_mask", Q, t(2, 2, 7, 8), t(2, 2, 7, 6), t(2, 5, 7), {"enable_gqa": True}),
    **{f"{d} mask": ("attn_mask", Q, K, V, t(5, 7, dtype=d), {}) for d in (torch.int64, torch.int32, torch.uint8, torch.int8)},
    **{f"{d} mask": ("attn_mask", Q, K, V, t(5, 7, dtype=d), {}) for d in (torch.float16, torch.bfloat16, torch.float64)},
    "complex mask": ("attn_mask", Q, K, V, t(5, 7, dtype=torch.complex64), {}),
    "mask and causal": ("attn_mask", Q, K, V, t(5, 7), {"is_causal": True}),
    "bool mask and causal": ("attn_mask", Q, K, V, t(5, 7, dtype=torch.bool), {"is_causal": True}),
    "broadcast mask and causal": ("attn_mask", Q, K, V, t(1, 1, 1, 7), {"is_causal": True}),
    **{f"dropout {p}": ("dropout_p", Q, K, V, None, {"dropout_p": p}) for p in (-0.1, 1.1, NAN, float("inf"), -1e-9)},
}

LEADING = f"leading dimensions that broadcast with the query's shape {Q[0]}"
# case -> what stands after "attention_ext: ARGUMENT: expected ", whether the checks in Python say it or the CUDA kernels
WORDS: dict[str, str] = {
    "rank 1 query": "rank 2 or more, got shape (8,) of rank 1",
    "rank 1 key": "rank 2 or more, got shape (8,) of rank 1",
    "rank 1 value": "rank 2 or more, got shape (7,) of rank 1",
    "rank 0 query": "rank 2 or more, got shape () of rank 0",
    "integer query": "dtype float16, bfloat16, float32 or float64, got torch.int64",
    "boolean query": "dtype float16, bfloat16, float32 or float64, got torch.bool",
    "complex query": "dtype float16, bfloat16, float32 or float64, got torch.complex64",
    "float8 query": "dtype float16, bfloat16, float32 or float64, got torch.float8_e4m3fn",
    "dtype of key": "the query's dtype torch.float32, got torch.float16",
    "dtype of key float64": "the query's dtype torch.float32, got torch.float64",
    "dtype of value": "the query's dtype torch.float32, got torch.bfloat16",
    "head dim of key": "the query's head dim E = 8 as its last size, got shape (2, 4, 7, 9)",
    "head dim of key 1": "the query's head dim E = 8 as its last size, got shape (2, 4, 7, 1)",
    "length of value": "the key's length S = 7 as its second to last size, got shape (2, 4, 6, 6)",
    "length of value 1": "the key's length S = 7 as its second to last size, got shape (2, 4, 1, 6)",
    "batch of key": f"{LEADING}, got shape (3, 4, 7, 8)",
    "batch of value": f"{LEADING}, got shape (3, 4, 7, 6)",
    "batch 0 of key": f"{LEADING}, got shape (0, 4, 7, 8)",
    "heads of key": f"{LEADING}, or enable_gqa=True, got shape (2, 2, 7, 8)",
    "heads of value": f"{LEADING}, or enable_gqa=True, got shape (2, 2, 7, 6)",
    "no key heads": f"{LEADING}, got shape (2, 0, 7, 8)",
    "heads of key rank 3": "leading dimensions that broadcast with the query's shape (4, 5, 8), got shape (3, 7, 8)",
    "grouped heads of key": "a head count that divides the query's 4, got shape (2, 3, 7, 8)",
    "more key heads": "a head count that divides the query's 4, got shape (2, 8, 7, 8)",
    "grouped heads of value": "a head count that divides the query's 4, got shape (2, 3, 7, 6)",
    "no grouped key heads": "at least one head with enable_gqa, got shape (2, 0, 7, 8)",
    "no grouped value heads": "at least one head with enable_gqa, got shape (2, 0, 7, 6)",
    "batch of grouped key": f"{LEADING}, got shape (3, 2, 7, 8)",
    "grouped rank 2": "rank 3 or more with enable_gqa, got shape (5, 8) of rank 2",
    "grouped rank 2 key": "rank 3 or more with enable_gqa, got shape (7, 8) of rank 2",
    "rank 0 mask": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape ()",
    "rank 1 mask": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (7,)",
    "rank 1 bool mask": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (7,)",
    "rank 5 mask": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (1, 2, 4, 5, 7)",
    "rank 3 mask at rank 2": "a shape of rank 2 or more that broadcasts to (5, 7), got shape (1, 5, 7)",
    "mask of length L": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (6, 7)",
    "mask of length S": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (5, 6)",
    "mask transposed": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (7, 5)",
    "mask per batch at the heads": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (2, 5, 7)",
    "mask of batch": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (3, 1, 5, 7)",
    "mask of batch where q has 1": "a shape of rank 2 or more that broadcasts to (1, 4, 5, 7), got shape (2, 4, 5, 7)",
    "mask longer than one query": "a shape of rank 2 or more that broadcasts to (2, 4, 1, 7), got shape (5, 7)",
    "mask longer than one key": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 1), got shape (5, 7)",
    "mask of no keys": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (5, 0)",
    "mask of key heads": "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (2, 5, 7)",
    "torch.int64 mask": "dtype bool, float32 or the query's torch.float32, got torch.int64",
    "torch.int32 mask": "dtype bool, float32 or the query's torch.float32, got torch.int32",
    "torch.uint8 mask": "dtype bool, float32 or the query's torch.float32, got torch.uint8",
    "torch.int8 mask": "dtype bool, float32 or the query's torch.float32, got torch.int8",
    "torch.float16 mask": "dtype bool, float32 or the query's torch.float32, got torch.float16",
    "torch.bfloat16 mask": "dtype bool, float32 or the query's torch.float32, got torch.bfloat16",
    "torch.float64 mask": "dtype bool, float32 or the query's torch.float32, got torch.float64",
    "complex mask": "dtype bool, float32 or the query's torch.float32, got torch.complex64",
    "mask and causal": "None together with is_causal=True, got a mask of shape (5, 7)",
    "bool mask and causal": "None together with is_causal=True, got a mask of shape (5, 7)",
    "broadcast mask and causal": "None together with is_causal=True, got a mask of shape (1, 1, 1, 7)",
    "dropout -0.1": "a probability in [0, 1], got -0.1",
    "dropout 1.1": "a probability in [0, 1], got 1.1",
    "dropout nan": "a probability in [0, 1], got nan",
    "dropout inf": "a probability in [0, 1], got inf",
    "dropout -1e-09": "a probability in [0, 1], got -1e-09",
}
