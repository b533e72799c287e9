"""How a kernel is called from this package's Python, and torch.OutOfMemoryError from wherever it is called.

Kernels allocate through the stable ABI, which cannot throw torch.OutOfMemoryError: they end in a RuntimeError with a sentence of
their own (csrc/binding/tensors.h). A Python function at the dispatch key BackendSelect turns it into PyTorch's error. That key is
part of every call, also in inference mode. The package's functions at the keys above it do the same in passing and skip it.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ._log import log_wanted
from ._torch_private import BELOW_AUTOGRAD, below_autograd, dispatch_modes, forward_mode_is_open, kernel_of, keyset, transforms

__all__ = ["Kernel", "redispatch", "register_operator"]

_KERNELS = BELOW_AUTOGRAD - keyset("BackendSelect")
_Function = Callable[..., Any]
_SENTENCE = re.compile(r"^attention_ext: out of memory: (\d+) bytes on (cuda:\d+)")


def _raise_if_out_of_memory(error: RuntimeError) -> None:
    """Asks PyTorch for the memory that a kernel did not get, which ends in PyTorch's own error and message."""
    found = _SENTENCE.match(str(error))
    if found is None:
        return
    size, device = int(found[1]), found[2]
    torch.empty(size, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes on {device}.")


def redispatch(operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator's kernel, from a function that a dispatch key called with this keyset, for the same tensors."""
    try:
        return operator.redispatch(keyset & _KERNELS, *args, **kwargs)
    except RuntimeError as error:
        _raise_if_out_of_memory(error)
        raise


def _are_plain_on_cuda(arguments: Iterable[Any]) -> bool:
    """Whether no key of the dispatcher but CUDA has a say in a call of a kernel with these arguments."""
    for argument in arguments:
        if type(argument) is Tensor:
            if not argument.is_cuda or argument.is_neg():
                return False
        elif isinstance(argument, Tensor):
            return False
    return not (dispatch_modes() or transforms() or forward_mode_is_open())


class Kernel:
    """The kernels of an operator, for this package's own calls of them."""

    def __init__(self, operator: Any) -> None:
        self._operator, self._on_cuda = operator, kernel_of(operator, "CUDA")

    def on_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """For plain tensors on CUDA, where nothing but the kernel can be meant: past the dispatcher's other keys."""
        try:
            return self._on_cuda(*args, **kwargs)
        except RuntimeError as error:
            _raise_if_out_of_memory(error)
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """From anywhere, for any tensors."""
        if _are_plain_on_cuda((*args, *kwargs.values()) if kwargs else args):
            return self.on_cuda(*args, **kwargs)
        with below_autograd():
            return self._operator(*args, **kwargs)


def register_operator(
    library: torch.library.Library, name: str, cpu: _Function, autograd: _Function, fake: _Function, log: Callable[..., None]
) -> None:
    """Everything about an operator with kernels that is not one on CUDA; log: called with its arguments where calls are logged."""
    operator = getattr(torch.ops.attention_ext, name).default

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled() and log_wanted():  # all other calls are logged above
            log(*args, **kwargs)
        return redispatch(operator, keyset, *args, **kwargs)

    library.impl(name, call, "BackendSelect", with_keyset=True)
    library.impl(name, cpu, "CPU")
    library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"attention_ext::{name}", fake, lib=library)
