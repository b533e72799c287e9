"""The pipelines from within: time of each stage beside its bounds, by workspace, and extra memory at long sequences."""

from functools import partial
from typing import Any

import torch
from cases import Case
from common import DEVICE, extra_memory, log, own_kernels, time_ms

OPS = torch.ops.attention_ext
STAGES = {  # the three kernels of a pipeline: what their names hold in csrc/ and in a profile
    "pipeline": {
        "qk_scores": "qk_scores_kernel",
        "segment_softmax": "segment_softmax_kernel",
        "scores_values": "scores_values_kernel",
    },
    "sm90_pipeline": {
        "wgmma_scores": "WgmmaScoresWork",
        "segment_softmax": "segment_softmax_kernel",
        "wgmma_values": "WgmmaValuesWork",
    },
}


def stages(case: Case, kernel: str, ceilings: dict[str, float]) -> dict[str, Any]:
    """A pipeline's three kernels within one call, by the profiler, each beside the bytes and operations it cannot do without, and
    the time that those take at the run's own copy and matrix product."""
    q, k, v = case.inputs(str(DEVICE))
    pipeline = partial(OPS.sdpa_forward, q, k, v, None, None, 0.0, False, kernel_name=kernel)
    pipeline()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            pipeline()
        torch.cuda.synchronize()
    element, count = q.element_size(), case.B * case.Hq * case.L * case.S
    least = (
        (q.nbytes + k.nbytes + element * count, case.flop / 2),
        (2 * element * count, 0.0),
        (element * count + 2 * v.nbytes, case.flop / 2),
    )
    out = {}
    for (name, held), (moved, flop) in zip(STAGES[kernel].items(), least, strict=True):
        events = [event for event in profile.key_averages() if held in event.key]
        ms = sum(event.self_device_time_total for event in events) / 5e3
        bound = max(moved / ceilings["copy_tb_per_s"], flop / ceilings["matmul_fp16_tflops"]) / 1e9
        launches = sum(event.count for event in events) // 5
        out[name] = {"ms": ms, "bound_ms": bound, "bytes": moved, "flop": flop, "launches": launches}
    return out


def workspaces(case: Case) -> dict[str, float]:
    """Milliseconds of the pipeline by workspace in MiB."""
    q, k, v = case.inputs("cuda")
    sizes = (16, 32, 64, 128, 256)
    pipeline = partial(OPS.sdpa_forward, q, k, v, None, None, 0.0, False, kernel_name="pipeline")
    return {str(mib): time_ms(partial(pipeline, workspace_bytes=mib << 20)) for mib in sizes}


def long_sequences() -> dict[str, Any]:
    """Extra memory at S = 100,000, forward and backward."""
    out = {}
    for E in (64, 512, 1024):
        q = torch.randn(1, 1, 100_000, E, device=DEVICE, dtype=torch.bfloat16)
        k, v = torch.randn_like(q), torch.randn_like(q)
        case = Case("", 1, 1, 1, 100_000, 100_000, E, torch.bfloat16)
        forward = extra_memory(own_kernels(case, q, k, v))
        pipeline = extra_memory(own_kernels(case, q, k, v, kernel_name="pipeline"))
        result, lse = OPS.sdpa_forward(q, k, v, None, None, 0.0, False)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = OPS.sdpa_backward(result, None, q, k, v, None, result, lse, None, 0.0, False)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads)
        out[f"E={E}"] = {
            "forward_extra_bytes": forward,
            "pipeline_forward_extra_bytes": pipeline,
            "backward_extra_bytes": extra,
        }
        log(f"S = 100000, E = {E}: extra MiB {', '.join(f'{name} {b / 2**20:.1f}' for name, b in out[f'E={E}'].items())}")
    return out
