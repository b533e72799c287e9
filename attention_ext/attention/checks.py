"""What attention accepts. All refusals are RuntimeError, as PyTorch's own operator raises."""

import math
from typing import Any

import torch
from torch import Tensor

from .._checks import DTYPES, accumulator, check_dense, check_shape, refuse, refuse_unless, shape_of, surely, text
from .._libraries import check_cuda_library
from .._torch_private import plain_torch_function
from .call import AttentionCall
from .layout import empty_grads, empty_results
from .limits import check_kernel_name, check_limits

__all__ = [
    "attention_shape",
    "check_attention",
    "check_backward",
    "check_forward",
    "check_heads",
    "check_operand",
    "has_meaning_of_its_own",
    "overrides_functions",
]

_DEFAULT: Any = Tensor.__torch_function__
_OF_DATA = (_DEFAULT.__func__, plain_torch_function)  # of classes that are what their data is


def has_meaning_of_its_own(tensor: Tensor) -> bool:
    """Whether a tensor's class may mean something else than its data: it overrides how functions treat it."""
    return type(tensor) is not Tensor and overrides_functions(type(tensor))


def overrides_functions(kind: type) -> bool:
    function = kind.__torch_function__  # type: ignore[attr-defined]
    return getattr(function, "__func__", function) not in _OF_DATA


def check_operand(name: str, tensor: Tensor | None, first: Tensor, min_rank: int, of: str = "query's") -> None:
    """Refuses an operand that does not go with the first one, whose name in the genitive is `of`."""
    tensor = check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
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
    heads, whole = tensor.size(-3), first.size(-3)
    if not surely(heads != 0):
        refuse_unless(heads != 0, name, "at least one head with enable_gqa", tensor)
    if not surely(whole % heads == 0):
        refuse_unless(whole % heads == 0, name, f"a head count that divides the {of} {whole}", tensor)


def _same(left: torch.Size, right: torch.Size) -> bool:
    return len(left) == len(right) and all(surely(x == y) for x, y in zip(left, right, strict=True))


def _are_grouped(leading: torch.Size, own: torch.Size) -> bool:
    """Whether heads that do not broadcast are those of a grouped call, with enable_gqa: fewer than the whole, and a divisor."""
    whole, heads = (dims[-1] if len(dims) else 1 for dims in (leading, own))
    return surely(heads > 1) and surely(heads < whole) and surely(whole % heads == 0)


def attention_shape(call: AttentionCall) -> tuple[int, ...]:
    """(..., Hq, L, S): the sizes of the scores, with the leading dims of the three operands broadcast."""
    tail = 3 if call.enable_gqa else 2
    shape = call.query.shape
    leading, k_leading, v_leading = shape[:-tail], call.key.shape[:-tail], call.value.shape[:-tail]
    if not (_same(leading, k_leading) and _same(leading, v_leading)):
        for name, tensor, other in (("key", call.key, k_leading), ("value", call.value, v_leading)):
            try:
                leading = torch.broadcast_shapes(leading, other)
            except (RuntimeError, ValueError):
                hint = ", or enable_gqa=True" if tail == 2 and _are_grouped(leading, other) else ""
                refuse(name, f"leading dimensions that broadcast with the query's {shape_of(call.query)}{hint}", shape_of(tensor))
    return (*leading, *shape[-tail:-1], call.key.shape[-2])


def _check_mask(mask: Tensor, query: Tensor, is_causal: bool, scores: tuple[int, ...]) -> None:
    check_dense("attn_mask", mask)
    if has_meaning_of_its_own(mask):
        refuse("attn_mask", "a plain tensor", f"a {type(mask).__name__}")
    if is_causal:
        refuse("attn_mask", "None together with is_causal=True", f"a mask of {shape_of(mask)}")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        refuse("attn_mask", f"dtype bool, float32 or the query's {query.dtype}", mask.dtype)
    if mask.device != query.device:
        refuse("attn_mask", f"the query's device {query.device}", mask.device)
    if 2 <= mask.dim() <= len(scores):
        fits = [surely(size == 1) or size == target for size, target in zip(reversed(mask.shape), reversed(scores), strict=False)]
    else:
        fits = [False]
    if not all(map(surely, fits)):
        for fit in fits:
            refuse_unless(fit, "attn_mask", f"a shape of rank 2 or more that broadcasts to {text(scores)}", mask)


