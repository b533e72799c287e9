"""Files of scripts/ and examples/ as modules; those of bench/ and scripts/ that are on pytest's path need no help."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from paths import ROOT


def script(name: str, folder: str = "scripts") -> ModuleType:
    """The file of this name as a module of its own."""
    loader = SourceFileLoader(f"{Path(folder).name}_{Path(name).stem}", str(ROOT / folder / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
