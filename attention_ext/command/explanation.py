"""attention-ext explain: which kernel a call would run, and why, on the device at hand or on a card that need not be there."""

import argparse
from dataclasses import asdict
from typing import Any

import torch

from .. import Explanation, explain
from .._libraries import BUILD
from . import cards
from .cases import CASES, FOR_A_CARD, Case
from .output import Table, facts, say, say_json
from .timing import size_text

__all__ = ["SPEED", "run", "speed_of"]

SPEED = {  # what an own kernel that is preferred, another one and PyTorch's own come to, in a word and in a clause
    "faster": ("yes", "measured faster than PyTorch's operator: attention_ext.preferred is True"),
    "own": ("not counted", "not counted as faster than PyTorch's operator; docs/results.md has what was measured"),
    "torch": ("no, PyTorch's", "PyTorch's own kernel runs: nothing is gained"),
}


def speed_of(found: Explanation) -> str:
    """A key of SPEED."""
    return "faster" if found.preferred else "torch" if found.kernel.startswith("torch") else "own"


def _on_device(case: Case, device: torch.device, backward: bool) -> Explanation:
    q, k, v = (torch.empty(shape, dtype=case.dtype, device=device, requires_grad=backward) for shape in case.shapes)
    return explain(q, k, v, **case.options)


def _explained(case: Case, card: cards.Card | None, device: torch.device, backward: bool) -> Explanation:
    return _on_device(case, device, backward) if card is None else cards.explained(case, card, backward)


def _call(case: Case) -> str:
    return ", ".join(["attention_ext.sdpa(query, key, value", *(f"{name}=True" for name in case.options)]) + ")"


def _entry(case: Case, found: Explanation, card: cards.Card | None, backward: bool) -> dict[str, Any]:
    entry = case.record | asdict(found) | {"call": _call(case)}
    own = card is not None and not found.kernel.startswith("torch")
    return entry | ({"backward": cards.backward_kernel(case, card) if own and card else found.kernel} if backward else {})


def _show_one(case: Case, entry: dict[str, Any], found: Explanation) -> None:
    say(f"{case.name}: {case}")
    pairs = {"kernel": entry["kernel"]}
    if "backward" in entry:
        pairs["backward"] = entry["backward"]
    pairs |= {"because": entry["reason"], "workspace": size_text(entry["workspace"]), "faster": SPEED[speed_of(found)][1]}
    facts(pairs | {"call": entry["call"]})


def _show_all(shown: list[tuple[Case, dict[str, Any], Explanation]], backward: bool) -> None:
    table = Table("case", "for", "kernel", *["backward"] * backward, "faster", texts=5)
    for case, entry, found in shown:
        key = speed_of(found)
        more = [entry["backward"]] if backward else []
        table.add(case.name, case.what, entry["kernel"], *more, SPEED[key][0], style="good" if key == "faster" else "")
    table.print()


def run(args: argparse.Namespace) -> int:
    card: cards.Card | None = cards.CARDS[args.card] if args.card else None
    named = args.cases or [CASES[name] for name in FOR_A_CARD]
    if card is None and not args.cases and args.device.type == "cpu":
        card = cards.CARDS["h100"]  # of a CPU there is but one thing to say
        where = f"No CUDA device is used here. On {card} it would be:"
    elif card is not None:
        where = f"On {card}, which need not be there:"
    else:
        where = "On the CPU:" if args.device.type == "cpu" else f"On {cards.at(args.device)}:"
    real = cards.at(args.device) if card is None and args.device.type == "cuda" else card
    shown = []
    for case in named:
        found = _explained(case, card, args.device, args.backward)
        shown.append((case, _entry(case, found, real, args.backward), found))
    if args.json:
        say_json({"device": real.name if real else "cpu", "cases": [entry for _, entry, _ in shown]})
        return 0
    say(where)
    if len(shown) == 1:
        _show_one(*shown[0])
    else:
        _show_all(shown, args.backward)
    if real is not None and real.is_hopper and not BUILD.has_hopper_kernels:
        say()
        say("This build is without the kernels for Hopper; attention-ext info says what it is for.")
    if real is None:
        say()
        say("On the CPU nothing gets faster: sdpa is PyTorch's own operator. --card h100 says what would run on that card.")
    return 0
