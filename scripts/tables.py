"""The tables of README.md and docs/results.md: a record of bench/results -> lines of Markdown, none where nothing was measured.

A ratio is PyTorch's time / ours. scripts/make_tables.py puts them into the pages.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from cells import short, table
from everyday_tables import EVERYDAY_TABLES, everyday_text
from evidence import of_the_same_csrc
from peer_tables import peers_table, peers_text
from speed_chart import points

__all__ = ["CHART", "README_TABLES", "TABLES", "title"]

CHART = "docs/speed.svg"
SLOWEST = 4  # shapes of a list that are shown
HIGHLIGHTS = {  # rows of the README's table, eight at most: (part of the record, case) -> what it is
    ("forward", "vae1024"): "one head, as in a VAE: S = 16384, head dim 512",
    ("forward", "g512cgqa"): "32 query heads, 4 key heads, causal, S = 8192, head dim 512",
    ("forward", "kb97"): "KernelBench level 1 problem 97: S = 512, head dim 1024",
    ("forward", "dec512"): "decoding: 1 query a head, 32 heads, 4 key heads, S = 8192, head dim 512",
    ("backward", "g512c"): "backward: 32 heads, causal, S = 8192, head dim 512",
    ("forward", "d128c own"): "32 query heads, 8 key heads, causal, S = 8192, head dim 128, by own kernels",
    ("forward", "vae1024_f32"): "the first row in float32",
    ("linear", "lin84 product"): "`linear_float32`, 1024 x 8192 x 8192",
}


def title(record: dict[str, Any]) -> str:
    """What it was measured on: the card, the kernels and the rate of a matrix product, and whether the run was sound."""
    if "card" not in record:
        return f"**CPU** ({record['threads']} threads), torch {record['torch']}, {record['date']}:"
    kinds = {"float16": "fp16", "bfloat16": "bf16", "float32": "float32"}
    rates = [f"{record['ceilings'][f'matmul_{kind}_tflops']:.0f} in {dtype}" for dtype, kind in kinds.items()]
    what = f"**{record['card']}**, csrc `{record['csrc_tree'][:12]}`, matrix product in TFLOP/s: {', '.join(rates)}"
    return what + ("." if record["sound"] else "; not sound: the record lists what failed.")


def timed(case: dict[str, Any]) -> dict[str, Any]:
    """The rows of a case that were measured."""
    return {row: values for row, values in case["rows"].items() if "ms" in values}


def missing(case: dict[str, Any]) -> str:
    """Which rows were not measured, and why."""
    return "; ".join(f"{row}: {values['not_available']}" for row, values in case["rows"].items() if "ms" not in values)


def passes(row: dict[str, Any] | None) -> str:
    """Milliseconds, those of the second pass in brackets."""
    return f"{short(row['ms'])} ({short(row['ms_second_pass'])})" if row else ""


def first(row: dict[str, Any] | None) -> str:
    return short(row["ms"]) if row else ""


def mib(*rows: dict[str, Any]) -> str:
    return ", ".join(f"{row['extra_bytes'] / 2**20:.0f}" for row in rows)


def forward_table(record: dict[str, Any]) -> list[str]:
    """Every case of the forward."""
    lines = []
    for name, case in record["forward"].items():
        rows = timed(case)
        kind = case["dtype"].removeprefix("torch.") + ", causal" * case["causal"] + ", cold L2" * case.get("cold_l2", False)
        sizes = ", ".join(str(case[size]) for size in ("B", "Hq", "Hk", "L", "S", "E"))
        width = f" (values {case['Ev']})" if case.get("Ev", case["E"]) != case["E"] else ""
        what = [name, f"{sizes}{width}, {kind}", f"`{case['kernel']}`"]
        if "attention_ext" not in rows or "torch" not in rows:
            lines.append([*what, f"not measured: {missing(case)}", *[""] * 7])
            continue
        ours, theirs = rows["attention_ext"], rows["torch"]
        others = [first(rows.get(row)) for row in ("pipeline", "naive", "naive_compiled")]
        times = [passes(ours), f"{ours['tflops']:.0f}", passes(theirs), f"{case['ratio_to_torch']:.2f}"]
        lines.append([*what, *times, *others, mib(ours, theirs)])
    header = "case | B, Hq, Hk, L, S, E | kernel | ours, ms | TFLOP/s | PyTorch, ms | ratio | `pipeline`, ms | three calls, ms"
    return table(f"{header} | compiled, ms | extra memory, MiB: ours, PyTorch's", lines)


def stages_table(record: dict[str, Any]) -> list[str]:
    """Inside the pipelines: their kernels within one call, and the time by workspace."""
    lines: list[str] = []
    for key, stages_of in record.items():
        for case, stages in stages_of.items() if key.startswith("stages") else ():
            found = []
            for stage, row in stages.items():
                bound = f" (at least {short(row['bound_ms'])})" if "bound_ms" in row else ""
                found.append(f"`{stage}` {short(row['ms'])}{bound} in {row['launches']} launches")
            kernel = key.removeprefix("stages").removeprefix("_") or "pipeline"
            lines += ["", f"Stages of one call of `{kernel}` on {case}, by the profiler, ms: {', '.join(found)}."]
    for case, series in record.get("workspace_mib_to_ms", {}).items():
        row = [f"{case} by `pipeline`, ms", *map(short, series.values())]
        lines += ["", *table(f"workspace, MiB | {' | '.join(series)}", [row])]
    return lines[1:]


def backward_table(record: dict[str, Any]) -> list[str]:
    """The backward alone, and memory of long sequences."""
    calls = {"attention_ext": "ours, ms", "torch": "PyTorch, ms", "three_calls": "three calls, ms"}
    rows = []
    for name, row in record.get("backward", {}).items():
        if {"attention_ext", "torch"} <= row.keys():
            times = [short(ways[call]) if call in ways else "" for ways in (row, row.get("both", {})) for call in calls]
            rows.append([name, *times, f"{row['torch'] / row['attention_ext']:.2f}"])
    ways = " | ".join(f"{way}: {' | '.join(calls.values())}" for way in ("backward alone", "both ways"))
    lines = table(f"case | {ways} | ratio of the backward", rows)
    kinds = {"forward": "forward", "forward by `pipeline`": "pipeline_forward", "backward": "backward"}
    memory = []
    for size, row in record.get("long_sequences", {}).items():
        extra = ", ".join(f"{kind} {row[f'{key}_extra_bytes'] / 2**20:.1f}" for kind, key in kinds.items())
        memory.append(f"{size} {extra}")
    if memory:
        lines += ["", f"Extra memory of one head with L = S = 100,000 in bfloat16, MiB: {'; '.join(memory)}."]
    for name, peaks in record.get("peaks", {}).items():
        lines += ["", f"Memory at the peak of {name}, with operands, result and gradients, MiB: {peaks_text(peaks)}."]
    return lines


def peaks_text(peaks: dict[str, dict[str, Any]]) -> str:
    texts = []
    for call, who in (("attention_ext", "ours"), ("torch_efficient", "PyTorch's memory-efficient operator")):
        both = [f"{way.removesuffix('_bytes')} {b / 2**20:.0f}" for way, b in peaks[call].items() if way != "not_available"]
        texts.append(f"{who} {', '.join(both) or peaks[call]['not_available']}")
    return "; ".join(texts)


def linear_table(record: dict[str, Any]) -> list[str]:
    """Linear layers in float32: times, errors on the problem's own inputs and on N(0, 1), memory."""
    lines = []
    for name, case in record.get("linear", {}).items():
        rows = timed(case)
        if "attention_ext" not in rows or "torch" not in rows:
            lines.append([name, f"not measured: {missing(case)}", *[""] * 11])
            continue
        ours, theirs = rows["attention_ext"], rows["torch"]

        def share(row: dict[str, Any], kind: str, of: dict[str, Any] = theirs) -> str:
            return ", ".join(f"{errors[kind] / of['errors'][inputs][kind]:.2f}" for inputs, errors in row["errors"].items())

        own = [f"{row['errors']['own']['relative_frobenius_error']:.2e}".replace("e-0", "e-") for row in (ours, theirs)]
        outside = "" if case["within_rule"] else " (outside the rule)"
        lines.append(
            [
                *[name, ", ".join(str(case[size]) for size in ("M", "K", "F")), passes(ours), f"{ours['tflops']:.0f}"],
                *[passes(theirs), f"{case['ratio_to_torch']:.2f}"],
                *[passes(rows.get(row)) for row in ("torch_compiled", "torch_tf32")],
                *[", ".join(own), f"{share(ours, 'relative_frobenius_error')}{outside}", share(ours, "worst_row_error")],
                share(rows["torch_tf32"], "relative_frobenius_error") if "torch_tf32" in rows else "",
                mib(ours, theirs),
            ]
        )
    header = "linear, float32 | M, K, F | ours, ms | TFLOP/s | PyTorch, ms | ratio | compiled, ms | with TF32, ms"
    header += " | error: ours, PyTorch's (own) | error / PyTorch's (own, normal) | worst row / PyTorch's | with TF32 / without"
    return table(f"{header} | extra memory, MiB: ours, PyTorch's", lines)


