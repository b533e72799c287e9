"""What torch.utils.flop_counter.FlopCounterMode counts for the operators: as for PyTorch's, 2 m n k for a product (m, k) @ (k, n).

As there, attention counts every key, visible or not, once for each query head, and its backward counts the scores again. sdpa and
sdpa_with_lse have no formula: they decompose to sdpa_forward or to PyTorch's operators.

torch.utils.flop_counter imports triton where that is installed, which takes longer than all of this package. So it is not imported
here: the formulas are registered as soon as somebody else imports it.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from math import prod
from types import ModuleType
from typing import Any

import torch

__all__ = ["register"]

_COUNTER = "torch.utils.flop_counter"
_Shape = Sequence[int]  # a formula gets the shape of each tensor in its place, and of the results as out_shape


def _sdpa_forward(query: _Shape, key: _Shape, value: _Shape, *rest: Any, out_shape: tuple[_Shape, _Shape], **options: Any) -> int:
    """Q K^T and P V, for every row of lse (..., Hq, L)."""
    return 2 * prod(out_shape[1]) * key[-2] * (query[-1] + value[-1])


def _sdpa_backward(
    grad_out: _Shape, grad_lse: _Shape | None, query: _Shape, key: _Shape, value: _Shape, *rest: Any, **options: Any
) -> int:
    """Q K^T, dP = dO V^T, dV = P^T dO, dQ = dS K and dK = dS^T Q, for every row of dO (..., Hq, L, Ev)."""
    return 2 * prod(grad_out[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _qk_scores(query: _Shape, *rest: Any, out_shape: _Shape, **options: Any) -> int:
    return 2 * prod(out_shape) * query[-1]


def _row_softmax(*rest: Any, **options: Any) -> int:
    return 0


def _scores_values(weights: _Shape, row_sum: _Shape, value: _Shape, **options: Any) -> int:
    return 2 * prod(weights) * value[-1]


def _linear(input: _Shape, weight: _Shape, *rest: Any, **options: Any) -> int:
    """input @ weight.T alone; the backward passes are made of operators that have formulas."""
    return 2 * prod(input) * weight[0]


_FORMULAS: dict[str, Callable[..., int]] = {
    "sdpa_forward": _sdpa_forward,
    "sdpa_backward": _sdpa_backward,
    "qk_scores": _qk_scores,
    "row_softmax": _row_softmax,
    "scores_values": _scores_values,
    "linear_float32": _linear,
    "linear_batchnorm_softmax": _linear,
}


def _register_with(counter: Any) -> None:
    for name, formula in _FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.attention_ext, name))(formula)


class _RegisterAfter(Loader):
    """Loads the module as `loader` does, and registers the formulas with it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register_with(module)


class _Finder(MetaPathFinder):
    """Finds torch.utils.flop_counter where the other finders do, and nothing else."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisterAfter(spec.loader)
                return spec
        return None


def register() -> None:
    """Registers the formulas: now if torch.utils.flop_counter is there, else when it is imported."""
    if _COUNTER in sys.modules:
        _register_with(importlib.import_module(_COUNTER))
    else:
        sys.meta_path.insert(0, _Finder())
