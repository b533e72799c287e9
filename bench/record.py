"""Measures everything a record needs on one GPU and prints it as JSON: `python bench/record.py > record.json`.

One process, one card, ours and PyTorch's in turn: ceilings, forward cases with errors and extra memory, the pipeline's stages,
the error rule over head dims and dtypes, memory at long sequences.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases import CASES, Case
from torch import Tensor

import attention_ext
from attention_ext import _measure

DEVICE = torch.device("cuda")
OPS = torch.ops.attention_ext
COMPILED = {"kb97", "d1024", "g512", "vae1024", "d384"}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def time_ms(call: Callable[[], Any]) -> float:
    """Median of 5 to 30 calls, fewer for slow ones."""
    first = _measure.time_ms(call, DEVICE, 1)
    return _measure.time_ms(call, DEVICE, max(5, min(30, int(300 / max(first, 0.01)))))


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


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a person writes in three calls: the honest rival above head dim 256."""
    return torch.softmax((q * q.size(-1) ** -0.5) @ k.mT, -1) @ v


def extra_memory(call: Callable[[], Tensor]) -> int:
    """Bytes beyond the result that a call takes from torch's allocator at its peak."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - out.nbytes


def sampled_errors(case: Case, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> dict[str, float]:
    """Against float64 on 64 query rows of each of four heads."""
    got, want = [], []
    rows = torch.linspace(0, case.L - 1, min(case.L, 64)).round().long().to(DEVICE)
    for b, h in _measure.sample_heads(case.B, case.Hq):
        g = h * case.Hk // case.Hq
        x = (q[b, h, rows].double() @ k[b, g].double().mT) * case.E**-0.5
        if case.causal:
            x = x.masked_fill(torch.arange(case.S, device=DEVICE) > rows[:, None], -math.inf)
        weights = torch.exp(x - x.amax(-1, keepdim=True))
        want.append((weights @ v[b, g].double()) / weights.sum(-1, keepdim=True))
        got.append(out[b, h, rows])
    largest, frobenius = _measure.errors(torch.stack(got), torch.stack(want).cpu())
    return {"max_abs_error": largest, "relative_frobenius_error": frobenius}


def forward_case(case: Case) -> dict[str, Any]:
    q, k, v = case.inputs("cuda")
    options = {"is_causal": case.causal, "enable_gqa": case.Hk != case.Hq}
    calls: dict[str, Callable[[], Tensor]] = {
        "attention_ext": lambda: OPS.sdpa(q, k, v, **options),
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, **options),
    }
    if not case.causal and case.Hk == case.Hq:
        calls["naive"] = lambda: naive(q, k, v)
        if case.name in COMPILED:
            compiled = torch.compile(naive)
            calls["naive_compiled"] = lambda: compiled(q, k, v)
    rows: dict[str, Any] = {}
    for name, call in calls.items():
        ms, again = time_ms(call), time_ms(call)
        rows[name] = {"ms": ms, "ms_second_pass": again, "tflops": case.flop / ms / 1e9}
        rows[name] |= sampled_errors(case, q, k, v, call()) | {"extra_bytes": extra_memory(call)}
        log(f"{case.name:12} {name:15} {ms:9.3f} ms {rows[name]['tflops']:7.1f} TFLOP/s")
    explanation = attention_ext.explain(q, k, v, **options)
    shape = {name: getattr(case, name) for name in ("B", "Hq", "Hk", "L", "S", "E", "causal")} | {"dtype": str(case.dtype)}
    ratio = rows["torch"]["ms"] / rows["attention_ext"]["ms"]
    return shape | {"kernel": explanation.kernel, "ratio_to_torch": ratio, "rows": rows}


def stages(case: Case) -> dict[str, Any]:
    """The pipeline's three kernels within one call, by the profiler, each beside the bytes and operations it cannot do without."""
    q, k, v = case.inputs("cuda")
    OPS.sdpa(q, k, v)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            OPS.sdpa(q, k, v)
        torch.cuda.synchronize()
    element, count = q.element_size(), case.B * case.Hq * case.L * case.S
    least = {
        "qk_scores": (q.nbytes + k.nbytes + element * count, case.flop / 2),
        "segment_softmax": (2 * element * count, 0.0),
        "scores_values": (element * count + 2 * v.nbytes, case.flop / 2),
    }
    out = {}
    for name, (moved, flop) in least.items():
        events = [event for event in profile.key_averages() if name in event.key]
        ms = sum(event.self_device_time_total for event in events) / 5e3
        out[name] = {"ms": ms, "bytes": moved, "flop": flop, "launches": sum(event.count for event in events) // 5}
    return out


def workspaces(case: Case) -> dict[str, float]:
    """Milliseconds of the pipeline by workspace in MiB."""
    q, k, v = case.inputs("cuda")
    sizes = (16, 32, 64, 128, 256)
    return {
        str(mib): time_ms(lambda mib=mib: OPS.sdpa_forward(q, k, v, None, None, 0.0, False, workspace_bytes=mib << 20)[0])
        for mib in sizes
    }


def _float64_gradients(inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    q, k, v = (t.detach().double().requires_grad_() for t in inputs)
    x = (q @ k.mT) * q.size(-1) ** -0.5
    weights = torch.exp(x - x.amax(-1, keepdim=True).detach())
    out = (weights @ v) / weights.sum(-1, keepdim=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def error_rule() -> list[dict[str, Any]]:
    """Forward and backward errors at (1, 4, 2048, 2048, E), ours beside PyTorch's, and whether the rule holds."""
    table = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for E in (64, 80, 128, 256, 512, 1024):
            generator = torch.Generator("cuda").manual_seed(E)
            inputs = [
                torch.randn(1, 4, 2048, E, device=DEVICE, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)
            ]
            grad = torch.randn(1, 4, 2048, E, device=DEVICE, dtype=dtype, generator=generator)
            want = _float64_gradients(inputs, grad)
            results = {}
            for name, op in (("attention_ext", OPS.sdpa), ("torch", F.scaled_dot_product_attention)):
                out = op(*inputs)
                results[name] = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
            for index, what in enumerate(("out", "grad_query", "grad_key", "grad_value")):
                reference = want[index].cpu()
                ours, theirs = (_measure.errors(results[name][index], reference) for name in ("attention_ext", "torch"))
                top = float(reference.abs().max())
                ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(top))
                holds = ours[0] <= 2 * theirs[0] + ulp and ours[1] <= 2 * theirs[1] + ulp
                table.append(
                    {"dtype": str(dtype), "E": E, "what": what, "ours": ours, "torch": theirs, "ulp": ulp, "within_rule": holds}
                )
    log(f"error rule: {sum(row['within_rule'] for row in table)} of {len(table)} within")
    return table


def long_sequences() -> dict[str, Any]:
    """Extra memory at S = 100,000, forward and backward."""
    out = {}
    for E in (64, 512):
        q = torch.randn(1, 1, 100_000, E, device=DEVICE, dtype=torch.bfloat16)
        k, v = torch.randn_like(q), torch.randn_like(q)
        forward = extra_memory(lambda q=q, k=k, v=v: OPS.sdpa(q, k, v))
        result, lse = OPS.sdpa_forward(q, k, v, None, None, 0.0, False)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = OPS.sdpa_backward(result, None, q, k, v, None, result, lse, None, 0.0, False)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads)
        out[f"E={E}"] = {"forward_extra_bytes": forward, "backward_extra_bytes": extra}
        log(f"S = 100000, E = {E}: extra {forward / 2**20:.1f} MiB forward, {extra / 2**20:.1f} MiB backward")
    return out


def backward_case(case: Case) -> dict[str, float]:
    q, k, v = (t.requires_grad_() for t in case.inputs("cuda"))
    grad = torch.randn_like(q)
    out = {}
    for name, op in (("attention_ext", OPS.sdpa), ("torch", F.scaled_dot_product_attention)):
        result = op(q, k, v, is_causal=case.causal)
        out[name] = time_ms(lambda result=result: torch.autograd.grad(result, (q, k, v), grad, retain_graph=True))
    log(f"{case.name} backward: {out}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    args = parser.parse_args()
    cases = {case.name: case for case in CASES}
    record: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "attention_ext": attention_ext.__version__,
        "csrc_tree": attention_ext._libraries.BUILD.csrc,
        "built_for": attention_ext._libraries.BUILD.built_for,
    }
    with torch.no_grad():
        record["ceilings"] = ceilings()
        log(f"ceilings: {record['ceilings']}")
        record["forward"] = {name: forward_case(cases[name]) for name in args.cases}
        if "kb97" in args.cases:
            record["stages"] = {"kb97": stages(cases["kb97"])}
            record["workspace_mib_to_ms"] = {"kb97": workspaces(cases["kb97"])}
            log(json.dumps({key: record[key] for key in ("stages", "workspace_mib_to_ms")}))
    record["error_rule"] = error_rule()
    with torch.no_grad():
        record["long_sequences"] = long_sequences()
    record["backward"] = {name: backward_case(cases[name]) for name in args.cases if name in ("kb97", "g512c")}
    json.dump(record, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
