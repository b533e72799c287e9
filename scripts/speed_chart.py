"""The README's chart: TFLOP/s of the forward in half precision by head dim, from a record of scripts/gpu_check, as SVG.

This package's own kernels, also where sdpa runs PyTorch's, next to PyTorch's default and the three calls (softmax(Q K^T) V), light
or dark as the reader's screen. scripts/make_tables.py writes it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 880, 400
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 96, 52  # margins of the plot
BAR, GAP = 22, 2  # a bar, between the bars of a head dim
STEP = 200  # TFLOP/s between two lines
SERIES = {
    "ours": "attention_ext's own kernels",
    "torch": "PyTorch's default",
    "naive": "three calls: q k^T, softmax, times v",
}  # class of the bars -> legend
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 }
.small, .value { font-size: 10px }
.value, .axis { text-anchor: middle }
.tick { text-anchor: end }
.page { fill: #ffffff }
.ours { fill: #0969da }
.torch { fill: #8c959f }
.naive { fill: #d4a72c }
line { stroke: #d1d9e0 }
.bound { stroke: #59636e; stroke-dasharray: 6 4 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .page { fill: #0d1117 }
  .ours { fill: #4493f8 }
  .torch { fill: #9198a1 }
  .naive { fill: #bb8009 }
  line { stroke: #3d444d }
  .bound { stroke: #9198a1 }
}
"""


class Point(NamedTuple):
    """One head dim: TFLOP/s of each series, None where it was not measured."""

    head_dim: int
    causal: bool
    ours: float
    torch: float
    naive: float | None


def points(record: dict[str, Any]) -> list[Point]:
    """By head dim the half-precision case by own kernels with as many key as query heads, values as wide as keys and a warm L2:
    without a causal mask if there is one, of those the one with the most operations, of those the one with the most keys."""
    best: dict[int, tuple[tuple[bool, int, int], Point]] = {}
    for case in record["forward"].values():
        rates = {name: row["tflops"] for name, row in case["rows"].items() if "tflops" in row}
        half = case["dtype"] in ("torch.float16", "torch.bfloat16") and case.get("Ev", case["E"]) == case["E"]
        own = not case["kernel"].startswith("torch: ") and not case.get("cold_l2")
        if half and own and case["Hq"] == case["Hk"] and {"attention_ext", "torch"} <= rates.keys():
            order = (not case["causal"], case["B"] * case["Hq"] * case["L"] * case["S"], case["S"])
            point = Point(case["E"], case["causal"], rates["attention_ext"], rates["torch"], rates.get("naive"))
            best[point.head_dim] = max(best.get(point.head_dim, (order, point)), (order, point), key=lambda found: found[0])
    return [best[head_dim][1] for head_dim in sorted(best)]


def element(name: str, text: str = "", **attributes: object) -> str:
    given = "".join(f' {key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{given}>{escape(text)}</{name}>" if text else f"<{name}{given}/>"


def bars(shown: list[Point], top: float) -> Iterator[str]:
    """The bars with their numbers and head dims."""
    pitch = (WIDTH - LEFT - RIGHT) / len(shown)
    floor, height = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    for index, point in enumerate(shown):
        middle = LEFT + pitch * (index + 0.5)
        for place, series in enumerate(SERIES, start=-1):
            rate, x = getattr(point, series), middle + place * (BAR + GAP)
            if rate is not None:
                y = floor - rate / top * height
                size = {"x": f"{x - BAR / 2:.1f}", "y": f"{y:.1f}", "width": BAR, "height": f"{floor - y:.1f}"}
                yield element("rect", class_=series, **size)
                yield element("text", f"{rate:.0f}", class_="value", x=f"{x:.1f}", y=f"{y - 3:.1f}")
        yield element("text", str(point.head_dim), class_="axis", x=f"{middle:.1f}", y=floor + 16)
        if point.causal:
            yield element("text", "causal", class_="axis small", x=f"{middle:.1f}", y=floor + 28)


def chart(record: dict[str, Any]) -> str:
    """The whole picture."""
    shown = points(record)
    bound = max(record["ceilings"][f"matmul_{kind}_tflops"] for kind in ("fp16", "bf16"))
    top = STEP * (1 + max(bound, *(point.torch for point in shown), *(point.ours for point in shown)) // STEP)
    floor, height = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    heading = "Attention forward in half precision: TFLOP/s by head dim (more is faster)"
    card = (
        f"{record['card']}, csrc {record['csrc_tree'][:12]}, torch {record['torch']}, {record['date']}; "
        f"dashed: a matrix product, {bound:.0f} TFLOP/s"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        element("title", f"{heading}. {card}"),
        f"<style>{STYLE}</style>",
        element("rect", class_="page", width=WIDTH, height=HEIGHT),
        element("text", heading, class_="title", x=LEFT, y=24),
        element("text", card, x=LEFT, y=44),
    ]
    for index, (series, label) in enumerate(SERIES.items()):
        x = LEFT + 200 * index
        parts += [element("rect", class_=series, x=x, y=56, width=12, height=12), element("text", label, x=x + 18, y=66)]
    for rate in range(0, int(top) + 1, STEP):
        y = f"{floor - rate / top * height:.1f}"
        parts += [
            element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y),
            element("text", str(rate), class_="tick", x=LEFT - 8, y=y, dy=4),
        ]
    y = f"{floor - bound / top * height:.1f}"
    parts.append(element("line", class_="bound", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
    parts += bars(shown, top)
    if absent := [str(point.head_dim) for point in shown if point.naive is None]:
        note = f"three calls not measured at head dim {', '.join(absent)}"
        parts.append(element("text", note, class_="small", x=LEFT, y=HEIGHT - 8))
    return "\n".join([*parts, "</svg>"]) + "\n"
