"""The same call 200 times in a row has the same bits, forward and backward, by the kernels of half types for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import sdpa_backward, sdpa_forward
from kernels import needs_the_card
from row_cases import KERNEL, draw, kernel_for, normal

pytestmark = pytest.mark.gpu
REPEATS = 200
BF16, FP16 = torch.bfloat16, torch.float16
DIMS = [
    ((64, 64), BF16), ((128, 128), FP16), ((192, 128), BF16), ((256, 256), BF16), ((512, 512), BF16), ((1024, 1024), FP16)
]  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped, causal": {"heads": (8, 2), "causal": True},
    "few keys": {"L": 2000, "S": 77},
    "few queries": {"heads": (8, 1), "L": 3, "S": 3000},
    "bias": {"mask": True},
    "dropout": {"p": 0.3},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dims", "dtype"), DIMS, ids=str)
def test_the_same_bits_200_times(dims: tuple[int, int], dtype: torch.dtype, name: str) -> None:
    needs_the_card(KERNEL)
    case = {"heads": (4, 4), "L": 700, "S": 690, "causal": False, "mask": False, "p": 0.0} | CASES[name]
    q, k, v = draw(2, case["heads"], case["L"], case["S"], dims, dtype)
    mask = normal(case["heads"][0], case["L"], case["S"], dtype=dtype) if case["mask"] else None
    seed = torch.tensor([7], device="cuda") if case["p"] else None
    grad = normal(*q.shape[:-1], dims[1], dtype=dtype)
    kernels = kernel_for(*dims), "sm90_pipeline" if max(dims) > 256 else "sm90_256"
    options, rest = {"enable_gqa": q.size(1) != k.size(1)}, (seed, case["p"], case["causal"])

    def call() -> list[torch.Tensor]:
        out, lse = sdpa_forward(q, k, v, mask, *rest, **options, kernel_name=kernels[0])
        grads = sdpa_backward(grad, None, q, k, v, mask, out, lse, *rest, **options, mask_grad=case["mask"], kernel_name=kernels[1])
        return [out, lse, *(grads if case["mask"] else grads[:3])]

    first = call()
    for number in range(1, REPEATS):
        assert all(torch.equal(one, other) for one, other in zip(call(), first, strict=True)), f"call {number}"