def check_attention(call: AttentionCall) -> AttentionCall:
    """Refuses what scaled dot-product attention is not defined for; returns the call with the sizes of its scores."""
    query, key, value = call[:3]
    min_rank = 3 if call.enable_gqa else 2
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_operand(name, tensor, query, min_rank)
    check_cuda_library(query.device)
    E, S = query.size(-1), key.size(-2)
    if not surely(key.size(-1) == E):
        refuse_unless(key.size(-1) == E, "key", f"the query's head dim E = {E} as its last size", key)
    if not surely(value.size(-2) == S):
        refuse_unless(value.size(-2) == S, "value", f"the key's length S = {S} as its second to last size", value)
    if call.enable_gqa:
        check_heads("key", key, query)
        check_heads("value", value, query)
    scores = attention_shape(call)
    if call.attn_mask is not None:
        _check_mask(call.attn_mask, query, call.is_causal, scores)
    if not 0.0 <= call.dropout_p <= 1.0:
        refuse("dropout_p", "a probability in [0, 1]", call.dropout_p)
    return call.with_scores(scores)


def _check_seed(call: AttentionCall) -> None:
    """A 1-element int64 tensor on the query's device wherever dropout is on."""
    seed, device = call.seed, call.query.device
    if call.dropout_p > 0.0 and seed is None:
        refuse("seed", f"a 1-element int64 tensor for dropout_p = {call.dropout_p}", None)
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device):
        refuse("seed", f"a 1-element int64 tensor on {device}", f"{shape_of(seed)}, {seed.dtype} on {seed.device}")


def _check_key_lengths(call: AttentionCall) -> None:
    """Contiguous int32 (B,), B the product of the dims before the heads: how many keys each batch row has."""
    lengths = call.key_lengths
    if lengths is not None:
        check_shape("key_lengths", lengths, [math.prod(call.scores[:-3])], torch.int32, call.query.device)
        if not lengths.is_contiguous():
            refuse("key_lengths", "a contiguous tensor", f"stride {lengths.stride(0)}")


def check_forward(call: AttentionCall) -> AttentionCall:
    """The same for sdpa_forward, with what the kernels of the query's device refuse beyond."""
    call = check_attention(call)
    _check_seed(call)
    _check_key_lengths(call)
    if call.query.device.type == "cuda":
        inputs = {"query": (call.query, 2), "key": (call.key, 2), "value": (call.value, 2), "attn_mask": (call.attn_mask, 2)}
        check_limits(
            inputs, lambda: zip(empty_results(call, device="meta"), (2, 1), strict=True), call.scores[:-2], call.enable_gqa
        )
    check_kernel_name(call.query.device, call.kernel_name)
    return call


def check_backward(
    call: AttentionCall, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, mask_grad: bool
) -> AttentionCall:
    """The same for sdpa_backward, whose operands have one set of leading dims."""
    call = check_attention(call)
    _check_seed(call)
    _check_key_lengths(call)
    query, _, value, mask = call.differentiable
    tail, rows = 3 if call.enable_gqa else 2, call.scores[:-1]
    for name, tensor in zip(("query", "key", "value"), call[:3], strict=True):
        check_shape(name, tensor, [*call.scores[:-tail], *tensor.shape[-tail:]], query.dtype, query.device)
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        check_shape(name, tensor, [*rows, value.size(-1)], query.dtype, query.device)
    check_shape("lse", lse, rows, accumulator(query.dtype), query.device)
    if grad_lse is not None:
        check_shape("grad_lse", grad_lse, rows, accumulator(query.dtype), query.device)
    if mask_grad and (mask is None or mask.dtype == torch.bool):
        refuse("mask_grad", "False where attn_mask is None or of dtype bool", True)
    if query.device.type == "cuda":
        named = {"query": query, "key": call.key, "value": value, "out": out, "grad_out": grad_out, "attn_mask": mask}
        inputs = {name: (tensor, 2) for name, tensor in named.items()} | {"lse": (lse, 1), "grad_lse": (grad_lse, 1)}
        check_limits(
            inputs, lambda: [(t, 2) for t in empty_grads(call, mask_grad, False, device="meta")[: 3 + mask_grad]],
            call.scores[:-2], call.enable_gqa,
        )  # fmt: skip
    check_kernel_name(query.device, call.kernel_name, backward=True)
    return call