def summary_text(name: str, summary: dict[str, Any]) -> str:
    """What came of a list of shapes."""
    slowest = summary["slowest"]
    text = f"{name}, {summary['shapes']} shapes: "
    if slowest is not None:
        slower, mean = summary["slower_by_more_than_5_percent"], summary["geometric_mean_ratio"]
        text += (
            f"{slower} of {summary['compared']} slower than PyTorch's default by more than 5 %, {mean:.2f} times as fast in "
            f"the geometric mean, {slowest['ratio']:.2f} at the least ({slowest['name']}); "
        )
    text += f"PyTorch's failed on {summary['torch_failed']}, ours on {summary['ours_failed']}"
    wrong = summary["not_finite"] + summary["outside_rule"]
    right = "errors within the rule" if summary.get("errors_compared", 1) else "finite"
    return text + (f", errors outside the rule on {wrong}." if wrong else f", {right} on all others.")


def shapes_table(record: dict[str, Any]) -> list[str]:
    """Of each list of shapes: the summary, the slowest, and all that another kernel takes than the list's most frequent one."""
    lines: list[str] = []
    for name, summary in record.get("shapes_summary", {}).items():
        rows = record["shapes"][name]
        counts = Counter(row["kernel"] for row in rows if "kernel" in row).most_common()
        compared = sorted((row for row in rows if "ratio" in row), key=lambda row: row["ratio"])
        shown = compared[:SLOWEST] + [row for row in compared[SLOWEST:] if row["kernel"] != counts[0][0]]
        used = ", ".join(f"{count} by `{kernel}`" for kernel, count in counts)
        lines += ["", f"{summary_text(name, summary)} {f'Of all shapes, {used}.' if used else ''}", ""]
        lines += table(
            "B Hq Hk L S E Ev | kernel | ours, us | PyTorch, us | ratio",
            [
                [row["name"], f"`{row['kernel']}`", *(f"{1e3 * row[ms]:.1f}" for ms in ("ms", "torch_ms")), f"{row['ratio']:.2f}"]
                for row in shown
            ],
        )
    return lines[1:]


