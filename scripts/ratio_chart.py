"""The results page's charts: PyTorch's time / ours for every case of a record of scripts/gpu_check, slower ones too, as SVG.

A bar to the right of the line at 1 is a case where ours is faster, one to the left where it is slower. The scale is logarithmic.
scripts/make_tables.py writes one for each card.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from speed_chart import STYLE, element

WIDTH, LEFT, RIGHT, TOP = 880, 370, 56, 84
ROW, BAR = 18, 12  # heights of a row and of its bar
OWN_STYLE = ".slower { fill: #d4a72c } .name { text-anchor: end } .one { stroke: #59636e } @media (prefers-color-scheme: dark) {"
OWN_STYLE += " .slower { fill: #bb8009 } .one { stroke: #9198a1 } }"


class Bar(NamedTuple):
    group: str
    name: str
    ratio: float


def kind_of(case: dict[str, Any]) -> str:
    words = [f"head dim {case['E']}", case["dtype"].removeprefix("torch."), *["causal"] * case["causal"]]
    return ", ".join([*words, *["1 query"] * (case["L"] == 1), *["grouped"] * (case["Hq"] != case["Hk"])])


def ratios(record: dict[str, Any]) -> list[Bar]:
    """All that was compared. A name with "own" is the case by this package's kernels where sdpa may take PyTorch's."""
    found = []
    for name, case in record["forward"].items():
        if case.get("ratio_to_torch"):
            found.append(Bar("Forward", f"{name}: {kind_of(case)}", case["ratio_to_torch"]))
    for name, row in record.get("backward", {}).items():
        if {"attention_ext", "torch"} <= row.keys():
            about = record["forward"].get(name)
            found.append(Bar("Backward alone", f"{name}: {kind_of(about)}" if about else name, row["torch"] / row["attention_ext"]))
    for name, case in record.get("linear", {}).items():
        if case.get("ratio_to_torch"):
            found.append(Bar("Linear layers, float32", name, case["ratio_to_torch"]))
    return found


def rows(bars: list[Bar], place: Any) -> Iterator[str]:
    """The bars with their names and numbers, group by group. place: from a ratio to an x."""
    y, group, one = float(TOP), "", place(1.0)
    for bar in bars:
        if bar.group != group:
            group, y = bar.group, y + ROW
            yield element("text", group, class_="title", x=8, y=f"{y:.0f}")
            y += ROW / 2
        end = place(bar.ratio)
        size = {"x": f"{min(one, end):.1f}", "y": f"{y:.1f}", "width": f"{abs(end - one):.1f}", "height": BAR}
        yield element("text", bar.name, class_="name", x=LEFT - 8, y=f"{y + BAR - 2:.1f}")
        yield element("rect", class_="ours" if bar.ratio >= 1.0 else "slower", **size)
        yield element("text", f"{bar.ratio:.2f}", x=f"{max(one, end) + 4:.1f}", y=f"{y + BAR - 2:.1f}")
        y += ROW


def ratio_chart(record: dict[str, Any]) -> str:
    """The whole picture."""
    bars = ratios(record)
    least, most = (math.log2(limit(*(bar.ratio for bar in bars), 1.0)) for limit in (min, max))
    low, high = math.floor(least), math.ceil(most)

    def place(ratio: float) -> float:
        return LEFT + (math.log2(ratio) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    height = round(TOP + ROW * (len(bars) + 1.5 * len({bar.group for bar in bars})) + ROW)
    heading = "PyTorch's time / ours (more than 1: ours is faster)"
    card = f"{record['card']}, csrc {record['csrc_tree'][:12]}, torch {record['torch']}, {record['date']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        element("title", f"{heading}. {card}"),
        f"<style>{STYLE}{OWN_STYLE}</style>",
        element("rect", class_="page", width=WIDTH, height=height),
        element("text", heading, class_="title", x=8, y=24),
        element("text", card, x=8, y=44),
    ]
    for power in range(low, high + 1):
        x = f"{place(2.0**power):.1f}"
        parts.append(element("line", class_="one" if power == 0 else "", x1=x, x2=x, y1=TOP - 8, y2=height - ROW // 2))
        parts.append(element("text", f"{2.0**power:g}", class_="axis", x=x, y=TOP - 14))
    return "\n".join([*parts, *rows(bars, place), "</svg>"]) + "\n"
