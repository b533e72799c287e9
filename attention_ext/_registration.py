"""Registers all of the operators that is not a kernel: router, fake kernels, CPU path, autograd, autocast, vmap, sharding."""

import importlib
import logging
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _flops, _linear, _linear_softmax, _reference, _routing, _stages
from ._after_import import after_import
from ._autograd import Attention, expand_leading, log_backward
from ._bias import plain_mask, plain_result
from ._checks import check_attention, check_key_lengths, check_seed, check_shape, refuse
from ._dispatch import call_kernel, redispatch, register_kernel_calls
from ._limits import check_kernel_name, check_limits, contiguous, layout_like
from ._transforms import AUTOCAST, castable, tangents

__all__: list[str] = []

_LIBRARY = torch.library.Library("attention_ext", "FRAGMENT")  # for as long as the process lives
_LIBRARY.define(  # the router of a kernel that C++ declares, so it needs no declaration there
    "sdpa_with_lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
    "*, float? scale=None, bool enable_gqa=False) -> (Tensor out, Tensor lse)"
)
_SDPA, _WITH_LSE = torch.ops.attention_ext.sdpa.default, torch.ops.attention_ext.sdpa_with_lse.default
_FORWARD, _BACKWARD = torch.ops.attention_ext.sdpa_forward.default, torch.ops.attention_ext.sdpa_backward.default


def _check_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, seed: Tensor | None, dropout_p: float,
    is_causal: bool, enable_gqa: bool, kernel_name: str, key_lengths: Tensor | None,
) -> list[int]:  # fmt: skip
    scores = check_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    check_seed(query, seed, dropout_p)
    check_key_lengths(query, key_lengths, scores)
    if query.device.type == "cuda":
        *batch, L, _ = scores
        inputs = {"query": (query, 2), "key": (key, 2), "value": (value, 2), "attn_mask": (attn_mask, 2)}
        out = [*batch, L, value.size(-1)]
        check_limits(inputs, lambda: [(layout_like(out, query), 2), (contiguous(out[:-1]), 1)], batch, enable_gqa)
    check_kernel_name(query.device, kernel_name)
    return scores


