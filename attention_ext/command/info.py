"""attention-ext info: what is installed, which card is there, and what it gains."""

import argparse
import importlib.metadata
import importlib.util
import platform
from typing import Any

import torch

from .._libraries import BUILD, CUDA_PROBLEM
from . import cards
from .cases import CASES, FOR_A_CARD
from .explanation import SPEED, speed_of
from .output import EXTRA, Table, facts, say, say_json

__all__ = ["built_for", "run"]


def built_for() -> str:
    if BUILD.cuda_major == 0:
        return "CPU only"
    missing = "" if BUILD.has_hopper_kernels else " without the kernels for Hopper (9.0a in TORCH_CUDA_ARCH_LIST builds them)"
    return BUILD.built_for + missing


def _extra(module: str, purpose: str) -> str:
    """Its version, or how to have it."""
    if importlib.util.find_spec(module) is None:
        return f"not installed ({purpose}: {EXTRA})"
    return importlib.metadata.version(module)


def gains(card: cards.Card | None) -> dict[str, list[str]]:
    """What the named cases stand for, by key of SPEED, on a card where this package's kernels run."""
    found: dict[str, list[str]] = {key: [] for key in SPEED}
    if card is not None:
        for name in FOR_A_CARD:
            found[speed_of(cards.explained(CASES[name], card))].append(CASES[name].what)
    return found


def _verdict(card: cards.Card | None) -> str:
    if card is None:
        why = f"{CUDA_PROBLEM} " if torch.cuda.is_available() and CUDA_PROBLEM else ""
        return f"{why}Without a GPU that is used nothing gets faster: on the CPU sdpa is PyTorch's operator. The functions work."
    if card.lacks_kernels:
        return "This is a Hopper card, and the build is without the kernels for it: nothing gets faster. Build with 9.0a."
    if card.is_hopper:
        return "The kernels are made for this card. Forward calls, by what was measured (docs/results.md has the figures):"
    return "The kernels run here and keep the contract, but nothing was measured faster: the fast ones are for Hopper (H100, H200)."


def run(args: argparse.Namespace) -> int:
    card = cards.at(torch.device("cuda")) if torch.cuda.is_available() else None
    used = card if CUDA_PROBLEM is None else None
    kernels = "loaded" if CUDA_PROBLEM is None else CUDA_PROBLEM
    gained = gains(used if used is not None and used.is_hopper and not used.lacks_kernels else None)
    pairs = {
        "attention_ext": f"{BUILD.version}, csrc {BUILD.csrc}",
        "built for": built_for(),
        "python, torch": f"{platform.python_version()}, {torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "CUDA device": str(card) if card else "none found",
        "libraries": "_C (schemas, planning): loaded",
        "": f"_cuda (kernels): {kernels}",
        "rich": _extra("rich", "tables and progress bars"),
        "matplotlib": _extra("matplotlib", "bench --plot"),
    }
    if args.json:
        about: dict[str, Any] = {"attention_ext": BUILD.version, "csrc": BUILD.csrc, "built_for": built_for()}
        about |= {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
        about |= {"device": card.name if card else None, "cuda_problem": CUDA_PROBLEM, "verdict": _verdict(used), "gains": gained}
        say_json(about)
        return 0
    facts(pairs)
    say()
    say(_verdict(used))
    if any(gained.values()):
        table = Table("call", "measured faster", texts=2)
        for key, whats in gained.items():
            for what in whats:
                table.add(what, SPEED[key][0], style="good" if key == "faster" else "")
        table.print()
    say()
    say("Next: attention-ext verify, attention-ext bench, attention-ext explain.")
    return 0
