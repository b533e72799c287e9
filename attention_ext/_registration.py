"""Registers all of the operators that is not a kernel. Importing this module does it, after _libraries has loaded the schemas."""

import importlib
import logging

import torch

from . import _flops
from ._after_import import after_import
from .attention import registration, stages
from .linear import product, softmax

__all__: list[str] = []

_LIBRARY = torch.library.Library("attention_ext", "FRAGMENT")  # for as long as the process lives

for _part in (registration, stages, product, softmax):
    _part.register(_LIBRARY)
_flops.register()


def _register_sharding() -> None:
    try:
        importlib.import_module("attention_ext._sharding")
    except Exception as error:  # of an experimental interface, in the middle of an import that is not ours
        logging.getLogger("attention_ext").warning("torch %s: DTensor operands will be refused (%r)", torch.__version__, error)


after_import("torch.distributed.tensor", _register_sharding)
