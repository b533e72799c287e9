"""How a kernel is called from this package's Python, and torch.OutOfMemoryError from wherever it is called.

Kernels allocate through the stable ABI, which cannot throw torch.OutOfMemoryError: they end in a RuntimeError with a sentence of
their own (csrc/binding/tensors.h). A Python function at the dispatch key BackendSelect turns it into PyTorch's error. That key is
part of every call, also in inference mode. The package's functions at the keys above it do the same in passing and skip it.
"""

import re
from typing import Any

import torch

__all__ = ["call_kernel", "redispatch", "register_kernel_calls"]

_KERNELS = torch._C._after_ADInplaceOrView_keyset - torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
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


def call_kernel(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator's kernel, from anywhere else."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args, **kwargs)


def register_kernel_calls(library: torch.library.Library, operator: Any) -> None:
    """The function at BackendSelect, for an operator with kernels."""

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return redispatch(operator, keyset, *args, **kwargs)

    library.impl(operator._schema.name.removeprefix("attention_ext::"), call, "BackendSelect", with_keyset=True)
