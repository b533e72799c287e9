"""The pipelines from within: time of each stage beside its bounds, and by workspace."""

from functools import partial
from typing import Any

import torch
from cases import Case
from common import DEVICE, time_ms

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
