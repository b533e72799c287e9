"""What the command prints with: tables, paragraphs, a progress bar; by rich on a terminal where it is there, else plain.

Results go to stdout, progress and remarks to stderr. Where a stream is no terminal, or a dumb one, nothing but plain text goes
there, a row of a table on a line of its own. NO_COLOR is rich's affair.
"""

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

__all__ = ["EXTRA", "Progress", "Table", "facts", "remark", "say", "say_json"]

EXTRA = "pip install 'attention_ext[cli]'"
_PLAIN_WIDTH = 80
_STYLES = {"good": "green", "bad": "red", "": ""}


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _is_rich(stream: TextIO) -> bool:
    """Whether rich is to write there."""
    if not _is_terminal(stream):
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def _width() -> int:
    return shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns if sys.stdout.isatty() else _PLAIN_WIDTH


def _filled(text: str, indent: int = 0) -> str:
    """Lines as wide as the screen; those after the first are indented."""
    width = max(_width(), indent + 20)
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def say(text: str = "") -> None:
    """A paragraph on stdout."""
    print(_filled(text))


def facts(pairs: dict[str, str]) -> None:
    """A name and what there is to say about it, on stdout, pair by pair."""
    width = max(map(len, pairs)) + 2
    for name, text in pairs.items():
        print(_filled(f"{name:{width}}{text}", width))


def remark(text: str) -> None:
    """A line on stderr: of no concern to whoever reads the result from a pipe."""
    print(text, file=sys.stderr, flush=True)


def _finite(record: Any) -> Any:
    """The record with null for numbers that JSON has not."""
    if isinstance(record, dict):
        return {key: _finite(value) for key, value in record.items()}
    if isinstance(record, list):
        return [_finite(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


def say_json(record: Any) -> None:
    print(json.dumps(_finite(record), indent=1, allow_nan=False))


class Table:
    """Rows of text on stdout. The first `texts` columns and those called "" are aligned at the left, all others at the right."""

    def __init__(self, *columns: str, texts: int = 1) -> None:
        self.columns, self.texts = columns, texts
        self.rows: list[tuple[Sequence[str], str]] = []

    def add(self, *cells: str, style: str = "") -> None:
        """style: "good", "bad" or ""."""
        self.rows.append((cells, style))

    def _at_left(self, index: int) -> bool:
        return index < self.texts or not self.columns[index]

    def _wraps(self, index: int) -> bool:
        """Whether a column's text may go on in another line."""
        return index > 0 and self._at_left(index)

    def _lines(self) -> list[Sequence[str]]:
        return [*[self.columns] * any(self.columns), *(cells for cells, _ in self.rows)]

    def _fits(self) -> bool:
        """Whether the screen is as wide as what is not broken: columns that do not wrap, and the words of those that do."""
        least = 0
        for index in range(len(self.columns)):
            cells = [line[index] for line in self._lines()]
            words = [word for cell in cells for word in cell.split()] if self._wraps(index) else cells
            least += 2 + max(map(len, words), default=0)
        return least <= _width()

    def print(self) -> None:
        if _is_rich(sys.stdout) and self._fits():
            self._print_by_rich()
        else:
            self._print_plain()

    def _print_by_rich(self) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="", show_header=any(self.columns)
        )
        for index, name in enumerate(self.columns):
            side = "left" if self._at_left(index) else "right"
            table.add_column(name, justify=side, overflow="fold", no_wrap=not self._wraps(index))
        for cells, style in self.rows:
            table.add_row(*(Text(cell) for cell in cells), style=_STYLES[style])
        Console().print(table)

    def _print_plain(self) -> None:
        lines = self._lines()
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        before = sum(widths[:-1]) + 2 * (len(widths) - 1)
        for line in lines:
            pairs = enumerate(zip(line, widths, strict=True))
            text = "  ".join(f"{cell:{'<' if self._at_left(i) else '>'}{width}}" for i, (cell, width) in pairs).rstrip()
            print(_filled_after(text, before) if sys.stdout.isatty() and not self.columns[-1] else text)


def _filled_after(line: str, before: int) -> str:
    """A row whose last column, which begins at `before`, goes on below itself where the screen ends."""
    head, rest = line[:before], line[before:]
    return head + textwrap.fill(rest, max(_width() - before, 20), subsequent_indent=" " * before) if rest else line


class Progress:
    """How many of `total` steps are done: a bar by rich, one line without it, nothing where stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._bar: Any = None
        self._wide = 0

    def __enter__(self) -> "Progress":
        if _is_rich(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def step(self, *about: object) -> None:
        """Another step is done. about: of what; its texts make the label."""
        label = ": ".join(text for text in about if isinstance(text, str))
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=label)
        elif _is_terminal(sys.stderr):
            line = f"{label}: {self._done} of {self._total}"[: _PLAIN_WIDTH - 1]
            self._wide = max(self._wide, len(line))
            print(f"\r{line:{self._wide}}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._wide:
            print(f"\r{'':{self._wide}}\r", end="", file=sys.stderr, flush=True)
