"""Writes attention_ext/attention/routes.py from bench/results/backends_*.json; with --check only compares.

    python scripts/make_routes.py [--check]

A record has a row for each call of bench/everyday.py: what PyTorch's operator chose by default, and the milliseconds of ours, of
PyTorch's default ("torch") and of its back ends, for the forward alone and for both directions. A kind of call is decided by the
rows in KINDS: a back end is in the table up to the widest head dim at which it was at least FASTER times as fast as ours in the
geometric mean of them, and at least LEAST times in each.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "attention_ext" / "attention" / "routes.py"
FASTER, LEAST = 1.05, 0.97
BACK_ENDS = ("cudnn", "flash", "efficient")  # in the order in which they are tried

_PLAIN = ("plain", "cross", "odd length", "few queries", "batch of one", "short")
_CAUSAL = ("causal", "grouped causal")
# dtypes: kind: the rows that decide it, each by its name. float32 is left out, though the memory-efficient kernels were faster:
# their products in three TF32 terms do not give the value itself where a row sees one key alone, and miss the error rule next to
# MATH, which is what PyTorch runs at rank 3.
KINDS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "forward": {
        "half": {
            "plain": _PLAIN,
            "plain, one query": ("one query", "one query, batch of one"),
            "plain, another width of values": ("values",),
            "causal": _CAUSAL,
            "causal, another width of values": ("causal, values",),
            "causal, L and S apart": (*_CAUSAL, "few queries causal"),
            "bool mask": ("band", "pad"),
        },
    },
}
KINDS["both"] = {
    "half": {kind: rows for kind, rows in KINDS["forward"]["half"].items() if kind != "plain, one query"},
}

Timed = dict[int, dict[str, list[dict[str, float]]]]  # the larger of E and Ev: kind of a row: who: ms, for each row


def timed_rows(record: dict[str, Any], dtypes: str, direction: str) -> Timed:
    found: Timed = {}
    for row in record["rows"]:
        dtype, _, rest = row["name"].partition(" ")
        kind, _, width = rest.rpartition(" ")
        if (dtype == "float32") != (dtypes == "float32") or direction not in row:
            continue
        if "values of" in kind:
            kind, _, other = kind.rpartition(" of ")
            width = max(width, other, key=int)
        times = dict(row[direction])
        if row["default"] in times:  # asking for it by sdpa_kernel costs the host more than the default does
            times[row["default"]] = min(times[row["default"]], times["torch"])
        found.setdefault(int(width), {}).setdefault(kind, []).append(times)
    return found


def widest(timed: Timed, rows: tuple[str, ...], name: str) -> int:
    """Up to which head dim a back end was faster in these rows; 0 for none."""
    most = 0
    for width, kinds in sorted(timed.items()):
        ratios: list[float] = []
        for row in rows:
            ratios += [times["ours"] / times[name] for times in kinds.get(row, ()) if name in times]
        if ratios and (min(ratios) < LEAST or statistics.geometric_mean(ratios) < FASTER):
            break
        most = width if ratios else most
    return most


def table(record: dict[str, Any]) -> dict[tuple[str, str, bool], tuple[tuple[str, int], ...]]:
    """(dtypes, kind, whether a gradient is wanted): (back end, widest head dim) in the order in which they are tried."""
    found = {}
    for direction, of_dtypes in KINDS.items():
        for dtypes, kinds in of_dtypes.items():
            timed = timed_rows(record, dtypes, direction)
            for kind, rows in kinds.items():
                limits = tuple((name, limit) for name in BACK_ENDS if (limit := widest(timed, rows, name)))
                if limits:
                    found[dtypes, kind, direction == "both"] = limits
    return found


def module(records: dict[str, dict[str, Any]]) -> str:
    """The text of routes.py, from records by the names of their files."""
    lines = [
        '"""Where PyTorch\'s back ends were measured faster than this package\'s kernels; scripts/make_routes.py writes this file.',
        "",
        "By compute capability, then (dtypes, kind of call, whether a gradient is wanted): (back end, widest head dim), in the",
        "order in which they are tried. The head dim is the larger of E and Ev.",
        '"""',
        "",
        '__all__ = ["ROUTES"]',
        "",
        "ROUTES: dict[tuple[int, int], dict[tuple[str, str, bool], tuple[tuple[str, int], ...]]] = {",
    ]
    for file, record in sorted(records.items()):
        major, minor = record["capability"]
        lines.append(f"    # {record['card']}, torch {record['torch']}, cuDNN {record['cudnn']}: bench/results/{file}")
        lines.append(f"    ({major}, {minor}): {{")
        for (dtypes, kind, grad), limits in table(record).items():
            pairs = ", ".join(f'("{name}", {limit})' for name, limit in limits) + ("," if len(limits) == 1 else "")
            lines.append(f'        ("{dtypes}", "{kind}", {grad}): ({pairs}),')
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def main() -> int:
    files = sorted((ROOT / "bench" / "results").glob("backends_*.json"))
    text = module({path.name: json.loads(path.read_text()) for path in files})
    stale = not TABLE.exists() or TABLE.read_text() != text
    if "--check" not in sys.argv:
        TABLE.write_text(text)
    elif stale:
        print(f"{TABLE.relative_to(ROOT)} is not that of bench/results; run python scripts/make_routes.py")
    return int("--check" in sys.argv and stale)


if __name__ == "__main__":
    sys.exit(main())