def _forward_cpu(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, seed: Tensor | None, dropout_p: float,
    is_causal: bool, *, scale: float | None = None, enable_gqa: bool = False, allow_tf32: bool = False,
    workspace_bytes: int = 134217728, kernel_name: str = "auto", key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = _check_forward(query, key, value, attn_mask, seed, dropout_p, is_causal, enable_gqa, kernel_name, key_lengths)
    query, key, value = expand_leading(query, key, value, scores, enable_gqa)
    with _reference.below_autocast():
        rest = (seed, dropout_p, is_causal, scale, scores, workspace_bytes, key_lengths)
        return _reference.forward(query, key, value, attn_mask, *rest)


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, seed: Tensor | None, dropout_p: float,
    is_causal: bool, *, scale: float | None = None, enable_gqa: bool = False, allow_tf32: bool = False,
    workspace_bytes: int = 134217728, kernel_name: str = "auto", key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = _check_forward(query, key, value, attn_mask, seed, dropout_p, is_causal, enable_gqa, kernel_name, key_lengths)
    return _reference.output_like(query, value, scores)


def _check_backward(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    out: Tensor, lse: Tensor, seed: Tensor | None, dropout_p: float, is_causal: bool, *, scale: float | None = None,
    enable_gqa: bool = False, allow_tf32: bool = False, deterministic: bool = False, mask_grad: bool = False,
    wide_grads: bool = False, workspace_bytes: int = 134217728, kernel_name: str = "auto", key_lengths: Tensor | None = None,
) -> list[int]:  # fmt: skip
    scores = check_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    check_seed(query, seed, dropout_p)
    check_key_lengths(query, key_lengths, scores)
    tail = 3 if enable_gqa else 2
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_shape(name, tensor, [*scores[: len(scores) - tail], *tensor.shape[-tail:]], query.dtype, query.device)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    check_shape("grad_out", grad_out, [*scores[:-1], value.size(-1)], query.dtype, query.device)
    check_shape("out", out, [*scores[:-1], value.size(-1)], query.dtype, query.device)
    check_shape("lse", lse, scores[:-1], lse_dtype, query.device)
    if grad_lse is not None:
        check_shape("grad_lse", grad_lse, scores[:-1], lse_dtype, query.device)
    if mask_grad and (attn_mask is None or attn_mask.dtype == torch.bool):
        refuse("mask_grad", "False where attn_mask is None or of dtype bool", True)
    if query.device.type == "cuda":
        alike = (query, key, value, attn_mask if mask_grad else None)
        check_limits(
            {"query": (query, 2), "key": (key, 2), "value": (value, 2), "out": (out, 2), "grad_out": (grad_out, 2), "lse": (lse, 1),
             "grad_lse": (grad_lse, 1), "attn_mask": (attn_mask, 2)},
            lambda: [(layout_like(t.shape, t), 2) for t in alike if t is not None], scores[:-2], enable_gqa,
        )  # fmt: skip
    check_kernel_name(query.device, kernel_name, backward=True)
    return scores


def _backward_cpu(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    out: Tensor, lse: Tensor, seed: Tensor | None, dropout_p: float, is_causal: bool, *,
    scale: float | None = None, enable_gqa: bool = False, allow_tf32: bool = False, deterministic: bool = False,
    mask_grad: bool = False, wide_grads: bool = False, workspace_bytes: int = 134217728, kernel_name: str = "auto",
    key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _check_backward(
        grad_out, grad_lse, query, key, value, attn_mask, out, lse, seed, dropout_p, is_causal, enable_gqa=enable_gqa,
        mask_grad=mask_grad, kernel_name=kernel_name, key_lengths=key_lengths,
    )  # fmt: skip
    with _reference.below_autocast():
        return _reference.backward(
            grad_out, grad_lse, query, key, value, attn_mask, seed, dropout_p, is_causal, scale, scores, mask_grad, wide_grads,
            workspace_bytes, key_lengths,
        )  # fmt: skip


def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    out: Tensor, lse: Tensor, seed: Tensor | None, dropout_p: float, is_causal: bool, *,
    scale: float | None = None, enable_gqa: bool = False, allow_tf32: bool = False, deterministic: bool = False,
    mask_grad: bool = False, wide_grads: bool = False, workspace_bytes: int = 134217728, kernel_name: str = "auto",
    key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_backward(
        grad_out, grad_lse, query, key, value, attn_mask, out, lse, seed, dropout_p, is_causal, enable_gqa=enable_gqa,
        mask_grad=mask_grad, kernel_name=kernel_name, key_lengths=key_lengths,
    )  # fmt: skip
    dtype = torch.float32 if wide_grads and query.dtype != torch.float64 else query.dtype
    grads = [_reference.like_order(t, list(t.shape), dtype) for t in (query, key, value)]
    with_mask = attn_mask is not None and mask_grad
    grad_mask = _reference.like_order(attn_mask, list(attn_mask.shape)) if attn_mask is not None and with_mask else None
    return grads[0], grads[1], grads[2], query.new_empty(0) if grad_mask is None else grad_mask


def _forward_autograd(
    keyset: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, seed: Tensor | None, dropout_p: float,
    is_causal: bool, *, scale: float | None = None, enable_gqa: bool = False, allow_tf32: bool = False,
    workspace_bytes: int = 134217728, kernel_name: str = "auto", key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors = [t for t in (query, key, value, attn_mask) if t is not None]
    scores = _check_forward(query, key, value, attn_mask, seed, dropout_p, is_causal, enable_gqa, kernel_name, key_lengths)
    if tangents(*tensors):
        raise RuntimeError("attention_ext: sdpa_forward has no forward-mode derivative; torch.ops.attention_ext.sdpa has one.")
    rest = (attn_mask, dropout_p, is_causal, scale, enable_gqa, scores)
    _routing.log_kernel("sdpa_forward", query, key, value, *rest, kernel_name, key_lengths)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        out, lse = Attention.apply(
            query, key, value, attn_mask, seed, scores, dropout_p, is_causal, scale, enable_gqa, allow_tf32,
            torch.are_deterministic_algorithms_enabled(), workspace_bytes, kernel_name, key_lengths,
        )  # fmt: skip
        return out, lse
    out, lse = redispatch(
        _FORWARD, keyset, query, key, value, attn_mask, seed, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        allow_tf32=allow_tf32, workspace_bytes=workspace_bytes, kernel_name=kernel_name, key_lengths=key_lengths,
    )  # fmt: skip
    return out, lse


class _AttentionGrad(torch.autograd.Function):
    """sdpa_backward where its results could be differentiated again."""

    @staticmethod
    def forward(options: dict[str, Any], *arguments: Any) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = call_kernel(_BACKWARD, *arguments, **options)
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "attention_ext: double backward through sdpa is not supported; use torch.nn.functional.scaled_dot_product_attention "
            "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )


def _backward_autograd(keyset: Any, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    _check_backward(*arguments, **options)
    log_backward(arguments[2], options.get("kernel_name", "auto"))
    grads: tuple[Tensor, ...]
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in arguments):
        grads = _AttentionGrad.apply(options, *arguments)
    else:
        grads = redispatch(_BACKWARD, keyset, *arguments, **options)
    return grads


def _autocast(operator: Any, device_type: str) -> Any:
    """Attention inside an autocast region: operands in the region's dtype, as PyTorch's; a float32 mask keeps its precision."""

    def cast(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        dtype = torch.get_autocast_dtype(device_type)

        def lower(t: Tensor) -> Tensor:
            return t.to(dtype) if castable(t, device_type) else t

        mask, is_causal = plain_mask(attn_mask, query, key, is_causal)
        given = mask is attn_mask
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST[device_type]):
            mask = mask if mask is None or mask.dtype == torch.float32 else lower(mask)
            out = operator(lower(query), lower(key), lower(value), mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out if given else plain_result(out) if isinstance(out, Tensor) else tuple(map(plain_result, out))

    return cast


def _vmap(operator: Any) -> Any:
    """The mapped dim becomes the first leading dim; operands of lower rank get 1s behind it, so that the others still align."""

    def rule(
        info: Any, in_dims: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        tensors, dims = (query, key, value, attn_mask), (*in_dims, None)[:4]  # in_dims leaves out a mask that was not given
        for mode in ("error", "same"):
            if dropout_p > 0.0 and info.randomness == mode:
                refuse("dropout_p", f"0 under vmap with randomness={mode!r}", dropout_p)
        least = 3 if enable_gqa else 2
        ranks = [0 if t is None else t.dim() - (d is not None) for t, d in zip(tensors, dims, strict=True)]
        for name, of in zip(("query", "key", "value"), ranks, strict=False):
            if of < least:
                refuse(name, f"rank {least} or more", f"rank {of} under vmap")
        rank = max(ranks[:3])
        if attn_mask is not None and not 2 <= ranks[3] <= rank:
            refuse("attn_mask", f"rank 2 to {rank}", f"rank {ranks[3]} under vmap")

        def align(t: Tensor | None, dim: int | None) -> Tensor | None:
            if t is None or dim is None:
                return t
            t = t.movedim(dim, 0)
            return t.reshape(t.size(0), *(1,) * (rank - t.dim() + 1), *t.shape[1:])

        q, k, v, mask = (align(t, d) for t, d in zip(tensors, dims, strict=True))
        if all(d is None for d in dims[:3]):  # the mask alone is mapped, and must not have more dims than the scores
            q = query.expand(info.batch_size, *(1,) * (rank - query.dim()), *query.shape)
        out = operator(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out, 0 if isinstance(out, Tensor) else (0,) * len(out)

    return rule


for _operator, _body in ((_SDPA, _routing.sdpa), (_WITH_LSE, _routing.sdpa_with_lse)):
    _name = _operator._schema.name.removeprefix("attention_ext::")
    _LIBRARY.impl(_name, _body, "CompositeImplicitAutograd", with_keyset=True)
    _LIBRARY.impl(_name, _autocast(_operator, "cpu"), "AutocastCPU")
    _LIBRARY.impl(_name, _autocast(_operator, "cuda"), "AutocastCUDA")
    torch.library.register_vmap(f"attention_ext::{_name}", _vmap(_operator), lib=_LIBRARY)
for _operator in (_FORWARD, _BACKWARD):
    register_kernel_calls(_LIBRARY, _operator)
_LIBRARY.impl("sdpa_forward", _forward_cpu, "CPU")
_LIBRARY.impl("sdpa_forward", _forward_autograd, "Autograd", with_keyset=True)
torch.library.register_fake("attention_ext::sdpa_forward", _forward_fake, lib=_LIBRARY)
_LIBRARY.impl("sdpa_backward", _backward_cpu, "CPU")
_LIBRARY.impl("sdpa_backward", _backward_autograd, "Autograd", with_keyset=True)
torch.library.register_fake("attention_ext::sdpa_backward", _backward_fake, lib=_LIBRARY)
for _part in (_stages, _linear, _linear_softmax):
    _part.register(_LIBRARY)

_flops.register()


def _register_sharding() -> None:
    try:
        importlib.import_module("attention_ext._sharding")
    except Exception as error:  # of an experimental interface, in the middle of an import that is not ours
        logging.getLogger("attention_ext").warning("torch %s: DTensor operands will be refused (%r)", torch.__version__, error)


after_import("torch.distributed.tensor", _register_sharding)
