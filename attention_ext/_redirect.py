"""torch.nn.functional.scaled_dot_product_attention goes to sdpa inside a context, in code that nobody edits.

A TorchFunctionMode sees every call of the operator in its thread, by whatever name it was imported, in eager code and where it is
traced, and PyTorch's compiled graphs are guarded by it. Two things escape it, since PyTorch asks a mode for the function that they
stand in and runs that function with the mode switched off: the attention of nn.MultiheadAttention, and what a backward pass
computes again (torch.utils.checkpoint). These functions run here by their own code with the mode on (without_protocol).
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import multi_head_attention_forward
from torch.overrides import TorchFunctionMode

from ._log import log_call
from ._torch_private import FAST_PATHS, constant_in_programs, torch_sdpa, within_sdpa_kernel, without_protocol
from ._when import When, check_when, why_not
from .attention.checks import overrides_functions
from .ops import sdpa

__all__ = ["override"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MULTI_HEAD = without_protocol(multi_head_attention_forward)
# What starts the autograd engine.
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_ENGINE = {function: own for function in _BACKWARD if (own := without_protocol(function)) is not None}
_MASKS = "torch.nn.attention.bias"
_LOCK = threading.Lock()  # of the counts: threads may share a decorator


@constant_in_programs
def _own_meaning(types: tuple[type, ...]) -> str:
    """The name of a class that treats functions in a way of its own; sdpa knows PyTorch's masks."""
    return next((kind.__name__ for kind in types if overrides_functions(kind) and kind.__module__ != _MASKS), "")


class override(TorchFunctionMode):
    """Inside, F.scaled_dot_product_attention is attention_ext.sdpa; a context manager and a decorator.

        with attention_ext.override() as o:
            model(x)
        print(o)  # how many calls it took, how many it left to PyTorch, and why

    Args:
        when: "preferred": where sdpa was measured faster for the kind of call: device, dtype, head dims, dropout, whatever the
            lengths. "always". Or a function (query, key, value) -> bool; where a program is traced, it is traced with it.

    It reaches nn.MultiheadAttention and the nn.Transformer modules, torch.compile, torch.export, make_fx and torch.jit.trace, and
    what checkpoints compute again in a backward pass that starts inside. It is for the thread that enters it. Of nested ones the
    innermost is asked first, and what it leaves the next. A compiled function keeps what it was compiled with and is compiled again
    where it is called inside for the first time.

    Left alone are calls inside torch.nn.attention.sdpa_kernel, of nested tensors, and of classes with a `__torch_function__` of
    their own. Not reached, but counted as left, is attention of nn.MultiheadAttention that is no call of the operator: with
    need_weights=True, and where torch.compile takes the fast path of torch.backends.mha, in evaluation without gradients.

    Attributes:
        taken, left: how many calls went to sdpa and to PyTorch. A call in a program that is traced counts where it is traced, at
            least once.
        reasons: of each reason to leave a call the first call that it held for, in words.

    Raises:
        ValueError: `when` is neither of the two names nor callable.
    """

    taken = 0
    left = 0

    def __init__(self, when: When = "preferred") -> None:
        super().__init__()
        self.when = check_when(when)
        self.reasons: dict[str, str] = {}

    def __repr__(self) -> str:
        why = "".join(f"\n  {reason} (first: {call})" for reason, call in self.reasons.items())
        return f"override(when={self.when!r}): {self.taken} calls taken, {self.left} left{why and ':'}{why}"

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return within

    @constant_in_programs
    def _note(self, reason: str, query: Any = None, key: Any = None) -> None:
        """Counts a call, and says why it is left; the operands are given where it is not traced by Dynamo."""
        with _LOCK:
            if not reason:
                self.taken += 1
                return
            self.left += 1
            reasons = self.__dict__.setdefault("reasons", {})  # an object that Dynamo makes in a program has none
            if reason not in reasons and isinstance(query, Tensor):
                sizes = "nested" if query.is_nested or key.is_nested else f"query {tuple(query.shape)}, key {tuple(key.shape)}"
                reasons[reason] = f"{sizes}, {query.dtype} on {query.device}"
            reasons.setdefault(reason, "in a program that is traced")
        if isinstance(query, Tensor):
            log_call("scaled_dot_product_attention", query, "torch", reason)

    def _why_left(self, types: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> str:
        if within_sdpa_kernel():
            return "torch.nn.attention.sdpa_kernel says what runs"
        if name := _own_meaning(types):
            return f"a {name} has a __torch_function__ of its own"
        if query.is_nested or key.is_nested or value.is_nested:
            return "it takes no nested tensors"
        return why_not(self.when, query, key, value, dropout_p)

    def _attention(
        self, types: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        reason = self._why_left(types, query, key, value, dropout_p)
        if torch.compiler.is_compiling():
            self._note(reason)
        else:
            self._note(reason, query, key)
        if not reason:
            return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        out: Tensor = torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch_sdpa:
            return self._attention(types, *args, **kwargs)
        if func is multi_head_attention_forward and _MULTI_HEAD is not None and not _own_meaning(types):
            if kwargs.get("need_weights", True):
                self._note("multi_head_attention_forward with need_weights=True does not call it")
            with self:
                return _MULTI_HEAD(*args, **kwargs)
        if func in _ENGINE and not _own_meaning(types):
            with self:  # in its threads, too: the engine gives them the modes of the thread that starts it
                return _ENGINE[func](*args, **kwargs)
        if func in FAST_PATHS:  # Dynamo takes them where eager code does not, as there a mode switches them off
            self._note("the fast path of torch.backends.mha does not call it; set_fastpath_enabled(False) switches that off")
        if func is Tensor.unflatten and torch.compiler.is_compiling():  # before 2.14 Dynamo does not trace the method under a mode
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)
