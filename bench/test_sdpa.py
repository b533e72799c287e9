"""pytest-benchmark: sdpa beside PyTorch's operator and the three-call formula. `pytest bench`; on a GPU all cases, else small ones.

Each row's extra_info holds what a figure needs: kernel, TFLOP/s, errors against float64 on sampled heads, extra memory.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, SMALL, Case
from common import naive
from torch import Tensor

import attention_ext
from attention_ext import _measure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _call(row: str, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": case.Hk != case.Hq}
    if row == "attention_ext":
        return lambda: attention_ext.sdpa(q, k, v, **options)
    if row == "torch":
        return lambda: F.scaled_dot_product_attention(q, k, v, **options)
    return naive(case, q, k, v)[0]


@pytest.mark.parametrize("row", ["attention_ext", "torch", "naive"])
@pytest.mark.parametrize("case", CASES if DEVICE == "cuda" else SMALL, ids=lambda case: case.name)
def test_forward(benchmark: Any, case: Case, row: str) -> None:
    q, k, v = case.inputs(DEVICE)
    call = _call(row, case, q, k, v)

    def timed() -> Tensor:
        out = call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return out

    with torch.no_grad():
        out = benchmark.pedantic(timed, rounds=10, warmup_rounds=2)
    heads = _measure.sample_heads(case.B, case.Hq, 2)
    group = case.Hq // case.Hk
    want = [_measure.float64_attention(q[b, h], k[b, h // group], v[b, h // group], case.causal) for b, h in heads]
    largest, frobenius = _measure.errors(torch.stack([out[b, h] for b, h in heads]), torch.stack(want))
    assert frobenius < 0.05, "a speed without a right result is no figure"
    kernel = attention_ext.explain(q, k, v, is_causal=case.causal, enable_gqa=case.Hk != case.Hq).kernel
    benchmark.extra_info |= {
        "kernel": kernel if row == "attention_ext" else row,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "torch": torch.__version__,
        "csrc": attention_ext._libraries.BUILD.csrc,
        "tflops": case.flop / benchmark.stats.stats.median / 1e12,
        "max_abs_error": largest,
        "relative_frobenius_error": frobenius,
    }
