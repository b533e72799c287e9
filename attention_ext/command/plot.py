"""bench --plot: a picture of a record by matplotlib, bars of milliseconds for each case."""

import importlib.util
from pathlib import Path
from typing import Any

from .cases import Case
from .output import EXTRA

__all__ = ["SUFFIXES", "problem", "save"]

SUFFIXES = (".svg", ".png")
_COLOURS = {"attention_ext": "#0969da", "three calls": "#d4a72c"}
_OTHERS = "#8c959f"


def problem(file: str) -> str:
    """Why there can be no picture in this file; empty where there can."""
    path = Path(file)
    if path.suffix not in SUFFIXES:
        return f"expected a file that ends in {' or '.join(SUFFIXES)}, got {file}"
    if not path.parent.is_dir():
        return f"expected a file in a folder that is there, got {file}"
    if importlib.util.find_spec("matplotlib") is None:
        return f"this needs matplotlib: {EXTRA}"
    return ""


def save(record: dict[str, Any], file: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = record["cases"]
    heights = [len(entry["rows"]) for entry in entries]
    figure = Figure(figsize=(9, 1 + sum(0.3 * count + 0.9 for count in heights)), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(len(entries), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, entry in zip(places, entries, strict=True):
        names = list(entry["rows"])
        rows = list(entry["rows"].values())
        times = [row.get("ms", 0.0) for row in rows]
        errors = [[row["ms"] - row["low_ms"] if "ms" in row else 0.0 for row in rows],
                  [row["high_ms"] - row["ms"] if "ms" in row else 0.0 for row in rows]]  # fmt: skip
        axes.barh(names, times, xerr=errors, color=[_COLOURS.get(name, _OTHERS) for name in names], ecolor="#57606a")
        for place, row in enumerate(rows):
            end = row["high_ms"] if "ms" in row else 0.0
            text = f"{row['ms']:.3g} ms" if "ms" in row else row["reason"]
            axes.annotate(text[:90], (end, place), (5, 0), textcoords="offset points", va="center", fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{entry['name']}: {Case.of_record(entry)}", loc="left", fontsize="small")
    places[-1].set_xlabel("milliseconds a call, median and quartiles; less is faster")
    figure.suptitle(f"attention_ext {record['attention_ext']}, torch {record['torch']}, {record['device']}", fontsize="medium")
    figure.savefig(file)
