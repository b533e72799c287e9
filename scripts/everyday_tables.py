"""Tables of what the scripts of bench/ find that scripts/gpu_check runs as parts: everyday calls, options, host time."""

from collections.abc import Callable, Iterable
from typing import Any

from cells import short, table

__all__ = ["EVERYDAY_TABLES", "everyday_text"]

WAYS = {"forward": "forward", "backward": "backward alone", "both": "both"}


def everyday_text(record: dict[str, Any]) -> str:
    """How many of the everyday calls are not slower, the least ratio and their mean, by direction; empty where none were timed."""
    found = record.get("everyday", {})
    parts = []
    for way, what in WAYS.items():
        if way in found.get("summary", {}):
            total = found["summary"][way]
            fast = f"{what} {total['compared'] - total['slower']} of {total['compared']}"
            parts.append(
                f"{fast} ({total['least'][0]:.2f} at the least, {total['geometric_mean_ratio']:.2f} in the geometric mean)"
            )
    if not parts:
        return ""
    text = f"Everyday calls (`bench/everyday.py`) at least {found['slower_below']} times as fast as PyTorch's default: "
    left_out = f" Left out for want of time: {found['left_out']}." if found["left_out"] else ""
    return f"{text}{', '.join(parts)}.{left_out}"


def broken_text(breaches: Iterable[str], lengths: set[int], broken: dict[str, Any]) -> str:
    """What bench/broken.py found of these breaches; of gradients at these numbers of keys and at 192."""
    parts = []
    for breach in sorted(set(breaches), reverse=True):
        if breach == "masked_rows":
            rows = broken.get(breach)
            parts.append(f"masked rows {rows['largest']:.2f}, not 0" if rows else "masked rows, not measured")
        else:
            seen = [row for row in broken.get(breach, ()) if row["S"] in {192, *lengths}]
            counts = [f"{row['not_finite']} of {row['of']} at S = {row['S']}" for row in seen]
            parts.append(f"gradients not finite: {', '.join(counts) or 'not measured'}")
    return "; ".join(parts)


def kernel(row: dict[str, Any], way: str) -> str:
    names = row["kernels"]
    own = [names[way], *([names["backward"]] if way == "both" and names["backward"] != names["both"] else [])]
    return ", ".join(f"`{name}`" for name in own)


def everyday_table(record: dict[str, Any]) -> list[str]:
    """By kind of call and head dim, then the slower ones."""
    found = record.get("everyday", {})
    rows, broken = found.get("rows", []), found.get("torch_broken", {})
    if not (text := everyday_text(record)):
        return []
    head_dims = sorted({row["E"] for row in rows})
    kinds: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["kind"], row["dtype"]), {})[row["E"]] = row
    lines = []
    for (kind, dtype), by_head_dim in kinds.items():
        cells = []
        for E in head_dims:
            ratios = [by_head_dim.get(E, {}).get(way, {}).get("ratio") for way in WAYS]
            cells.append(" ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None))
        wrong = {E: row for E, row in by_head_dim.items() if row.get("torch_breaks")}
        breaches = [breach for row in wrong.values() for breach in row["torch_breaks"].values()]
        where = f"at {', '.join(map(str, wrong))}: " if wrong else ""
        cells.append(where + broken_text(breaches, {row["S"] for row in wrong.values()}, broken))
        lines.append([f"{kind}, {dtype}", *cells])
    slower = [
        [
            *(row["name"], what, kernel(row, way), short(row[way]["ours"]), short(row[way]["torch"]), f"{row[way]['ratio']:.2f}"),
            *(
                row["torch_back_ends"][way],
                broken_text([row["torch_breaks"][way]] if way in row["torch_breaks"] else [], {row["S"]}, broken),
            ),
        ]
        for row in rows
        for way, what in WAYS.items()
        if row.get(way, {}).get("ratio", found["slower_below"]) < found["slower_below"]
    ]
    failed = [f"{row['name']}: {row[who]}" for row in rows for who in ("torch_failed", "ours_failed") if who in row]
    breach = "PyTorch's default breaks the contract"
    header = "call | direction | kernel | ours, ms | PyTorch, ms | ratio | PyTorch's back end"
    return [
        text,
        "",
        *table(f"kind, head dim | {' | '.join(map(str, head_dims))} | {breach}", lines),
        "",
        *(["Slower ones:", "", *table(f"{header} | {breach}", slower)] if slower else ["None is slower."]),
        *(["", f"Not measured: {'; '.join(failed)}."] if failed else []),
    ]


def variants_table(record: dict[str, Any]) -> list[str]:
    """What an option costs, by head dim, with its limit."""
    found = record.get("variants", {})
    rows = found.get("rows", [])
    head_dims = sorted({row["E"] for row in rows})
    costs: dict[str, dict[int, str]] = {}
    for row in rows:
        if "not_available" in row:
            cell = f"not measured: {row['not_available']}"
        else:
            cost = f"{row['ms_more']:.2f} ms more" if "ms_more" in row else f"{row['ratio']:.2f}"
            limit = f" (limit {row['limit']})" if row["limit"] is not None else ""
            cell = (cost if row["within"] else f"**{cost}**") + limit
        costs.setdefault(row["option"], {})[row["E"]] = cell
    lines = [[option, *(cells.get(E, "") for E in head_dims)] for option, cells in costs.items()]
    left_out = ["", f"Left out for want of time: {found['left_out']}."] if found.get("left_out") else []
    return table(f"option, head dim | {' | '.join(map(str, head_dims))}", lines) + left_out


def host_time_table(record: dict[str, Any]) -> list[str]:
    """Microseconds; the ratio is that of the slower of ours, next to the most that it is to be."""
    lines = []
    for row in record.get("host_time", ()):
        cells = [f"{row[who]:.1f}" if who in row else "" for who in ("operator", "function", "torch")]
        ratio = f"{row['ratio']:.2f}"
        lines.append([row["name"], *cells, f"{ratio if row['kept'] else f'**{ratio}**'} ({row['goal']})"])
    return table("call | `torch.ops.attention_ext` | `attention_ext` | PyTorch | ratio (at most)", lines)


def kernelbench_table(record: dict[str, Any]) -> list[str]:
    """A problem solved by examples/kernelbench and by the benchmark's own Model."""
    lines = []
    for row in record.get("kernelbench", ()):
        if "not_available" in row:
            lines.append([row["name"], f"not measured: {row['not_available']}", "", "", ""])
        else:
            times = [short(row[who]) for who in ("ours", "torch")]
            difference = f"{row['max_difference']:.1e}"
            if "limit" in row:
                difference = f"{difference if row['within_limit'] else f'**{difference}**'} ({row['limit']:.0e})"
            lines.append([row["name"], *times, f"{row['ratio']:.2f}", difference])
    return table("problem | the example, ms | PyTorch, ms | ratio | largest difference (at most)", lines)


EVERYDAY_TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "everyday": everyday_table,
    "variants": variants_table,
    "host_time": host_time_table,
    "kernelbench": kernelbench_table,
}
