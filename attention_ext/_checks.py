"""What the operators accept: every refusal names the argument, what was expected and what came.

Sizes are compared through torch._check, so that symbolic shapes stay symbolic; all refusals are RuntimeError, as PyTorch's
own operator raises, and the fake kernels call the same functions.
"""

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._libraries import check_cuda_library

__all__ = [
    "attention_shape",
    "check_attention",
    "check_dense",
    "check_heads",
    "check_key_lengths",
    "check_operand",
    "check_seed",
    "check_shape",
    "has_meaning_of_its_own",
    "message",
    "refuse",
    "shape_of",
    "surely",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEFAULT: Any = Tensor.__torch_function__
_OF_DATA = (_DEFAULT.__func__, torch._C._disabled_torch_function_impl)  # of classes that are what their data is


def message(argument: str, expected: str, got: str) -> str:
    return f"attention_ext: {argument}: expected {expected}, got {got}"


def surely(condition: bool | torch.SymBool) -> bool:
    """A comparison of sizes or strides; False for a symbolic one that cannot be decided without a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy: 0.3 s that eager calls never need

    decided: bool = guard_or_false(condition)
    return decided


def refuse(argument: str, expected: str, got: object) -> NoReturn:
    raise RuntimeError(message(argument, expected, str(got)))


def shape_of(tensor: Tensor) -> str:
    return f"shape ({', '.join(str(size) for size in tensor.shape)})"


def has_meaning_of_its_own(tensor: Tensor) -> bool:
    """Whether a tensor's class may mean something else than its data: it overrides how functions treat it."""
    if type(tensor) is Tensor:
        return False
    function = type(tensor).__torch_function__
    return getattr(function, "__func__", function) not in _OF_DATA


def check_dense(name: str, tensor: Tensor | None) -> Tensor:
    """Refuses None and what is no array of strides."""
    if tensor is None:
        refuse(name, "a tensor", None)
    if type(tensor).__module__ == "torch.nn.attention.bias":
        refuse(name, "a tensor of numbers", f"a {type(tensor).__name__} of torch.nn.attention.bias")
    if tensor.is_nested or tensor.layout is not torch.strided:
        refuse(name, "a dense (strided) tensor", "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}")
    return tensor


def check_operand(name: str, tensor: Tensor | None, first: Tensor, min_rank: int, of: str = "query's") -> None:
    """Refuses an operand that does not go with the first one, whose name in the genitive is `of`."""
    tensor = check_dense(name, tensor)
    if tensor.dtype not in _DTYPES:
        refuse(name, "dtype float16, bfloat16, float32 or float64", tensor.dtype)
    if tensor.dtype != first.dtype:
        refuse(name, f"the {of} dtype {first.dtype}", tensor.dtype)
    if tensor.device != first.device:
        refuse(name, f"the {of} device {first.device}", tensor.device)
    if tensor.dim() < min_rank:
        gqa = " with enable_gqa" if min_rank == 3 else ""
        refuse(name, f"rank {min_rank} or more{gqa}", f"{shape_of(tensor)} of rank {tensor.dim()}")


def check_heads(name: str, tensor: Tensor, first: Tensor, of: str = "query's") -> None:
    """Refuses a head count that does not divide the first operand's."""
    heads, q_heads = tensor.size(-3), first.size(-3)
    torch._check(heads != 0, lambda: message(name, "at least one head with enable_gqa", "0 heads"))
    torch._check(
        q_heads % heads == 0,
        lambda: message(name, f"a head count that divides the {of} {q_heads}", f"{heads} heads"),
    )


def _same(left: torch.Size, right: torch.Size) -> bool:
    return len(left) == len(right) and all(surely(x == y) for x, y in zip(left, right, strict=True))


def attention_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> list[int]:
    """(..., Hq, L, S): the shape of the scores, with the leading dims of the three operands broadcast."""
    tail = 3 if enable_gqa else 2
    shape = query.shape
    leading, k_leading, v_leading = shape[:-tail], key.shape[:-tail], value.shape[:-tail]
    if not (_same(leading, k_leading) and _same(leading, v_leading)):
        for name, tensor, other in (("key", key, k_leading), ("value", value, v_leading)):
            try:
                leading = torch.broadcast_shapes(leading, other)
            except (RuntimeError, ValueError):
                refuse(name, f"leading dimensions that broadcast with the query's {shape_of(query)}", shape_of(tensor))
    return [*leading, *shape[-tail:-1], key.shape[-2]]


def _check_mask(mask: Tensor, query: Tensor, scores: list[int], is_causal: bool) -> None:
    check_dense("attn_mask", mask)
    if has_meaning_of_its_own(mask):
        refuse("attn_mask", "a plain tensor", f"a {type(mask).__name__}")
    if is_causal:
        refuse("attn_mask", "None together with is_causal=True", f"a mask of {shape_of(mask)}")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        refuse("attn_mask", f"dtype bool, float32 or the query's {query.dtype}", mask.dtype)
    if mask.device != query.device:
        refuse("attn_mask", f"the query's device {query.device}", mask.device)
    want = f"a shape of rank 2 or more that broadcasts to ({', '.join(str(size) for size in scores)})"
    if not 2 <= mask.dim() <= len(scores):
        refuse("attn_mask", want, shape_of(mask))
    for size, target in zip(reversed(mask.shape), reversed(scores), strict=False):
        if not surely(size == 1):
            torch._check(size == target, lambda: message("attn_mask", want, shape_of(mask)))


def check_seed(query: Tensor, seed: Tensor | None, dropout_p: float) -> None:
    """The seed of sdpa_forward and sdpa_backward: a 1-element int64 tensor on the query's device wherever dropout is on."""
    if dropout_p > 0.0 and seed is None:
        refuse("seed", f"a 1-element int64 tensor for dropout_p = {dropout_p}", None)
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != query.device):
        refuse("seed", f"a 1-element int64 tensor on {query.device}", f"{seed.dtype}, {shape_of(seed)} on {seed.device}")


