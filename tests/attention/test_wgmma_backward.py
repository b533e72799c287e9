"""The backward by wgmma, forced by name: every way that its slices cut a call, against the float64 oracle and PyTorch's own error.

A slice holds some matrices, rows and keys, as the workspace allows; what lies in several is carried in float. One matrix of the
cases below has 0.5 to 3 MB of P and dS, so the caps make from one slice to hundreds.
"""

from __future__ import annotations

import error_rule
import pytest
import torch
from helpers import HALVES, is_float, normal, oracle_with_grads, qkv, sdpa_backward, sdpa_forward, torch_own
from kernels import KERNELS, needs_the_card
from torch.profiler import ProfilerActivity, profile

KERNEL = next(kernel for kernel in KERNELS if kernel.name == "sm90_pipeline")
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "causal, L < S": {"L": 200, "S": 900, "causal": True},
    "causal, L > S": {"L": 900, "S": 200, "causal": True},
    "grouped": {"heads": (4, 2), "E": 264, "Ev": 520},
    "grouped, causal": {"heads": (6, 2), "causal": True},
    "one key head": {"heads": (8, 1), "L": 300, "causal": True},
    "bias": {"mask": (2, 1), "E": 512, "Ev": 512},
    "bias, grouped": {"mask": (1, 1), "heads": (4, 2)},
    "wide": {"L": 300, "S": 333, "E": 1024, "Ev": 1024},
    "many heads": {"L": 200, "S": 170, "E": 200, "Ev": 256, "heads": (20, 20)},
    "many heads, causal": {"L": 170, "S": 200, "E": 200, "Ev": 256, "heads": (20, 10), "causal": True},
}
# 64 whole matrices, of which P and dS have places for some: these are used again. Head dims for tiles of 256 columns.
WHOLE = {
    "plain": {},
    "causal": {"causal": True},
    "causal, L < S": {"L": 300, "causal": True},
    "causal, L > S": {"S": 300, "causal": True},
    "grouped": {"heads": (32, 8), "E": 456},
    "grouped, causal": {"heads": (32, 16), "causal": True, "Ev": 456},
    "one query": {"L": 1},
    "one key": {"S": 1},
    "tiny": {"L": 5, "S": 7},
    "mask": {"mask": (2, 1)},
    "dropout": {"dropout": 0.3, "causal": True},
    "key lengths": {"lengths": (0, 330)},
    "key lengths, causal": {"lengths": (60, 0), "causal": True},
    "no keys": {"lengths": (0, 0)},
}


