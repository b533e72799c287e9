"""Writes the README's tables from the records in bench/results: `python scripts/make_tables.py`, with --check only compares."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tables: python scripts/make_tables.py -->", "<!-- end of tables -->"


def gpu_table(record: dict[str, Any]) -> list[str]:
    ceilings = record["ceilings"]
    tests, tools = record["gpu_tests"], record["sanitizer"]
    lines = [
        f"**{record['card']}**, driver {record['driver']}, torch {record['torch']}, {record['date']}, "
        f"csrc `{record['csrc_tree'][:12]}`; matrix product {ceilings['matmul_fp16_tflops']:.0f} TFLOP/s in float16, "
        f"{ceilings['matmul_bf16_tflops']:.0f} in bfloat16, copy {ceilings['copy_tb_per_s']:.2f} TB/s.",
        "",
        "| case | B, Hq, Hk, L, S, E | kernel | ms | TFLOP/s | PyTorch, ms | ratio | three calls, ms "
        "| extra memory, MiB: ours, PyTorch's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in record["forward"].items():
        rows = {row: values for row, values in case["rows"].items() if "ms" in values}
        if "attention_ext" not in rows or "torch" not in rows:
            why = "; ".join(f"{row}: {values['not_available']}" for row, values in case["rows"].items() if row not in rows)
            lines.append(f"| {name} | not measured: {why} | | | | | | | |")
            continue
        ours, theirs, naive = rows["attention_ext"], rows["torch"], rows.get("naive")
        shape = ", ".join(str(case[size]) for size in ("B", "Hq", "Hk", "L", "S", "E"))
        three = format(naive["ms"], ".2f") if naive else ""
        dtype = (
            case["dtype"].removeprefix("torch.")
            + (", causal" if case["causal"] else "")
            + (", cold L2" if case.get("cold_l2") else "")
        )
        lines.append(
            f"| {name} | {shape}, {dtype} | {case['kernel']} | {ours['ms']:.2f} | {ours['tflops']:.0f} | {theirs['ms']:.2f} | "
            f"{case['ratio_to_torch']:.2f} | {three} | "
            f"{ours['extra_bytes'] / 2**20:.0f}, {theirs['extra_bytes'] / 2**20:.0f} |"
        )
    within = sum(row["within_rule"] for row in record["error_rule"])
    lines += [
        "",
        "Errors against float64 at most twice PyTorch's own plus one unit in the last place, forward and backward, "
        f"E from 64 to 1024: {within} of {len(record['error_rule'])}. GPU tests: {tests['tests'] - tests['skipped']} run, "
        f"{tests['failures'] + tests['errors']} failed. compute-sanitizer: "
        + ", ".join(f"{tool} {'clean' if result['clean'] else 'NOT clean'}" for tool, result in tools.items())
        + ".",
    ]
    if not record["sound"]:
        lines += ["", "This run was not sound: the record lists what failed."]
    return lines + paragraphs(record)


def paragraphs(record: dict[str, Any]) -> list[str]:
    """What newer records hold: linear layers, the three calls compiled, FFPA, the lists of shapes, the randomised examples."""
    lines: list[str] = linear_table(record["linear"]) if record.get("linear") else []
    if "shapes_summary" in record:
        for row, title in (("naive_compiled", "The three calls under torch.compile"), ("ffpa", "FFPA (CuTe-DSL)")):
            found = {name: case["rows"][row]["ms"] for name, case in record["forward"].items() if "ms" in case["rows"].get(row, {})}
            if found:
                lines += ["", f"{title}, ms: {', '.join(f'{name} {ms:.2f}' for name, ms in found.items())}."]
    for name, summary in record.get("shapes_summary", {}).items():
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
        lines += ["", text + (f", errors outside the rule on {wrong}." if wrong else ", errors within the rule on all others.")]
    if "randomised" in record:
        outcome = record["randomised"]
        lines += ["", f"Randomised examples on the GPU: {outcome['count']}, {outcome['failed']} failed."]
    return lines


def linear_table(cases: dict[str, Any]) -> list[str]:
    """Linear layers in float32: milliseconds of ours and PyTorch's, errors on the problem's own and on N(0, 1) inputs."""
    lines = [
        "",
        "| linear, float32 | M, K, F | ms | TFLOP/s | PyTorch, ms | ratio | compiled, ms | with TF32, ms "
        "| error / PyTorch's (own, normal) | worst row / PyTorch's | with TF32 / without | extra memory, MiB: ours, PyTorch's |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        rows = {row: values for row, values in case["rows"].items() if "ms" in values}
        if "attention_ext" not in rows or "torch" not in rows:
            why = "; ".join(f"{row}: {values['not_available']}" for row, values in case["rows"].items() if row not in rows)
            lines.append(f"| {name} | not measured: {why} |" + " |" * 10)
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


def cpu_table(record: dict[str, Any]) -> list[str]:
    lines = [
        f"**CPU** ({record['threads']} threads), torch {record['torch']}, {record['date']}:",
        "",
        "| call | ours, us | PyTorch's, us | ratio |",
        "|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(f"| {row['name']} | {row['ours_us']:.1f} | {row['torch_us']:.1f} | {row['ours_us'] / row['torch_us']:.2f} |")
    return lines


def main() -> int:
    tables: list[str] = []
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        record = json.loads(path.read_text())
        command = "bench/record_cpu.py" if path.stem == "cpu" else "scripts/gpu_check WHEEL"
        tables += [
            "",
            *(cpu_table(record) if path.stem == "cpu" else gpu_table(record)),
            "",
            f"From `bench/results/{path.name}`, by `{command}`.",
        ]
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    new = before + BEGIN + "\n".join([*tables, "", ""]) + END + rest.split(END)[1]
    if "--check" in sys.argv:
        if new != text:
            print("README.md: its tables are not those of bench/results; run python scripts/make_tables.py")
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
