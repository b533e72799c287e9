"""Measures everything a record needs on one GPU and prints it as JSON: `python bench/record.py > record.json`.

Where a part fails, what was measured before it is printed, with what happened under "failed"; the exit code is 1.

One process, one card, ours and PyTorch's in turn: ceilings, forward cases with errors and extra memory beside PyTorch's back ends
and the formula in three calls, the pipelines' stages, the error rule over head dims and dtypes, memory at long sequences and of a
forward and its backward, gradients. Ours is sdpa; up to head dim 256, where it may run PyTorch's back ends, "NAME own" is the same
case by this package's own kernels.

    --cases NAME...  names or sets (class512, class1024, class256, float32, decode, biasgrad) of bench/cases.py, lin84 of
                     bench/linear_cases.py (a linear layer, in training, evaluation and its product alone), all by default
    --quick          forward cases only: ours, PyTorch's default, the three calls without a compiler; no error rule
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import backward
import linear_cases
import memory
import pipelines
import torch
import torch.nn.functional as F
from cases import BACKWARD, BIAS_GRADIENTS, CASES, MOST_BACK_END, SETS, Case, choose
from common import (
    BACK_ENDS,
    DEVICE,
    Sample,
    attempt,
    by_back_end,
    extra_memory,
    log,
    naive,
    own_kernels,
    three_calls,
    time_ms,
    within_rule,
)
from errors import error_table
from torch import Tensor

import attention_ext

OPS = torch.ops.attention_ext
MOST_SCORES = 20e9  # bytes of a score matrix that still is worth writing down


def ceilings() -> dict[str, float]:
    """What this card does best: half precision and float32 products, a copy."""
    out = {}
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=dtype) for _ in range(2))
        out[f"matmul_{name}_tflops"] = 2 * 8192**3 / time_ms(lambda a=a, b=b: a @ b) / 1e9
    a, b = torch.randn(1024, 8192, device=DEVICE), torch.randn(8192, 8192, device=DEVICE)
    out["matmul_float32_tflops"] = 2 * 1024 * 8192**2 / time_ms(lambda: a @ b) / 1e9
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    out["copy_tb_per_s"] = 2 * source.numel() / time_ms(lambda: target.copy_(source)) / 1e9
    return out


def measure(case: Case, call: Callable[[], Tensor], sample: Sample, ceilings: dict[str, float], most: int = 30) -> dict[str, Any]:
    """One row: time from rest and, at once, again; rate, share of the ceiling (of the copy's if L2 is cold), errors, memory."""
    errors = sample.errors(call())
    ms, again = time_ms(call, case.cold_l2, most), time_ms(call, case.cold_l2, most, rested=False)
    rate = case.flop / ms / 1e9
    row: dict[str, Any] = {"ms": ms, "ms_second_pass": again, "tflops": rate}
    if case.cold_l2:
        elements = 2 * case.B * case.Hq * case.L * case.E + 2 * case.B * case.Hk * case.S * case.E
        row["tb_per_s"] = elements * case.dtype.itemsize / ms / 1e9
        row["share_of_ceiling"] = row["tb_per_s"] / ceilings["copy_tb_per_s"]
    else:
        name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "float32"}[case.dtype]
        row["share_of_ceiling"] = rate / ceilings[f"matmul_{name}_tflops"]
    return row | errors | {"extra_bytes": extra_memory(call)}


def rivals(case: Case, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], quick: bool) -> dict[str, Callable[[], Any]]:
    """Rows beside ours and PyTorch's default, each to be tried: the three calls and PyTorch's back ends, of which up to E = 256
    the fused ones for half precision, timed like ours."""
    out: dict[str, Callable[[], Any]] = {}
    large, plain = case.E > 256, case.Hk == case.Hq and not case.causal
    if case.scores * case.dtype.itemsize <= MOST_SCORES and (large or plain):
        call, how = naive(case, q, k, v)
        out["naive"] = lambda **given: measure(case, call, **given) | {"how": how}
        if large and plain and not quick:

            def with_compiler(**given: Any) -> dict[str, Any]:
                torch._dynamo.reset()  # every case in its own sizes
                compiled = torch.compile(three_calls, dynamic=False)
                return measure(case, lambda: compiled(q, k, v), **given)

            out["naive_compiled"] = with_compiler
    for name in () if quick else BACK_ENDS if large else case.fused_back_ends:
        if name == "torch_math" and case.scores * 4 > MOST_SCORES:  # it computes in float32
            continue
        out[name] = partial(measure, case, by_back_end(name, q, k, v, **options), most=3 if large else 30)
    return out


