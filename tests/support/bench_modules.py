"""The modules of bench/ and scripts/, which are no packages, for the tests of them."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from paths import ROOT

sys.path += [str(ROOT / "bench"), str(ROOT / "scripts")]

import cases
import common
import evidence
import linear_cases
import peers
import record
import record_shapes
from cases import CASES, MASKS, SETS, Case
from shapes import SHAPES

__all__ = ["CASES", "MASKS", "SETS", "SHAPES", "Case", "cases", "common", "evidence", "linear_cases", "peers"]
__all__ += ["record", "record_shapes", "script"]


def script(name: str, folder: str = "scripts") -> ModuleType:
    """The file of this name as a module of its own."""
    loader = SourceFileLoader(f"{Path(folder).name}_{Path(name).stem}", str(ROOT / folder / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
