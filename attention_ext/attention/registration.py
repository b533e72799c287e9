"""Registers all of the operators that is not a kernel: router, fake kernels, CPU path, autograd, autocast, vmap."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._checks import refuse
from .._dispatch import redispatch, register_operator
from .._log import log_wanted
from .._torch_private import attempt_first
from .._transforms import autocast_to, below_autocast, tangents
from . import reference, router
from .autograd import AttentionGrad, log_backward, record
from .bias import plain_mask, plain_result
from .call import AttentionCall, any_needs_grad
from .checks import check_attention, check_backward, check_forward
from .layout import empty_grads, empty_results
from .recall import all_arguments, attempt

__all__ = ["register"]

_FORWARD, _BACKWARD = torch.ops.attention_ext.sdpa_forward.default, torch.ops.attention_ext.sdpa_backward.default
_WITH_LSE = (  # the router of a kernel that C++ declares, so it needs no declaration there
    "sdpa_with_lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
    "*, float? scale=None, bool enable_gqa=False) -> (Tensor out, Tensor lse)"
)


def _forward_cpu(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    call = check_forward(AttentionCall(*arguments, **options))
    with below_autocast():
        return reference.forward(call)


def _forward_fake(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return empty_results(check_forward(AttentionCall(*arguments, **options)))


def _are_plain(tensors: Iterable[Any]) -> bool:
    """Whether the kernels' own checks say all there is to say of these; not of classes of tensors, of None, of other things."""
    return all(type(t) is Tensor for t in tensors)


def _forward_autograd(keyset: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Without a gradient, as in every compiled program, the checks are those of the kernel, the fake one's too."""
    differentiable = arguments[:4]
    if not _are_plain(differentiable if arguments[3] is not None else differentiable[:3]):
        check_forward(AttentionCall(*arguments, **options))
    if tangents(*differentiable):
        raise RuntimeError("attention_ext: sdpa_forward has no forward-mode derivative; torch.ops.attention_ext.sdpa has one.")
    if any_needs_grad(*differentiable):
        call = check_forward(AttentionCall(*arguments, **options))
        router.log_kernel("sdpa_forward", call)
        return record(call)
    if log_wanted():
        _log_forward(*arguments, **options)
    try:
        out, lse = redispatch(_FORWARD, keyset, *arguments, **options)
    except NotImplementedError:  # the dispatcher's sentence, of a layout that has no kernel
        check_forward(AttentionCall(*arguments, **options))
        raise
    return out, lse


def _log_forward(*arguments: Any, **options: Any) -> None:
    router.log_kernel("sdpa_forward", check_attention(AttentionCall(*arguments, **options)))


def _check_backward(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    out: Tensor, lse: Tensor, *rest: Any, mask_grad: bool = False, wide_grads: bool = False, **options: Any,
) -> tuple[AttentionCall, tuple[Any, ...]]:  # fmt: skip
    """The call of sdpa_forward that this is the backward of, and what else reference.backward takes."""
    call = AttentionCall(query, key, value, attn_mask, *rest, **options)
    return check_backward(call, grad_out, grad_lse, out, lse, mask_grad), (grad_out, grad_lse, mask_grad, wide_grads)


def _backward_cpu(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    call, own = _check_backward(*arguments, **options)
    with below_autocast():
        return reference.backward(call, *own)


def _backward_fake(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    call, (_, _, mask_grad, wide_grads) = _check_backward(*arguments, **options)
    return empty_grads(call, mask_grad, wide_grads)


def _backward_autograd(keyset: Any, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...]
    recorded = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in arguments)
    if recorded or not _are_plain(t for t in arguments[:8] if t is not None):
        _check_backward(*arguments, **options)
    log_backward(*arguments, **options)
    if recorded:
        grads = AttentionGrad.apply(options, *arguments)
        return grads
    try:
        grads = redispatch(_BACKWARD, keyset, *arguments, **options)
    except NotImplementedError:
        _check_backward(*arguments, **options)
        raise
    return grads


def _autocast(operator: Any, device_type: str) -> Any:
    """Attention inside an autocast region: operands in the region's dtype, as PyTorch's; a float32 mask keeps its precision."""

    def cast(*arguments: Any, **options: Any) -> Any:
        call = AttentionCall.of_router(*arguments, **options)
        lower = partial(autocast_to, torch.get_autocast_dtype(device_type), device_type)
        mask, is_causal = plain_mask(call.attn_mask, call.query, call.key, call.is_causal)
        given = mask is call.attn_mask
        with below_autocast(device_type):
            mask = mask if mask is None or mask.dtype == torch.float32 else lower(mask)
            query, key, value = map(lower, call[:3])
            out = call._replace(query=query, key=key, value=value, attn_mask=mask, is_causal=is_causal).through(operator)
        return out if given else plain_result(out) if isinstance(out, Tensor) else tuple(map(plain_result, out))

    return cast


def _vmap(operator: Any) -> Any:
    """The mapped dim becomes the first leading dim; operands of lower rank get 1s after it, so that the others still align."""

    def rule(info: Any, in_dims: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        call = AttentionCall.of_router(*arguments, **options)
        tensors, dims = call.differentiable, (*in_dims, None)[:4]  # in_dims leaves out a mask that was not given
        for mode in ("error", "same"):
            if call.dropout_p > 0.0 and info.randomness == mode:
                refuse("dropout_p", f"0 under vmap with randomness={mode!r}", call.dropout_p)
        least = 3 if call.enable_gqa else 2
        ranks = [0 if t is None else t.dim() - (d is not None) for t, d in zip(tensors, dims, strict=True)]
        for name, of in zip(("query", "key", "value"), ranks, strict=False):
            if of < least:
                refuse(name, f"rank {least} or more", f"rank {of} under vmap")
        rank = max(ranks[:3])
        if call.attn_mask is not None and not 2 <= ranks[3] <= rank:
            refuse("attn_mask", f"rank 2 to {rank}", f"rank {ranks[3]} under vmap")

        def align(t: Tensor | None, dim: int | None) -> Tensor | None:
            if t is None or dim is None:
                return t
            t = t.movedim(dim, 0)
            return t.reshape(t.size(0), *(1,) * (rank - t.dim() + 1), *t.shape[1:])

        aligned: dict[str, Any] = {name: align(*pair) for name, *pair in zip(call._fields, tensors, dims, strict=False)}
        if all(d is None for d in dims[:3]):  # the mask alone is mapped, and must not have more dims than the scores
            aligned["query"] = call.query.expand(info.batch_size, *(1,) * (rank - call.query.dim()), *call.query.shape)
        out = call._replace(**aligned).through(operator)
        return out, 0 if isinstance(out, Tensor) else (0,) * len(out)

    return rule


def register(library: torch.library.Library) -> None:
    library.define(_WITH_LSE)
    for name, body in (("sdpa", router.sdpa), ("sdpa_with_lse", router.sdpa_with_lse)):
        operator = getattr(torch.ops.attention_ext, name).default
        library.impl(name, body, "CompositeImplicitAutograd")
        library.impl(name, _autocast(operator, "cpu"), "AutocastCPU")
        library.impl(name, _autocast(operator, "cuda"), "AutocastCUDA")
        torch.library.register_vmap(f"attention_ext::{name}", _vmap(operator), lib=library)
    attempt_first(torch.ops.attention_ext.sdpa, all_arguments, attempt)
    register_operator(library, "sdpa_forward", _forward_cpu, _forward_autograd, _forward_fake, _log_forward)
    register_operator(library, "sdpa_backward", _backward_cpu, _backward_autograd, _backward_fake, log_backward)
