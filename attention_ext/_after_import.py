"""Something to be done right after a module has been imported by someone else, without importing it here.

Strategies for DTensor operands can be registered only where torch.distributed.tensor is, whose import takes half a second, and
formulas for FLOPs where torch.utils.flop_counter is, whose import takes 80 ms with triton: nobody else should pay for them. There
are no DTensors and no counters before, so the end of the import is early enough for every call in every mode. To look for DTensors
among the operands of each call would take Python kernels at the key Autograd, which inference mode skips.

The hook is a finder in front of sys.meta_path. It finds nothing by itself: it lets the others find the module and adds a last step
to the loader instance that they made for it. After that step both are as they were before; after a failed import the hook stays.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["after_import"]


class _Hook(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                del loader.exec_module
                self.remove()
                self.action()

            loader.exec_module = exec_module
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def after_import(name: str, action: Callable[[], None]) -> None:
    """Calls action() right after the first import of the module `name`, at once if it has been imported."""
    hook = _Hook(name, action)
    sys.meta_path.insert(0, hook)  # before the look at sys.modules: another thread may begin the import in between
    if name in sys.modules:
        hook.remove()
        importlib.import_module(name)  # waits for a thread that is in the middle of it
        action()
