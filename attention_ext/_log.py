"""The logger attention_ext, which says at level INFO what runs for a call and why."""

import logging
from functools import partial

import torch
from torch import Tensor

__all__ = ["is_logging", "log_call", "log_wanted"]

_LOG = logging.getLogger("attention_ext")
is_logging = partial(_LOG.isEnabledFor, logging.INFO)  # the logger keeps the answer until a level is set somewhere


def log_wanted() -> bool:
    """Whether calls are logged now: at level INFO, and not while they are only traced."""
    return is_logging() and not torch.compiler.is_compiling()


def log_call(operator: str, tensor: Tensor, kernel: str, reason: str) -> None:
    """kernel: what runs for this operator on such a tensor. reason: why, a clause."""
    if log_wanted():
        _LOG.info("%s on %s %s: %s, because %s", operator, tensor.device.type, tensor.dtype, kernel, reason)
