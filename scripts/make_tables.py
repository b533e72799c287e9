"""Fills the tables of README.md and docs/*.md from bench/results and draws their charts: `python scripts/make_tables.py`.

With --check it only compares. A page marks the place of a table of TABLES as
<!-- table NAME: python scripts/make_tables.py --> ... <!-- end of table -->. The README shows one card, docs/results.md all.
"""

import json
import re
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from client_tables import CLIENT_TABLES, client_title
from ratio_chart import ratio_chart
from speed_chart import chart
from tables import CHART, README_TABLES, TABLES, ratios_path, title

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"(<!-- table (\w+): python scripts/make_tables.py -->\n).*?(<!-- end of table -->)", re.DOTALL)
WIDTH = 132


def records() -> dict[Path, dict[str, Any]]:
    """Of the CPU and of every card; not an outcome of two cards alone, nor other measurements."""
    found = {path: json.loads(path.read_text()) for path in sorted((ROOT / "bench" / "results").glob("*.json"))}
    return {path: record for path, record in found.items() if path.stem == "cpu" or "forward" in record}


def newest(found: dict[Path, dict[str, Any]]) -> Path:
    """The card that the README shows, sound or not, which its title says: of those measured on one day, the last by name."""
    return max((record["date"], path) for path, record in found.items() if "sound" in record)[1]


def filled(place: re.Match[str], found: dict[Path, dict[str, Any]]) -> str:
    """The place with its table from every record of the CPU or of a card that has it, each with where it is from."""
    lines: list[str] = []
    if place[2] in CLIENT_TABLES:
        begin, made_by, command = CLIENT_TABLES[place[2]]
        for path in sorted((ROOT / "bench" / "results").glob(f"{begin}*.json")):
            record = json.loads(path.read_text())
            lines += [client_title(record), "", *made_by(record), "", f"From `bench/results/{path.name}`, by `{command}`.", ""]
    for path, record in found.items() if place[2] not in CLIENT_TABLES else ():
        if (path.stem == "cpu") == (place[2] == "cpu") and (place[2] not in README_TABLES or path == newest(found)):
            command = "bench/record_cpu.py" if path.stem == "cpu" else "scripts/gpu_check WHEEL"
            if made := TABLES[place[2]](record):
                lines += [*([] if place[2] == "chart" else [title(record), ""]), *made, ""]
                lines += [] if place[2] == "chart" else [f"From `bench/results/{path.name}`, by `{command}`.", ""]
    wrap = partial(textwrap.fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)
    return "".join([place[1], *((line if line[:1] in ("|", "!") else wrap(line)) + "\n" for line in lines), place[3]])


def outputs() -> dict[Path, str]:
    """Every file that is made from the records, and its text."""
    found = records()
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    made = {page: PLACE.sub(lambda place: filled(place, found), page.read_text()) for page in pages}
    made |= {ROOT / "docs" / ratios_path(record): ratio_chart(record) for record in found.values() if "forward" in record}
    return made | {ROOT / CHART: chart(found[newest(found)])}


def main() -> int:
    stale = 0
    for path, text in outputs().items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale += 1
            print(f"{path.relative_to(ROOT)} is not what bench/results gives; run python scripts/make_tables.py")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