def test_it_is_chosen() -> None:
    if "9.0a" not in torch.ops.attention_ext.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")
    typical = {"N": 8, "L": 1024, "S": 1024, "E": 512, "Ev": 512}
    for more in ({}, {"causal": 1}, {"E": 264, "Ev": 264, "N": 64}, {"L": 1 << 18, "S": 1 << 18}):
        names, values = zip(*(typical | more).items(), strict=True)
        kernel, *_ = torch.ops.attention_ext.plan("backward", names, values, 90, 132, 1 << 27)
        assert kernel == "sm90_pipeline", more


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [1 << 27, 3 << 20, 2 << 20, 1_300_000, 600_000, 1], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_slices(dtype: torch.dtype, name: str, cap: int, poison_all: None) -> None:
    needs_the_card(KERNEL)
    case = {"L": 600, "S": 700, "E": 328, "Ev": 264, "heads": (2, 2), "causal": False} | CASES[name]
    L, S, causal, gqa = case["L"], case["S"], case["causal"], case["heads"][0] != case["heads"][-1]

    def trial() -> None:
        q, k, v = qkv((2,), case["heads"], L, S, case["E"], case["Ev"], dtype, "cuda")
        mask = normal(*case["mask"], L, S, dtype=dtype, device="cuda") if "mask" in case else None
        inputs, grad = [q, k, v, mask], normal(*q.shape[:-1], case["Ev"], dtype=dtype, device="cuda")
        want, _, want_grads = oracle_with_grads(inputs, grad, causal, None, gqa)
        _, own_grads = torch_own(inputs, grad, want, causal, None, gqa)
        out, lse = sdpa_forward(*inputs, None, 0.0, causal, enable_gqa=gqa)
        arguments = (grad, None, *inputs, out, lse, None, 0.0, causal)
        options = {"enable_gqa": gqa, "mask_grad": is_float(mask), "workspace_bytes": cap, "kernel_name": KERNEL.name}
        grads, again = (sdpa_backward(*arguments, **options) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
        error_rule.check_gradients(grads, want_grads, own_grads, dtype)

    error_rule.settle(trial)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_one_launch(dtype: torch.dtype, name: str, poison_all: None) -> None:
    """The bits of one launch are those of two a slice, as which the call is made where P and dS have room for few matrices."""
    needs_the_card(KERNEL)
    case = {"L": 500, "S": 490, "E": 200, "Ev": 256, "heads": (32, 32), "causal": False} | WHOLE[name]
    (Hq, Hk), L, S, p = case["heads"], case["L"], case["S"], case.get("dropout", 0.0)
    q, k, v = qkv((2,), (Hq, Hk), L, S, case["E"], case["Ev"], dtype, "cuda")
    grad = normal(*q.shape[:-1], case["Ev"], dtype=dtype, device="cuda")
    mask = normal(*case["mask"], L, S, dtype=dtype, device="cuda") if "mask" in case else None
    seed = torch.tensor([7], device="cuda") if p else None
    options = {"enable_gqa": Hq != Hk}
    if "lengths" in case:
        options["key_lengths"] = torch.tensor(case["lengths"], dtype=torch.int32, device="cuda")
    out, lse = sdpa_forward(q, k, v, mask, seed, p, case["causal"], **options)
    of_rows, of_head = 2 * 2 * Hq * L * 4, Hq // Hk * L * -(-S // 8) * 8 * 4  # bytes: delta and norm; P and dS of a key head
    results = []
    for room in (4, 24, None):  # for key heads
        cap = 1 << 27 if room is None else (2 * of_rows + (2 * room + 1) * of_head) // 2 * 64 // 63
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            results.append(sdpa_backward(grad, None, q, k, v, mask, out, lse, seed, p, case["causal"], **options,
                                         workspace_bytes=cap, kernel_name=KERNEL.name)[:3])  # fmt: skip
            torch.cuda.synchronize()
        ran = {event.key for event in profiler.key_averages()}
        if room != 24:  # for which either may be estimated to be faster
            assert any("backward_turns_kernel" in key for key in ran) == (room is None), (room, ran)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [1 << 27, 600_000], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_with_a_large_log_sum_exp(dtype: torch.dtype, cap: int, poison_all: None) -> None:
    """A row of finfo.min has lost its scores, as a query of zeros has, and its log-sum-exp the logarithm of their number."""
    needs_the_card(KERNEL)
    q, k, v = qkv((1,), (2,), 300, 700, 264, 264, dtype, "cuda")
    lost = torch.arange(300, device="cuda") % 3 == 1
    q[..., lost, :] = 0
    grad, grads = normal(*q.shape, dtype=dtype, device="cuda"), []
    for value in (0.0, torch.finfo(torch.float32).min):
        mask = torch.zeros(300, 700, device="cuda").masked_fill(lost[:, None], value)
        out, lse = sdpa_forward(q, k, v, mask, None, 0.0, False)
        options = {"workspace_bytes": cap, "kernel_name": KERNEL.name}
        grads.append(sdpa_backward(grad, None, q, k, v, mask, out, lse, None, 0.0, False, **options)[:3])
    assert lse.min() < -1e38
    for ours, want in zip(*reversed(grads), strict=True):
        assert (ours.double() - want.double()).norm() <= torch.finfo(dtype).eps * want.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("E", [512, 1024])
def test_gradient_of_a_sum(E: int) -> None:
    """Its strides are 0, which TMA does not take: it is copied, and what runs is what the log says."""
    needs_the_card(KERNEL)
    q, k, v = (t.requires_grad_() for t in qkv((1,), (4,), 512, 512, E, E, torch.bfloat16, "cuda"))
    ones = torch.ones(1, 4, 512, E, device="cuda", dtype=torch.bfloat16)
    grads = [torch.autograd.grad(torch.ops.attention_ext.sdpa_forward(q, k, v, None, None, 0.0, False)[0], (q, k, v), g)
             for g in (ones, ones[..., :1].expand_as(ones))]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
