"""Measures sdpa beside PyTorch's operator on the CPU and writes bench/results/cpu.json: `python bench/record_cpu.py`.

A tiny call shows the overhead, calls of over a millisecond must be within 1.15 of PyTorch's (they are its own operator). With them
goes what tests/support/randomised.py says: how many examples ran, and which failed. Exits with 1 if one failed or did not run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import attention_ext

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = {"ours": torch.ops.attention_ext.sdpa, "torch": F.scaled_dot_product_attention}


def in_turn(calls: dict[str, Callable[[], Any]], repeat: int, batch: int) -> dict[str, float]:
    """Microseconds a call, the median of `repeat` batches of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeat + 2):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(batch):
                call()
            if turn >= 2:
                times[name].append((time.perf_counter() - begin) / batch * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def row(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, repeat: int, batch: int, grad: bool = False, **options: Any
) -> dict[str, Any]:
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=grad) for _ in range(3))
    times = in_turn({key: lambda op=op: op(q, k, v, **options) for key, op in OPERATORS.items()}, repeat, batch)
    return {"name": name, "ours_us": times["ours"], "torch_us": times["torch"]}


def randomised(examples: int) -> dict[str, Any]:
    """What tests/support/randomised.py finds on the CPU."""
    script = str(ROOT / "tests" / "support" / "randomised.py")
    command = [sys.executable, script, "--device", "cpu", "--examples", str(examples), "--json"]
    outcome = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
    failures = outcome["failures"]
    return {"count": outcome["count"], "failed": len(failures), "failures": failures, "seconds": outcome["seconds"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=2000, help="of the randomised test")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = [
        row("(1, 1, 4, 8) float32", (1, 1, 4, 8), torch.float32, 20, 500),
        row("(1, 1, 4, 8) float32, with grad", (1, 1, 4, 8), torch.float32, 20, 500, grad=True),
        row("(1, 8, 512, 64) float32", (1, 8, 512, 64), torch.float32, 20, 3),
        row("(1, 8, 512, 64) float32, causal", (1, 8, 512, 64), torch.float32, 20, 3, is_causal=True),
        row("(1, 8, 512, 64) bfloat16", (1, 8, 512, 64), torch.bfloat16, 20, 3),
        row("(2, 4, 1024, 128) float32", (2, 4, 1024, 128), torch.float32, 10, 1),
    ]
    record = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "attention_ext": attention_ext.__version__,
        "csrc_tree": attention_ext._libraries.BUILD.csrc,
        "rows": rows,
        "randomised": randomised(args.examples),
    }
    for entry in rows:
        print(f"{entry['name']:34} ours {entry['ours_us']:9.1f} us, PyTorch's {entry['torch_us']:9.1f} us")
    outcome = record["randomised"]
    print(f"{outcome['count']} of {args.examples} randomised examples, {outcome['failed']} failed")
    (ROOT / "bench" / "results" / "cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    return 1 if outcome["failed"] or outcome["count"] < args.examples else 0


if __name__ == "__main__":
    raise SystemExit(main())
