"""Fills the examples of README.md and docs/: below each line `$ attention-ext ...` what the command prints.

    python scripts/make_examples.py [--check]

With --check it only compares. What differs from machine to machine does not count: numbers of verify, and all of info but the names
of its lines. Needs the package installed, or built in place.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from attention_ext.__main__ import main as command  # noqa: E402

EXAMPLE = re.compile(r"^(```\n\$ attention-ext ([^\n]*)\n)(.*?)^```", re.DOTALL | re.MULTILINE)


def output(line: str) -> str:
    """What the command prints to a pipe, given these arguments."""
    out, before = io.StringIO(), Path.cwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(out):
            command(shlex.split(line))
    finally:
        os.chdir(before)
    return out.getvalue()


def essence(line: str, text: str) -> str:
    """What of an example does not depend on the machine."""
    if line.startswith("info"):
        return "\n".join(re.findall(r"^[a-z]\S*(?: \S+)*(?=  )", text, re.MULTILINE))
    if line.startswith("verify"):
        return re.sub(r"[ \d.e+-]+(cpu|cu\d+)?", "#", text)
    return text


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with its examples as they print now, where that matters."""

    def of(place: re.Match[str]) -> str:
        new = output(place[2])
        return place[0] if essence(place[2], new) == essence(place[2], place[3]) else f"{place[1]}{new}```"

    return EXAMPLE.sub(of, text)


def main() -> int:
    stale = 0
    for page in pages():
        old = page.read_text()
        new = filled(old)
        if new != old and "--check" not in sys.argv:
            page.write_text(new)
        elif new != old:
            stale += 1
            print(f"{os.path.relpath(page, ROOT)} does not have what attention-ext prints; run python scripts/make_examples.py")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
