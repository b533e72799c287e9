"""attention_ext as an attention implementation of transformers: register(), then attn_implementation="attention_ext".

transformers asks two functions for an implementation by its name: one makes the masks, the other is attention. Both are registered
together, as without the first a model gets no mask, and no error either. The rest of this file is what a function of that interface
has to know beside F.scaled_dot_product_attention, each of it silently wrong where it is missing (docs/transformers.md).
"""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import transformers
from torch import Tensor

from .. import sdpa, sdpa_with_lse
from .._checks import message
from .._log import log_call
from .._when import When, check_when, why_not
from . import check_tested

TESTED = "5.24"
check_tested("transformers", transformers.__version__, TESTED)

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

__all__ = ["Registration", "attention_forward", "make_mask", "register"]

_OWN, _SDPA = "attention_ext", "sdpa"
# What reaches attention on its way to others, or says in another way what the mask says.
_PASSED_BY = {
    *("position_ids", "use_cache", "cache", "num_items_in_batch", "output_hidden_states", "output_router_logits", "seq_idx"),
    *("deterministic", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("write_index", "read_index", "logits_indices", "block_table", "logits_processor_args"),  # of continuous batching
    # What tokenizers, processors and callers give to models that do not name it, which hand it on.
    *("input_ids", "inputs_embeds", "labels", "token_type_ids", "mm_token_type_ids", "special_tokens_mask", "offset_mapping"),
    *("overflow_to_sample_mapping", "overflowing_tokens", "num_truncated_tokens", "length", "return_dict", "logits_to_keep"),
    *("cache_position", "past_key_values", "pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_sizes"),
    *("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "spatial_shapes"),
}
# Of these models the mask becomes part of a sum of floats: true of a boolean one would be 1, and -inf true.
_ADD_TO_MASKS = ("deepseek_v4",)


def make_mask(
    *, config: Any = None, dtype: torch.dtype = torch.float32, allow_is_causal_skip: bool = True, **arguments: Any
) -> Tensor | None:
    """The mask of transformers' "sdpa", (B, 1, L, S), True takes part, or None for is_causal; with two exceptions.

    Models whose last layers share keys (Gemma 4) may drop query rows after masks are made, which leaves is_causal without its
    meaning; they check that for the name "sdpa" alone. DeepSeek-V4 adds its bias of compressed keys to the mask.
    """
    adds = getattr(config, "model_type", None) in _ADD_TO_MASKS
    skips = allow_is_causal_skip and not adds and not getattr(config, "num_kv_shared_layers", 0)
    mask: Tensor | None = sdpa_mask(config=config, dtype=dtype, allow_is_causal_skip=skips, **arguments)
    if adds and mask is not None:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
    return mask


def _refuse(argument: str, got: object, remedy: str) -> None:
    raise ValueError(f"{message(argument, 'None', str(got))}; {remedy}")


def _check(as_sdpa: bool, softcap: Any = None, block_indices: Any = None, output_attentions: Any = None, **others: Any) -> None:
    """Refuses what would change the result and is not computed here."""
    if softcap is not None:
        _refuse("softcap", softcap, "choose attn_implementation='eager' for this model")
    if block_indices is not None and not as_sdpa:  # under that name they are in the mask, too
        _refuse("block_indices", "a tensor", f"register(name={_SDPA!r}) and choose attn_implementation={_SDPA!r} for this model")
    if output_attentions and not as_sdpa:
        _refuse("output_attentions", output_attentions, "choose attn_implementation='eager' for weights")
    for name, value in others.items():
        if value is not None and name not in _PASSED_BY:
            _refuse(name, type(value).__name__, "it is not known whether attention depends on it: leave it out, or choose 'eager'")


def _selected(mask: Tensor | None, indices: Tensor, S: int) -> Tensor:
    """A mask for the keys that an indexer has chosen, (B, L, k), as sparse models make it for "eager" and "sdpa" themselves."""
    shape = (*indices.shape[:2], S)
    chosen = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, float("-inf"))


def _with_bias(bias: Tensor, mask: Tensor | None, causal: bool, L: int, S: int) -> Tensor:
    """Bias and mask as one float mask; a row without a visible key stays one."""
    if causal:
        mask = torch.ones(L, S, dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else bias + mask


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    when: When = "preferred",
    as_sdpa: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers by attention_ext.sdpa.

    Args:
        query: (B, Hq, L, E). key: (B, Hk, S, E), value: (B, Hk, S, Ev), whose heads are not repeated in memory.
        attention_mask: (B or 1, 1 or Hq, L, S), bool or float; with None, is_causal decides, else module.is_causal.
        position_bias: (B or 1, Hq, L, S), added to the scores.
        s_aux: (Hq,), sinks: (B, Hq, L, 1): a score that takes part in the softmax and has no value.
        indices: (B, L, k): the keys that a row sees.
        when: which calls attention_ext takes, as in attention_ext.override; transformers' sdpa_attention_forward has the others,
            but all with sinks, which it does not know, are taken.
        as_sdpa: what models do for the name "sdpa" alone is done.

    Returns:
        (B, L, Hq, Ev), contiguous, and None for the weights.

    Raises:
        ValueError: softcap, or another argument that would change the result and is not computed.
    """
    _check(as_sdpa, **others)
    L, S = query.size(2), key.size(2)
    if indices is not None:
        attention_mask = _selected(attention_mask, indices, S)
    sink = sinks.squeeze(-1) if sinks is not None else None if s_aux is None else s_aux.view(1, -1, 1)
    if sink is None:
        reason = why_not(when, query, key, value, dropout)
        if reason:
            if not torch.compiler.is_compiling():
                log_call("attention of transformers", query, "sdpa_attention_forward", reason)
            options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
            out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options, **others)
            return out, None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = L > 1 and attention_mask is None and causal
    if causal and S > L:  # an empty static cache: no row sees the keys behind
        key, value, S = key[:, :, :L], value[:, :, :L], L
        position_bias = None if position_bias is None else position_bias[..., :L]
    if position_bias is not None:
        attention_mask, causal = _with_bias(position_bias, attention_mask, causal, L, S), False
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, torch.float32):
        attention_mask = attention_mask.to(query.dtype)
    if sink is None:
        out = sdpa(query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=True)
    else:
        out, lse = sdpa_with_lse(query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=True)
        out = out * torch.sigmoid(lse - sink)[..., None].to(out.dtype)  # exp(lse) / (exp(lse) + exp(sink))
    return out.transpose(1, 2).contiguous(), None


_BEFORE: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {}


def _put(interface: Any, name: str, function: Callable[..., Any] | None) -> None:
    if function is None:
        interface._global_mapping.pop(name, None)
    else:
        interface.register(name, function)


class Registration:
    """What register returns; undo() takes it back, and so does the end of a with block."""

    def __init__(self, name: str) -> None:
        self.name = name

    def undo(self) -> None:
        """Puts back what stood under the name before its first registration; nothing where that has been done."""
        if self.name in _BEFORE:
            attention, mask = _BEFORE.pop(self.name)
            _put(AttentionInterface, self.name, attention)
            _put(AttentionMaskInterface, self.name, mask)

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def register(name: str = _OWN, when: When = "preferred") -> Registration:
    """Makes attention_ext an attention implementation of all models of this process.

        attention_ext.integrations.transformers.register()
        model = AutoModel.from_pretrained(path, attn_implementation="attention_ext")

    Args:
        name: "attention_ext", or "sdpa": in the place of transformers' own, for what transformers does for that name alone:
            continuous batching, sparse indices, and no masks in memory for Gemma 4's shared keys.
        when: which calls go to attention_ext.sdpa, as in attention_ext.override; transformers' "sdpa" has the others.

    A second registration of a name replaces the first. Models read the functions at each call.

    Raises:
        ValueError: another name, or another `when`.
    """
    if name not in (_OWN, _SDPA):  # others have a meaning there: "flash", "flex" and "/" in a name
        raise ValueError(message("name", f"{_OWN!r} or {_SDPA!r}", repr(name)))
    check_when(when)
    known = (AttentionInterface._global_mapping.get(name), AttentionMaskInterface._global_mapping.get(name))
    _BEFORE.setdefault(name, known)
    as_sdpa = name == _SDPA
    AttentionInterface.register(name, functools.partial(attention_forward, when=when, as_sdpa=as_sdpa))
    AttentionMaskInterface.register(name, sdpa_mask if as_sdpa else make_mask)
    return Registration(name)
