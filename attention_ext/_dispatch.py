"""How a kernel is called from this package's Python, and torch.OutOfMemoryError from wherever it is called.

Kernels allocate through the stable ABI, which cannot throw torch.OutOfMemoryError: they end in a RuntimeError with a sentence of
their own (csrc/binding/tensors.h). A Python function at the dispatch key BackendSelect turns it into PyTorch's error. That key is
part of every call, also in inference mode. The package's functions at the keys above it do the same in passing and skip it.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._log import is_logging, log_wanted
from ._recall import ARRAYS, Known, is_array, is_seen
from ._torch_private import (
    BELOW_AUTOGRAD,
    alike,
    attempt_overload,
    autocasts,
    below_autograd,
    function_modes,
    kernel_of,
    keyset,
    leading_tensors,
)

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


class Kernel:
    """The kernels of an operator, for this package's own calls of them."""

    def __init__(self, operator: Any) -> None:
        self._operator, self._on_cuda = operator, kernel_of(operator, "CUDA")
        self._known, self._leading = Known(), leading_tensors(operator)

    def is_meant(self, args: Any, kwargs: Any, autocast: bool = True) -> bool:
        """Whether no key of the dispatcher but CUDA has a say in a call with these arguments, which is neither recorded nor logged.

        autocast: also where autocast is on.
        """
        tensors = [argument for argument in args[: self._leading] if argument is not None]
        if kwargs:
            tensors += [argument for argument in kwargs.values() if isinstance(argument, Tensor)]
        count = len(tensors)
        return self._known.find(count, *tensors) or self._become_known(count, tensors, autocast)

    def _become_known(self, count: int, tensors: list[Any], autocast: bool) -> bool:
        records = torch.is_grad_enabled()
        for tensor in tensors:
            if type(tensor) not in ARRAYS or not tensor.is_cuda or (records and tensor.requires_grad):
                return False
        if is_logging() or is_seen() or (autocasts() and not autocast):
            return False
        try:
            if not all(map(is_array, tensors)):
                return False
        except RuntimeError:  # of a tensor that stands for another
            return False
        self._known.keep(count, alike(*tensors, any_size=True), True)
        return True

    def on_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """For plain tensors on CUDA, where nothing but the kernel can be meant: past the dispatcher's other keys."""
        try:
            return self._on_cuda(*args, **kwargs)
        except RuntimeError as error:
            _raise_if_out_of_memory(error)
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """From anywhere, for any tensors."""
        if self.is_meant(args, kwargs):
            return self.on_cuda(*args, **kwargs)
        with below_autograd():
            return self._operator(*args, **kwargs)


def _kernel_first(operator: Any) -> Callable[[_Function], _Function]:
    """For attempt_overload: the kernel at once where a call on CUDA comes to nothing else, as those of compiled programs."""
    kernel = Kernel(operator)

    def attempting(dispatch: _Function) -> _Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if function_modes() or not kernel.is_meant(args, kwargs, autocast=False):
                return dispatch(*args, **kwargs)
            return kernel.on_cuda(*args, **kwargs)

        return call

    return attempting


def register_operator(
    library: torch.library.Library, name: str, cpu: _Function, autograd: _Function, fake: _Function, log: Callable[..., None]
) -> None:
    """Everything about an operator with kernels that is not one on CUDA; log: called with its arguments where calls are logged."""
    operator = getattr(torch.ops.attention_ext, name).default
    attempt_overload(operator, _kernel_first(operator))

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled() and log_wanted():  # all other calls are logged above
            log(*args, **kwargs)
        return redispatch(operator, keyset, *args, **kwargs)

    library.impl(name, call, "BackendSelect", with_keyset=True)
    library.impl(name, cpu, "CPU")
    library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"attention_ext::{name}", fake, lib=library)
