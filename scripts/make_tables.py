"""Fills the tables of README.md and docs/*.md from bench/results: `python scripts/make_tables.py`, with --check only compares.

A page marks the place of a table of TABLES as <!-- table NAME: python scripts/make_tables.py --> ... <!-- end of table -->.
"""

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from evidence import of_the_same_csrc

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"(<!-- table (\w+): python scripts/make_tables.py -->\n).*?(<!-- end of table -->)", re.DOTALL)
WIDTH = 132
SLOWEST = 4  # shapes of a list that are shown


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


def gpu_table(record: dict[str, Any]) -> list[str]:
    """README: every case of attention and of linear layers, errors, tests."""
    tests, tools, copy = record["gpu_tests"], record["sanitizer"], record["ceilings"]["copy_tb_per_s"]
    lines = [
        f"Copy {copy:.2f} TB/s; driver {record['driver']}, torch {record['torch']}, {record['date']}.",
        "",
        "| case | B, Hq, Hk, L, S, E | kernel | ms | TFLOP/s | PyTorch, ms | ratio | three calls, ms "
        "| extra memory, MiB: ours, PyTorch's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in record["forward"].items():
        rows = timed(case)
        if "attention_ext" not in rows or "torch" not in rows:
            lines.append(f"| {name} | not measured: {missing(case)} |" + " |" * 7)
            continue
        ours, theirs, naive = rows["attention_ext"], rows["torch"], rows.get("naive")
        shape = ", ".join(str(case[size]) for size in ("B", "Hq", "Hk", "L", "S", "E"))
        three = format(naive["ms"], ".2f") if naive else ""
        dtype = case["dtype"].removeprefix("torch.") + (", causal" if case["causal"] else "")
        dtype += ", cold L2" if case.get("cold_l2") else ""
        lines.append(
            f"| {name} | {shape}, {dtype} | {case['kernel']} | {ours['ms']:.2f} | {ours['tflops']:.0f} | {theirs['ms']:.2f} | "
            f"{case['ratio_to_torch']:.2f} | {three} | "
            f"{ours['extra_bytes'] / 2**20:.0f}, {theirs['extra_bytes'] / 2**20:.0f} |"
        )
    within = sum(row["within_rule"] for row in record["error_rule"])
    two_cards = of_the_same_csrc(record.get("two_cards"), record)
    lines += [
        "",
        "Errors against float64 at most twice PyTorch's own plus one unit in the last place, forward and backward, "
        f"E from 64 to 1024: {within} of {len(record['error_rule'])}. GPU tests: {counts(tests)}; those that need two cards: "
        f"{counts(two_cards) if two_cards else 'not run on this csrc'}. compute-sanitizer: "
        + ", ".join(f"{tool} {'clean' if result['clean'] else 'NOT clean'}" for tool, result in tools.items())
        + ".",
    ]
    return lines + paragraphs(record)


def counts(tests: dict[str, Any]) -> str:
    return f"{tests['tests'] - tests['skipped']} run, {tests['failures'] + tests['errors']} failed"


def paragraphs(record: dict[str, Any]) -> list[str]:
    """What newer records hold: linear layers, the three calls compiled, FFPA, the lists of shapes, the randomised examples."""
    lines: list[str] = linear_table(record["linear"]) if record.get("linear") else []
    if "shapes_summary" in record:
        for row, title in (("naive_compiled", "The three calls under torch.compile"), ("ffpa", "FFPA (CuTe-DSL)")):
            found = {name: case["rows"][row]["ms"] for name, case in record["forward"].items() if "ms" in case["rows"].get(row, {})}
            if found:
                lines += ["", f"{title}, ms: {', '.join(f'{name} {ms:.2f}' for name, ms in found.items())}."]
    for name, summary in record.get("shapes_summary", {}).items():
        lines += ["", summary_text(name, summary)]
    if "randomised" in record:
        outcome = record["randomised"]
        lines += ["", f"Randomised examples on the GPU: {outcome['count']}, {outcome['failed']} failed."]
    return lines


def summary_text(name: str, summary: dict[str, Any]) -> str:
    """What came of a list of shapes."""
    slowest = summary["slowest"]
    text = f"{summary['shapes']} shapes of {name} (`bench/shapes.py`), device time in a CUDA graph: "
    if slowest is not None:
        slower, mean = summary["slower_by_more_than_5_percent"], summary["geometric_mean_ratio"]
        text += (
            f"{slower} of {summary['compared']} slower than PyTorch's default by more than 5 %, {mean:.2f} times as fast in "
            f"the geometric mean, {slowest['ratio']:.2f} at the least (B Hq Hk L S E Ev: {slowest['name']}); "
        )
    text += f"PyTorch's failed on {summary['torch_failed']}, ours on {summary['ours_failed']}"
    wrong = summary["not_finite"] + summary["outside_rule"]
    return text + (f", errors outside the rule on {wrong}." if wrong else ", errors within the rule on all others.")


def linear_table(cases: dict[str, Any]) -> list[str]:
    """Linear layers in float32: milliseconds of ours and PyTorch's, errors on the problem's own and on N(0, 1) inputs."""
    lines = [
        "",
        "| linear, float32 | M, K, F | ms | TFLOP/s | PyTorch, ms | ratio | compiled, ms | with TF32, ms "
        "| error / PyTorch's (own, normal) | worst row / PyTorch's | with TF32 / without | extra memory, MiB: ours, PyTorch's |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        rows = timed(case)
        if "attention_ext" not in rows or "torch" not in rows:
            lines.append(f"| {name} | not measured: {missing(case)} |" + " |" * 10)
            continue
        ours, theirs = rows["attention_ext"], rows["torch"]

        def share(row: dict[str, Any], kind: str, of: dict[str, Any] = theirs) -> str:
            return ", ".join(f"{errors[kind] / of['errors'][inputs][kind]:.2f}" for inputs, errors in row["errors"].items())

        others = [f"{rows[row]['ms']:.2f}" if row in rows else "" for row in ("torch_compiled", "torch_tf32")]
        lowered = share(rows["torch_tf32"], "relative_frobenius_error") if "torch_tf32" in rows else ""
        outside = "" if case["within_rule"] else " (outside the rule)"
        lines.append(
            f"| {name} | {', '.join(str(case[size]) for size in ('M', 'K', 'F'))} | {ours['ms']:.2f} | {ours['tflops']:.0f} | "
            f"{theirs['ms']:.2f} | {case['ratio_to_torch']:.2f} | {others[0]} | {others[1]} | "
            f"{share(ours, 'relative_frobenius_error')}{outside} | {share(ours, 'worst_row_error')} | {lowered} | "
            f"{ours['extra_bytes'] / 2**20:.0f}, {theirs['extra_bytes'] / 2**20:.0f} |"
        )
    return [*lines, "", "Errors are relative to PyTorch's without TF32, both against float64; the rule allows 1.05."]


def short(ms: float) -> str:
    return f"{ms:.{3 if ms < 1 else 2 if ms < 10 else 1}f}"


def passes(row: dict[str, Any]) -> str:
    """Milliseconds, those of the second pass in brackets."""
    return f"{short(row['ms'])} ({short(row['ms_second_pass'])})"


def stage_lines(record: dict[str, Any], key: str) -> list[str]:
    lines: list[str] = []
    for name, stages in record.get(key, {}).items():
        found = []
        for stage, row in stages.items():
            bound = f" (at least {short(row['bound_ms'])})" if "bound_ms" in row else ""
            found.append(f"`{stage}` {short(row['ms'])}{bound} in {row['launches']} launches")
        lines += ["", f"Stages of one call on {name}, by the profiler, ms: {', '.join(found)}."]
    return lines


def kernel_table(record: dict[str, Any], kernel: str) -> list[str]:
    """The cases that this kernel takes, beside PyTorch's, the pipeline and the three calls; a pipeline's stages."""
    columns = ("pipeline", "naive", "naive_compiled")
    lines = ["| case | ours, ms | TFLOP/s | PyTorch | `pipeline` | three calls | compiled |", "|---|---|---|---|---|---|---|"]
    for name, case in record["forward"].items():
        rows = timed(case)
        if case["kernel"] == kernel and "attention_ext" in rows:
            ours, theirs = rows["attention_ext"], passes(rows["torch"]) if "torch" in rows else ""
            others = " | ".join(short(rows[row]["ms"]) if row in rows else "" for row in columns)
            cold = ", cold L2" if case.get("cold_l2") else ""
            lines.append(f"| {name}{cold} | {passes(ours)} | {ours['tflops']:.0f} | {theirs} | {others} |")
    return lines + stage_lines(record, f"stages_{kernel}")


def pipeline_table(record: dict[str, Any]) -> list[str]:
    """Problem 97 by the pipeline, the cases that run on it, backward; the pipeline's stages and workspaces."""
    lines = ["| case | ours, ms | TFLOP/s | PyTorch |", "|---|---|---|---|"]
    for name, case in record["forward"].items():
        rows = timed(case)
        ours = rows.get("attention_ext" if case["kernel"] == "pipeline" else "pipeline" if name == "kb97" else "")
        if ours is not None and "torch" in rows:
            lines.append(f"| {name} | {passes(ours)} | {ours['tflops']:.0f} | {passes(rows['torch'])} |")
    for name, row in record.get("backward", {}).items():
        lines.append(f"| {name}, backward | {short(row['attention_ext'])} | | {short(row['torch'])} |")
    lines += stage_lines(record, "stages")
    for name, series in record.get("workspace_mib_to_ms", {}).items():
        lines += ["", f"| workspace, MiB | {' | '.join(series)} |", "|---" * (len(series) + 1) + "|"]
        lines.append(f"| {name}, ms | {' | '.join(map(short, series.values()))} |")
    return lines


def ffpa_table(record: dict[str, Any]) -> list[str]:
    lines = [
        f"FFPA {record.get('peers', {}).get('ffpa_attn', 'was not measured')}:",
        "",
        "| case | FFPA, ms | ours | kernel | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, case in record["forward"].items():
        if row := timed(case).get("ffpa"):
            ours = row["ours_ms_in_between"]
            lines.append(f"| {name} | {passes(row)} | {short(ours)} | `{case['kernel']}` | {row['ms'] / ours:.2f} |")
    return lines


def rows_of_shapes(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| B Hq Hk L S E Ev | kernel | ours, us | PyTorch, us | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['name']} | `{row['kernel']}` | {1e3 * row['ms']:.1f} | {1e3 * row['torch_ms']:.1f} | {row['ratio']:.2f} |"
        )
    return lines


def list_table(record: dict[str, Any], name: str) -> list[str]:
    """A list of shapes: the kernels, the summary, the slowest."""
    if name not in record.get("shapes_summary", {}):
        return [f"{name} was not measured."]
    rows = record["shapes"][name]
    kernels = Counter(row["kernel"] for row in rows if "kernel" in row).most_common()
    slowest = sorted((row for row in rows if "ratio" in row), key=lambda row: row["ratio"])[:SLOWEST]
    used = ", ".join(f"{count} by `{kernel}`" for kernel, count in kernels)
    return [
        f"{summary_text(name, record['shapes_summary'][name])} Of all shapes, {used}. The slowest:",
        "",
        *rows_of_shapes(slowest),
    ]


def shapes_table(record: dict[str, Any], name: str, kernel: str) -> list[str]:
    """The shapes of a list that this kernel takes."""
    rows = record.get("shapes", {}).get(name, [])
    return rows_of_shapes([row for row in rows if "ratio" in row and row["kernel"] == kernel])


def linear_summary(record: dict[str, Any]) -> list[str]:
    """Both passes, and errors on the problem's own inputs as they are."""
    lines = [
        "| case | ours, ms | PyTorch | compiled | with TF32 | error: ours, PyTorch's | extra memory, MiB: ours, PyTorch's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in record.get("linear", {}).items():
        rows = timed(case)
        if "attention_ext" in rows and "torch" in rows:
            both = (rows["attention_ext"], rows["torch"])
            times = [passes(rows[row]) if row in rows else "" for row in ("attention_ext", "torch", "torch_compiled", "torch_tf32")]
            errors = [f"{row['errors']['own']['relative_frobenius_error']:.2e}".replace("e-0", "e-") for row in both]
            memory = [f"{row['extra_bytes'] / 2**20:.0f}" for row in both]
            lines.append(f"| {name} | {' | '.join(times)} | {', '.join(errors)} | {', '.join(memory)} |")
    return lines


def cpu_table(record: dict[str, Any]) -> list[str]:
    lines = ["| call | ours, us | PyTorch's, us | ratio |", "|---|---|---|---|"]
    for row in record["rows"]:
        lines.append(f"| {row['name']} | {row['ours_us']:.1f} | {row['torch_us']:.1f} | {row['ours_us'] / row['torch_us']:.2f} |")
    if "randomised" in record:
        outcome = record["randomised"]
        lines += ["", f"Randomised examples on the CPU: {outcome['count']}, {outcome['failed']} failed."]
    return lines


TABLES: dict[str, Callable[..., list[str]]] = {
    "cpu": cpu_table,
    "gpu": gpu_table,
    "pipeline": pipeline_table,
    "sm90_pipeline": partial(kernel_table, kernel="sm90_pipeline"),
    "sm90_512": partial(kernel_table, kernel="sm90_512"),
    "sm90_1024": partial(shapes_table, name="class1024", kernel="sm90_1024"),
    "class512": partial(list_table, name="class512"),
    "class1024": partial(list_table, name="class1024"),
    "ffpa": ffpa_table,
    "linear": linear_summary,
}


def filled(place: re.Match[str]) -> str:
    """The place with its table from every record of the CPU or of a GPU, each with where it is from."""
    lines: list[str] = []
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        if (path.stem == "cpu") == (place[2] == "cpu"):
            record = json.loads(path.read_text())
            if record.keys() == {"two_cards"} or "rows" in record:  # the latter: of scripts/make_routes.py
                continue
            command = "bench/record_cpu.py" if path.stem == "cpu" else "scripts/gpu_check WHEEL"
            table = TABLES[place[2]](record)
            lines += [title(record), "", *table, "", f"From `bench/results/{path.name}`, by `{command}`.", ""]
    wrap = partial(textwrap.fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)
    return "".join([place[1], *((line if line.startswith("|") else wrap(line)) + "\n" for line in lines), place[3]])


def main() -> int:
    stale = 0
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        new = PLACE.sub(filled, text)
        stale += new != text
        if "--check" not in sys.argv:
            path.write_text(new)
        elif new != text:
            print(f"{path.relative_to(ROOT)}: its tables are not those of bench/results; run python scripts/make_tables.py")
    return int("--check" in sys.argv and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