def counts(tests: dict[str, Any]) -> str:
    return f"{tests['tests'] - tests['skipped']} run, {tests['failures'] + tests['errors']} failed"


def checks_table(record: dict[str, Any]) -> list[str]:
    """Errors, tests, sanitizers, randomised examples."""
    within = sum(row["within_rule"] for row in record["error_rule"])
    two_cards = of_the_same_csrc(record.get("two_cards"), record)
    tools = [f"{tool} {'clean' if result['clean'] else 'NOT clean'}" for tool, result in record["sanitizer"].items()]
    examples = record.get("randomised")
    copy = record["ceilings"]["copy_tb_per_s"]
    text = f"Copy {copy:.2f} TB/s; driver {record['driver']}, torch {record['torch']}, {record['date']}."
    text += f" Errors against float64 within the rule: {within} of {len(record['error_rule'])}."
    text += f" GPU tests: {counts(record['gpu_tests'])}; those that need two cards: "
    text += f"{counts(two_cards) if two_cards else 'not run on this csrc'}. compute-sanitizer: {', '.join(tools)}."
    return [text + (f" Randomised examples: {examples['count']}, {examples['failed']} failed." if examples else "")]


def cpu_table(record: dict[str, Any]) -> list[str]:
    rows = [
        [row["name"], f"{row['ours_us']:.1f}", f"{row['torch_us']:.1f}", f"{row['torch_us'] / row['ours_us']:.2f}"]
        for row in record["rows"]
    ]
    lines = table("call | ours, us | PyTorch, us | ratio", rows)
    if "randomised" in record:
        lines += ["", f"Randomised examples: {record['randomised']['count']}, {record['randomised']['failed']} failed."]
    return lines


