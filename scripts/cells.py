"""Markdown of a table and of its cells."""

from collections.abc import Iterable

__all__ = ["short", "table"]


def table(header: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """Markdown of a table. header: the titles with | in between. None without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {header} |", "|---" * (header.count(" | ") + 1) + "|", *lines] if lines else []


def short(ms: float) -> str:
    return f"{ms:.{3 if ms < 1 else 2 if ms < 10 else 1}f}"
