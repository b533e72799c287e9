"""What torch.utils.flop_counter.FlopCounterMode counts for the operators: as for PyTorch's, 2 m n k for a product (m, k) @ (k, n).

As there, attention counts every key, visible or not, once for each query head, and its backward counts the scores again. sdpa and
sdpa_with_lse have no formula: they decompose to sdpa_forward or to PyTorch's operators.

torch.utils.flop_counter imports triton where that is installed, which takes longer than all of this package. So it is not imported
here: the formulas are registered as soon as somebody else imports it.
"""

import importlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ._after_import import after_import

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


def _register() -> None:
    counter = importlib.import_module(_COUNTER)
    for name, formula in _FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.attention_ext, name))(formula)


def register() -> None:
    """Registers the formulas: now if torch.utils.flop_counter is there, else when it is imported."""
    after_import(_COUNTER, _register)
