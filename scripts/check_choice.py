#!/usr/bin/env python3
"""How far the kernel that the plan chooses is from the fastest, list by list, given recorded times of each kernel.

    python scripts/check_choice.py [RECORD] [--sms 132] [--all]

RECORD: what scripts/gpu_check or bench/record_shapes.py writes, bench/results/kernels/nvidia_h200.json where none is named. Needs
the library _C and no GPU: the choice is that of this build for a card of compute capability 9.0. --all prints every shape, with its
estimates.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "bench"), str(ROOT)]  # the package of an installed wheel comes first
from choice import choice_summary, planned  # noqa: E402
from shapes import parse  # noqa: E402
from torch import ops  # noqa: E402

import attention_ext  # noqa: E402, F401  registers the plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, default=ROOT / "bench" / "results" / "kernels" / "nvidia_h200.json")
    parser.add_argument("--sms", type=int, default=132, help="of the card that the times are from")
    parser.add_argument("--all", action="store_true", help="every shape, with its estimates")
    args = parser.parse_args()
    kernels = ops.attention_ext.kernels("forward")
    for shapes, recorded in json.loads(args.record.read_text())["shapes"].items():
        rows = []
        for row in recorded:
            if not row.get("kernels"):
                continue
            plan = planned(parse(row["name"])[0], sms=args.sms)
            rows.append(row | {"kernel": plan.kernel})
            if args.all:
                estimates = dict(zip(kernels, plan.costs, strict=True))
                times = (f"{name} {ms * 1e3:.1f} (estimate {estimates[name] / 1e3:.1f})" for name, ms in row["kernels"].items())
                print(f"{row['name']}: {plan.kernel}; us: {', '.join(times)}")
        summary = choice_summary(rows)
        print(
            f"{shapes}: {summary['within_5_percent']} of {summary['compared']} within 5 % of the best, "
            f"worst {summary['worst']:.3f}, geometric mean {summary['geometric_mean']:.4f}"
        )
        for shape in summary["beyond"]:
            print(f"  {shape['ratio']:.2f}  {shape['name']}: {shape['chosen']}, where {shape['best']} is faster")
    return 0


if __name__ == "__main__":
    sys.exit(main())
