"""What other libraries and PyTorch's fused back ends take beside ours: a record of bench/results -> lines of Markdown."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from cells import short, table

__all__ = ["peers_table", "peers_text"]

# Rows of a case -> what they are called, and the version's name in the record's "peers".
PEERS = {"ffpa": ("FFPA", "ffpa_attn"), "fa4": ("FlashAttention-4", "flash_attn_4")}
WAYS = ("forward", "backward")
BACK_ENDS = {"torch_cudnn": "PyTorch's cuDNN", "torch_flash": "PyTorch's FlashAttention-2"}


class Pair(NamedTuple):
    """Milliseconds of another one and of ours next to it."""

    theirs: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


class Line(NamedTuple):
    name: str
    way: str
    kernel: str
    ours: float
    others: dict[str, Pair]


def lines_of(record: dict[str, Any]) -> Iterator[Line]:
    """Of each case and direction that one of them was timed on."""
    for name, case in record["forward"].items():
        rows = {who: row for who, row in case["rows"].items() if "ms" in row}
        if ours := rows.get("attention_ext"):
            others = {who: Pair(rows[who]["ms"], rows[who]["ours_ms_in_between"]) for who in PEERS if who in rows}
            others |= {who: Pair(rows[who]["ms"], ours["ms"]) for who in BACK_ENDS if who in rows}
            if others:
                yield Line(name, "forward", f"`{case['kernel']}`", ours["ms"], others)
    for name, case in record.get("backward", {}).items():
        # What sdpa runs is its own entry where own kernels have one; there PyTorch's back ends stand next to those.
        if "attention_ext" in case and f"{name} own" not in record["backward"]:
            rows = {who: case[who] for who in PEERS if "backward" in case.get(who, {})}
            others = {who: Pair(row["backward"], row["ours_backward"]) for who, row in rows.items()}
            others |= {who: Pair(case[who], case["attention_ext"]) for who in BACK_ENDS if who in case}
            if others:
                yield Line(name, "backward", "", case["attention_ext"], others)


def title(record: dict[str, Any], who: str) -> str:
    name, version = PEERS[who]
    return f"{name} {record.get('peers', {}).get(version, '')}".strip()


def peers_table(record: dict[str, Any]) -> list[str]:
    """A line for each case and direction, a column for each that was timed on one."""
    lines = list(lines_of(record))
    titles = {who: title(record, who) for who in PEERS} | BACK_ENDS
    shown = [who for who in titles if any(who in line.others for line in lines)]
    rows = []
    for line in lines:
        cells = [f"{short(line.others[who].theirs)} ({line.others[who].ratio:.2f})" if who in line.others else "" for who in shown]
        rows.append([line.name + ", backward" * (line.way == "backward"), line.kernel, short(line.ours), *cells])
    return table(f"case | kernel | ours, ms | {' | '.join(f'{titles[who]}, ms (times ours)' for who in shown)}", rows)


def peers_text(record: dict[str, Any]) -> str:
    """How many times our time each of PEERS takes, at the least and at the most; nothing where none was timed."""
    lines, parts = list(lines_of(record)), []
    for who in PEERS:
        found = {way: [line.others[who].ratio for line in lines if line.way == way and who in line.others] for way in WAYS}
        ranges = [f"{min(ratios):.2f} to {max(ratios):.2f} times our time {way}" for way, ratios in found.items() if ratios]
        if ranges:
            parts.append(f"{title(record, who)} takes {', '.join(ranges)}")
    return f"In one process, {'; '.join(parts)}." if parts else ""