def check_key_lengths(query: Tensor, key_lengths: Tensor | None, scores: list[int]) -> None:
    """How many keys each batch row has: contiguous int32 (B,), B the product of the dims before the heads of (..., Hq, L, S)."""
    if key_lengths is not None:
        check_shape("key_lengths", key_lengths, [math.prod(scores[:-3])], torch.int32, query.device)
        if not key_lengths.is_contiguous():
            refuse("key_lengths", "a contiguous tensor", f"stride {key_lengths.stride(0)}")


def check_shape(name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """Refuses a tensor that is not of just this shape, dtype and device."""
    check_dense(name, tensor)
    want = f"shape ({', '.join(str(size) for size in shape)}), {dtype} on {device}"
    same = tensor.dim() == len(shape) and tensor.dtype == dtype and tensor.device == device
    if not same:
        refuse(name, want, f"{shape_of(tensor)}, {tensor.dtype} on {tensor.device}")
    for size, target in zip(tensor.shape, shape, strict=True):
        if not surely(size == target):
            torch._check(size == target, lambda: message(name, want, shape_of(tensor)))


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> list[int]:
    """Refuses what scaled dot-product attention is not defined for; returns the shape of the scores (..., Hq, L, S)."""
    min_rank = 3 if enable_gqa else 2
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_operand(name, tensor, query, min_rank)
    check_cuda_library(query.device)
    torch._check(
        key.size(-1) == query.size(-1),
        lambda: message("key", f"the query's head dim E = {query.size(-1)} as its last size", shape_of(key)),
    )
    torch._check(
        value.size(-2) == key.size(-2),
        lambda: message("value", f"the key's length S = {key.size(-2)} as its second to last size", shape_of(value)),
    )
    if enable_gqa:
        check_heads("key", key, query)
        check_heads("value", value, query)
    scores = attention_shape(query, key, value, enable_gqa)
    if attn_mask is not None:
        _check_mask(attn_mask, query, scores, is_causal)
    if not 0.0 <= dropout_p <= 1.0:
        refuse("dropout_p", "a probability in [0, 1]", dropout_p)
    return scores