def chart_text(record: dict[str, Any]) -> list[str]:
    """The README's picture, and in words the head dims at which own kernels are faster than PyTorch's default, the others, and
    those at which sdpa runs PyTorch's kernels instead."""
    halves = []
    for faster in (True, False):
        found = {point.head_dim: point.ours / point.torch for point in points(record) if (point.ours > point.torch) == faster}
        if found:
            ratios = f"{min(found.values()):.2f} to {max(found.values()):.2f} times as fast as PyTorch's default"
            halves.append(f"{ratios} at head dims {', '.join(map(str, found))}")
    text = f"On one {record['card']} this package's own kernels are in the forward {', and '.join(halves)}."
    cases = record["forward"].items()
    routed = {
        name: case["ratio_to_torch"] for name, case in cases if case["kernel"].startswith("torch: ") and case["ratio_to_torch"]
    }
    if routed:
        ratios = " to ".join(sorted({f"{ratio:.2f}" for ratio in (min(routed.values()), max(routed.values()))}))
        text += f" For {', '.join(routed)} `sdpa` runs PyTorch's kernels: {ratios} times as fast."
    return [f"![TFLOP/s of the forward by head dim: ours, PyTorch's default, three calls]({CHART})", "", text]


def ratios_path(record: dict[str, Any]) -> str:
    """The picture of a card's ratios, from docs/ on."""
    return f"ratios_{re.sub('[^a-z0-9]+', '_', record['card'].lower()).strip('_')}.svg"


def ratios_text(record: dict[str, Any]) -> list[str]:
    return [f"![PyTorch's time / ours for every case on one {record['card']}]({ratios_path(record)})"]


def highlights_table(record: dict[str, Any]) -> list[str]:
    rows = []
    for (part, name), what in HIGHLIGHTS.items():
        case = record.get(part, {}).get(name)
        if case is None or (part != "backward" and not {"attention_ext", "torch"} <= timed(case).keys()):
            continue
        if part == "backward":
            rows.append(
                [what, short(case["attention_ext"]), short(case["torch"]), f"{case['torch'] / case['attention_ext']:.2f}", "", ""]
            )
            continue
        found = timed(case)
        both = (found["attention_ext"], found["torch"])
        rows.append([what, *map(first, both), f"{case['ratio_to_torch']:.2f}", first(found.get("naive")), mib(*both)])
    lines = table("call | ours, ms | PyTorch, ms | times as fast | three calls, ms | extra memory, MiB: ours, PyTorch's", rows)
    text = " ".join(filter(None, (everyday_text(record), peers_text(record))))
    return lines + (["", text] if text else [])


README_TABLES: dict[str, Callable[..., list[str]]] = {"chart": chart_text, "highlights": highlights_table}
TABLES: dict[str, Callable[..., list[str]]] = README_TABLES | {
    "ratios": ratios_text,
    "forward": forward_table,
    "stages": stages_table,
    "backward": backward_table,
    "linear": linear_table,
    "shapes": shapes_table,
    "peers": peers_table,
    "checks": checks_table,
    "cpu": cpu_table,
    **EVERYDAY_TABLES,
}
