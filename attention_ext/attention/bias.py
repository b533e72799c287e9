"""Masks whose class has a meaning that their data has not: those of torch.nn.attention.bias.

PyTorch keeps the meaning of such a subclass of Tensor in its __torch_function__, for
torch.nn.functional.scaled_dot_product_attention alone; its memory is not initialised. What is known is turned into what PyTorch
makes of it, the rest is refused.
"""

from typing import Any

import torch
from torch import Tensor

from .._checks import refuse, text
from .._torch_private import plain_torch_function
from .checks import has_meaning_of_its_own

__all__ = ["plain_mask", "plain_result"]


def plain_mask(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> tuple[Tensor | None, bool]:
    """(attn_mask, is_causal) with a mask that is an array of numbers, or none."""
    compiling = torch.compiler.is_compiling()  # Dynamo follows isinstance, and not how a class treats functions
    if not compiling and (not isinstance(mask, Tensor) or not has_meaning_of_its_own(mask)):
        return mask, is_causal
    from torch.nn.attention.bias import CausalBias, CausalVariant  # where such a mask is, this is loaded; it imports torch._dynamo

    if not isinstance(mask, CausalBias) or min(query.dim(), key.dim()) < 2:  # check_attention refuses them
        return mask, is_causal
    if is_causal:
        refuse("attn_mask", "None together with is_causal=True", f"a {type(mask).__name__}")
    variant = getattr(mask, "variant", None)
    if variant not in (CausalVariant.UPPER_LEFT, CausalVariant.LOWER_RIGHT):  # a tensor that was only cast to the class has none
        refuse("attn_mask", "a CausalBias with a variant (under torch.compile call attention_ext.sdpa)", "one without")
    rows, columns = mask.seq_len_q, mask.seq_len_kv
    L, S = query.size(-2), key.size(-2)
    if (rows, columns) != (L, S):
        refuse("attn_mask", f"a {type(mask).__name__} of the sizes (L, S) = {text((L, S))}", text((rows, columns)))
    if variant == CausalVariant.UPPER_LEFT or rows == columns:
        return None, True
    ones = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    return ones.tril(columns - rows), False


class _PlainResult(Tensor):
    """What an operator returns for such a mask: Tensor.__torch_function__ would cast the result to the class of the mask."""

    __torch_function__ = plain_torch_function

    def as_subclass(self, cls: Any) -> Any:
        return Tensor.as_subclass(self, Tensor)


def plain_result(out: Tensor) -> Tensor:
    """A result that stays a plain Tensor where the mask was of another class."""
    return Tensor.as_subclass(out, _PlainResult) if type(out) is Tensor else out
