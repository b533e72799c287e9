"""One call of attention as one object: made once from the arguments of an operator, checked, and passed on."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["AttentionCall", "any_needs_grad"]


def any_needs_grad(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether autograd records a call of these operands."""
    if not torch.is_grad_enabled():
        return False
    return query.requires_grad or key.requires_grad or value.requires_grad or (mask is not None and mask.requires_grad)


class AttentionCall(NamedTuple):
    """The arguments of sdpa_forward in the order of its schema and with its defaults, and what the checks have found.

    A new option is a field after is_causal, an argument of the schemas, and a field of the kernels' params; a tensor has its place
    in `tensors` and in autograd.Attention, too, which gets tensors one by one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    seed: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    workspace_bytes: int = 134217728
    kernel_name: str = "auto"
    key_lengths: Tensor | None = None  # int32 (B,), B the product of the dims before the heads: keys from there on are unseen
    scores: tuple[int, ...] = ()  # the sizes (..., Hq, L, S) of the scores, all operands broadcast; check_attention fills them in

    @classmethod
    def of_router(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *flags: Any, **options: Any
    ) -> "AttentionCall":
        """From the arguments of sdpa and sdpa_with_lse, which draw the seed themselves."""
        return cls(query, key, value, attn_mask, None, *flags, **options)

    def through(self, operator: Any) -> Any:
        """What sdpa, or another operator of its signature, gives for this call."""
        return operator(*self[:4], *self[5:7], scale=self.scale, enable_gqa=self.enable_gqa)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self[:5], self.key_lengths

    @property
    def options(self) -> dict[str, Any]:
        """By name what the schemas take by name alone, but for defaults, which cost the host time to pass on."""
        given = zip(_OPTIONS, self[7:-1], _DEFAULTS, strict=True)
        return {name: value for name, value, default in given if value is not default}

    @property
    def differentiable(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self[:4]

    @property
    def factor(self) -> float:
        """What Q K^T is multiplied by: the scale, 1 / sqrt(E) by default."""
        width = self.query.size(-1)
        return self.scale if self.scale is not None else 1.0 / math.sqrt(width) if width else 1.0

    def needs_grad(self) -> bool:
        return any_needs_grad(*self[:4])

    def with_scores(self, scores: tuple[int, ...]) -> "AttentionCall":
        return AttentionCall(*self[:-1], scores)

    def expanded(self) -> "AttentionCall":
        """With views of the operands that have the leading dims of the scores, the call itself where they have them; grouped heads
        stay as they are."""
        tail = 3 if self.enable_gqa else 2
        leading = self.scores[:-tail]
        if all(t.shape[:-tail] == leading for t in self[:3]):
            return self
        query, key, value = (t if t.shape[:-tail] == leading else t.expand(*leading, *t.shape[-tail:]) for t in self[:3])
        return AttentionCall(query, key, value, *self[3:])


_OPTIONS = AttentionCall._fields[7:-1]
_DEFAULTS = tuple(AttentionCall._field_defaults[name] for name in _OPTIONS)
