"""What an eager call came to, kept for the calls like it, which then run at once.

Checks, route and choice take the host longer than a whole operator of PyTorch's on the CPU. Nothing is decided here: who decides
keeps here how the call is run. Calls are alike where PyTorch's own guard, the one of a compiled graph, finds their tensors alike,
and their outlines are equal: all else that is looked at. Shapes repeat from layer to layer and from step to step, so few calls are
new.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from ._log import is_logging
from ._torch_private import alike, autocasts, dispatch_modes, forward_mode_is_open, jit_traces, keys_are_added, transforms

__all__ = ["ARRAYS", "Known", "Sample", "is_array", "is_seen"]

_Outline = Callable[[], Hashable]
_Runs = dict[Hashable, list[tuple[Callable[..., bool], Any]]]  # by outline: the guard of the tensors, how the call is run
_MOST, _MOST_ALIKE = 2048, 16  # outlines, and calls of one outline; beyond them all is forgotten
ARRAYS = (Tensor, torch.nn.Parameter)  # classes that leave all to the operators


class Known:
    """How calls of one operator are run."""

    def __init__(self) -> None:
        self._runs: dict[bool, _Runs] = {False: {}, True: {}}  # by whether autograd records

    def find(self, outline: Hashable, *tensors: Any) -> Any:
        """What was kept of a call like this one; None where there is nothing, and where calls are logged or seen by a mode.

        The guard is blind to the modes that tracing is made of.
        """
        if is_logging() or dispatch_modes() or forward_mode_is_open():
            return None
        for is_like, run in self._runs[is_grad_enabled()].get(outline, ()):
            if is_like(*tensors):
                return run
        return None

    def keep(self, outline: Hashable, is_like: Callable[..., bool], run: Any) -> None:
        runs = self._runs[is_grad_enabled()]
        if len(runs) >= _MOST:
            runs.clear()
        same = runs.setdefault(outline, [])
        if len(same) >= _MOST_ALIKE:
            same.clear()
        same.append((is_like, run))


def is_array(tensor: Any) -> bool:
    """Whether a tensor is just what lies in memory, and something lies there."""
    if type(tensor) not in ARRAYS or tensor.is_nested or tensor.layout != torch.strided:
        return False
    return tensor.data_ptr() != 0 and not tensor.is_neg()


def is_seen() -> bool:
    """Whether a mode, a transform or a trace is to see the calls that are made here and now."""
    return bool(dispatch_modes() or transforms() or keys_are_added() or jit_traces() or forward_mode_is_open())


class Sample:
    """A call before it is decided how it is run, if no class, mode or transform has a say in it."""

    def __init__(self, known: Known, outline: _Outline, *tensors: Any) -> None:
        plain = not (is_seen() or autocasts() or torch.compiler.is_compiling())
        self.counts = plain and all(map(is_array, tensors))
        if self.counts:
            self.known, self.outline, self.before, self.is_like = known, outline, outline(), alike(*tensors)

    def keep(self, run: Callable[[], Any]) -> None:
        """Keeps what `run` says, unless another thread has changed a setting meanwhile."""
        if self.counts and self.outline() == self.before:
            self.known.keep(self.before, self.is_like, run())
