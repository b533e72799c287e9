"""The __torch_function__ protocol at the top of a public function: subclasses, modes and the proxies of torch.fx see the call."""

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["handle_torch_function", "overridden"]


def overridden(*arguments: Any) -> bool:
    """Whether a __torch_function__ takes the call. Not while compiling: Dynamo follows the protocol at the operators inside, but
    not where a subclass calls a Python function again with the protocol switched off."""
    return has_torch_function(arguments) and not torch.compiler.is_compiling()
