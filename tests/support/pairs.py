"""The default set of tests: of each test, cases that show every pair of values of two of its parameters.

Of a test marked each_value they show every value: its parameters hardly act on each other, or a case takes long.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest


def _key(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:  # a list or a dict is one object in all the cases it is in
        return id(value)
    return type(value), value


def cover(cases: Sequence[Mapping[str, object]], at_once: int = 2) -> list[int]:
    """Which of the cases, each {parameter: value}, show every pair of values of two parameters that any of them shows.

    Again and again the case with the most new pairs, of these the one with the rarest, of these the first. Of one parameter every
    value is kept. at_once: how many parameters are looked at together; 1 for every value instead of every pair.
    """
    numbers: dict[Hashable, int] = {}
    pairs: list[list[int]] = []
    for case in cases:
        values = [(name, _key(value)) for name, value in case.items()]
        pairs.append([numbers.setdefault(pair, len(numbers)) for pair in combinations(values, min(at_once, len(values)))])
    shown = [sum(1 << pair for pair in of_case) for of_case in pairs]  # sets as bits
    missing, seen = (1 << len(numbers)) - 1, Counter[int]()
    kept: list[int] = []
    rest = list(range(len(cases)))
    while missing:
        new = [(shown[i] & missing).bit_count() for i in rest]
        most = max(new)
        best = max(
            (i for i, count in zip(rest, new, strict=True) if count == most), key=lambda i: -sum(seen[pair] for pair in pairs[i])
        )
        rest = [i for i, count in zip(rest, new, strict=True) if count and i != best]
        kept.append(best)
        missing &= ~shown[best]
        seen.update(pairs[best])
    return sorted(kept)


def every_pair(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The default set, in the order of `items`. Cases of a GPU count apart: without one they show nothing."""
    tests: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        tests[item.nodeid.partition("[")[0], "gpu" in item.keywords].append(number)
    kept: list[int] = []
    for cases in tests.values():
        params = [items[number].callspec.params if hasattr(items[number], "callspec") else {} for number in cases]
        at_once = 1 if items[cases[0]].get_closest_marker("each_value") else 2
        kept += [cases[i] for i in cover(params, at_once)]
    return [items[number] for number in sorted(kept)]