def forward_case(case: Case, ceilings: dict[str, float], quick: bool) -> dict[str, dict[str, Any]]:
    """The entries of a case, by name; up to MOST_BACK_END two, the other by own kernels. PyTorch's row is the same in both."""
    q, k, v = case.inputs(str(DEVICE))
    options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": case.Hk != case.Hq}
    kernels = {case.name: attention_ext.explain(q, k, v, **options).kernel}
    calls: dict[str, Callable[[], Tensor]] = {
        "attention_ext": lambda: OPS.sdpa(q, k, v, **options),
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, **options),
    }
    apart = case.E <= MOST_BACK_END
    if apart:
        calls["own"] = own_kernels(case, q, k, v)
        kernels[f"{case.name} own"] = OPS.sdpa_plan(q, k, v, None, 0.0, case.causal, enable_gqa=case.Hk != case.Hq)[0]
    if "pipeline" not in kernels.values() and not quick:  # what the pipeline would take, for the crossover
        calls["pipeline"] = own_kernels(case, q, k, v, kernel_name="pipeline")
    sample = Sample(case, q, k, v)
    timed = {name: partial(measure, case, call) for name, call in calls.items()}
    rows: dict[str, Any] = {}
    for name, row in (timed | rivals(case, q, k, v, options, quick)).items():
        values = rows[name] = attempt(lambda row=row: row(sample=sample, ceilings=ceilings))
        text = f"{values['ms']:9.3f} ms {values['tflops']:7.1f} TFLOP/s" if "ms" in values else values["not_available"][:90]
        log(f"{case.name:12} {name:15} {text}")
    parts = [rows]
    if apart:
        others = {name: row for name, row in rows.items() if name not in ("attention_ext", "own")}
        parts = [{name: rows[name] for name in ("attention_ext", "torch")}, {"attention_ext": rows["own"]} | others]
    shape = {name: getattr(case, name) for name in ("B", "Hq", "Hk", "L", "S", "E", "Ev", "causal", "cold_l2")}
    shape["dtype"] = str(case.dtype)
    return {
        name: shape | {"kernel": kernel} | compared(case, sample, part)
        for (name, kernel), part in zip(kernels.items(), parts, strict=True)
    }


def compared(case: Case, sample: Sample, rows: dict[str, Any]) -> dict[str, Any]:
    """Ours next to PyTorch's default, and the rows."""
    ours, theirs = rows["attention_ext"], rows["torch"]
    both = "ms" in ours and "ms" in theirs
    return {
        "ratio_to_torch": theirs["ms"] / ours["ms"] if both else None,
        "within_rule": both and within_rule(ours, theirs, sample.top, case.dtype),
        "rows": rows,
    }


def fill(record: dict[str, Any], cases: dict[str, Case], linear: list[linear_cases.LinearCase], quick: bool) -> None:
    """Measures everything into the record, part by part."""
    record["error_rule"], record["forward"] = [], {}
    with torch.no_grad():
        record["ceilings"] = ceilings()
        log(f"ceilings: {record['ceilings']}")
        for case in cases.values():
            if case.mask is None:
                record["forward"] |= forward_case(case, record["ceilings"], quick)
        if "kb97" in cases and not quick:
            for kernel, key in (("pipeline", "stages"), ("sm90_pipeline", "stages_sm90_pipeline")):
                if kernel in ("pipeline", record["forward"]["kb97"].get("kernel")):
                    record[key] = {"kb97": pipelines.stages(cases["kb97"], kernel, record["ceilings"])}
            record["workspace_mib_to_ms"] = {"kb97": pipelines.workspaces(cases["kb97"])}
            log(json.dumps({key: record[key] for key in record if key.startswith(("stages", "workspace"))}))
    if not quick:
        record["error_rule"] = error_table()
        with torch.no_grad():
            record["long_sequences"] = memory.long_sequences()
        record["peaks"] = {name: memory.peaks(cases[name]) for name in memory.PEAKS if name in cases}
        record["backward"] = {}
        for name in (*BACKWARD, *SETS["biasgrad"]):
            record["backward"] |= backward.measure(cases[name]) if name in cases else {}
    record["linear"] = {}
    with torch.no_grad():
        for layer in linear:
            for part in linear_cases.PARTS:
                record["linear"][f"{layer.name} {part}"] = linear_cases.measure(layer, part, quick)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in (*CASES, *BIAS_GRADIENTS, *linear_cases.LINEAR_CASES)]
    parser.add_argument("--cases", nargs="*", default=names)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    linear, names = linear_cases.choose(args.cases)
    cases = {case.name: case for case in choose(names)}
    record: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "attention_ext": attention_ext.__version__,
        "csrc_tree": attention_ext._libraries.BUILD.csrc,
        "built_for": attention_ext._libraries.BUILD.built_for,
    }
    try:
        fill(record, cases, linear, args.quick)
    except Exception as error:  # what was measured until then is worth having
        traceback.print_exc()
        record["failed"] = f"{type(error).__name__}: {error}"
    json.dump(record, sys.stdout, indent=1)
    return int("failed" in record)


if __name__ == "__main__":
    sys.exit(main())
