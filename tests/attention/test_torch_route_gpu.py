"""PyTorch's back ends as sdpa runs them: values and gradients against float64, what the profiler sees, compiled programs.

The questions are those that only a card can settle; test_torch_route.py says what runs where.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import close, compare, leaves, normal, qkv, run, sdpa, sdpa_with_lse
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch_route import (
    BF16,
    CALLS,
    FP16,
    FP32,
    as_arguments,
    generous,  # noqa: F401 (a fixture for all tests here)
    kernel_of,
    problem,
)

import attention_ext

pytestmark = pytest.mark.gpu
KERNELS = {"torch: cudnn": "cudnn", "torch: flash": "flash_fwd", "torch: efficient": "fmha_cutlass"}


def launched(call: Any) -> str:
    """The back end that a call launches kernels of, or what it launches."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profiler.key_averages()).lower()
    found = [name for name, part in KERNELS.items() if part in names]
    return found[0] if len(found) == 1 else names


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", CALLS)
def test_values(name: str, backward: bool, dtype: torch.dtype) -> None:
    """Within the error rule, in the memory order of the query; what explain names is what the profiler sees."""
    (q, k, v), mask, options = problem(name, dtype)
    arguments = as_arguments(options)
    compare(q, k, v, mask, **options, backward=backward)
    inputs = leaves(q, k, v) if backward else [q, k, v]
    explained = kernel_of(*inputs, mask, **arguments)
    if explained in KERNELS:
        assert launched(lambda: sdpa(*inputs, mask, **arguments)) == explained
    else:
        assert not any(part in launched(lambda: sdpa(*inputs, mask, **arguments)) for part in KERNELS.values())
    for order in (lambda t: t, lambda t: t if t.dim() < 3 else t.transpose(-2, -3).contiguous().transpose(-2, -3)):
        query = order(q)
        like = order(torch.empty(*q.shape[:-1], v.size(-1), device="cuda"))
        assert q.size(-2) == 1 or sdpa(query, k, v, mask, **arguments).stride() == like.stride()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", ["odd length", "causal, more keys", "grouped, causal", "mask"])
def test_gradients_are_those_of_our_kernels(name: str, dtype: torch.dtype) -> None:
    """sdpa_with_lse, which is always ours, gives the same within what rounding makes of it."""
    (q, k, v), mask, options = problem(name, dtype)
    arguments = as_arguments(options)
    grad = normal(*q.shape[:-1], v.size(-1), dtype=dtype, device="cuda")
    out, grads = run(sdpa, [*leaves(q, k, v), mask], grad, **arguments)
    own, own_grads = run(lambda *args, **rest: sdpa_with_lse(*args, **rest)[0], [*leaves(q, k, v), mask], grad, **arguments)
    for got, want in zip((out, *grads), (own, *own_grads), strict=True):
        close(got, want, (8 if dtype == BF16 else 256) * torch.finfo(dtype).eps)


@pytest.mark.parametrize("L", [1, 64, 128, 192, 320, 704, 705, 1000])
@pytest.mark.parametrize("level", [-90.0, -120.0, -300.0])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_very_negative_scores(L: int, level: float, causal: bool) -> None:
    """All scores near one large negative number: cuDNN's gradients are NaN for some lengths (pytorch/pytorch#196678)."""
    S = 128 if L == 1 else L
    q, k, v = qkv((2,), (4,), L, S, 64, dtype=BF16, device="cuda")
    size = (-level / 8.0) ** 0.5  # 64 products of -size^2, over the root of 64
    q, k = 0.01 * q + size, 0.01 * k - size
    assert abs((q[0, 0, 0].float() @ k[0, 0, 0].float()).item() / 8.0 - level) < 0.05 * -level
    out, grads = run(sdpa, leaves(q, k, v), normal(*q.shape, device="cuda"), is_causal=causal)
    assert all(bool(t.isfinite().all()) for t in (out, *grads)), kernel_of(*leaves(q, k, v), is_causal=causal)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("L", [64, 65, 127])
@pytest.mark.parametrize("backward", [False, True])
def test_rows_without_a_key(dtype: torch.dtype, L: int, backward: bool) -> None:
    q, k, v = qkv((2,), (3,), L, 100, 64, dtype=dtype, device="cuda")
    mask = torch.rand(2, 1, L, 100, device="cuda") < 0.5
    mask[0, :, 3] = False
    mask[1] = False
    inputs = [*(leaves(q, k, v) if backward else (q, k, v)), mask]
    out, grads = run(sdpa, inputs, normal(*q.shape, device="cuda") if backward else None)
    assert bool((out[0, :, 3] == 0).all()) and bool((out[1] == 0).all())
    for grad in grads:
        assert bool(grad.isfinite().all()) and bool((grad[1] == 0).all())
    if backward:
        assert kernel_of(*inputs) == "torch: efficient" and bool((grads[0][0, :, 3] == 0).all())


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_infinity(causal: bool) -> None:
    """The row is NaN as everywhere, and no other."""
    q, k, v = qkv((1,), (2,), 256, 256, 64, dtype=BF16, device="cuda")
    q[0, 0, 7], k[0, 0, 5] = 3e19, 3e19
    others = [row for row in range(256) if row != 7]
    for inputs in ([q, k, v], leaves(q, k, v)):
        out = sdpa(*inputs, is_causal=causal)
        assert bool(out[0, 0, 7].isnan().all())
        assert bool(out[0, 0, others].isfinite().all()) and bool(out[0, 1].isfinite().all())
    assert kernel_of(*inputs, is_causal=causal) == "torch: cudnn" or torch.cuda.get_device_capability() != (9, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_heads_expanded_in_memory(causal: bool) -> None:
    """L of 65: before torch 2.14 the efficient kernels read other heads where the stride is 0, so they are not asked."""
    q, k, v = qkv((1,), (4,), 65, 65, 64, dtype=BF16, device="cuda")
    k, v = (t[:, :1].expand(t.shape) for t in (k, v))
    with torch.no_grad():
        compare(q, k, v, causal=causal, backward=False)
    compare(q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_gradients(dtype: torch.dtype, causal: bool, deterministic: object) -> None:
    q, k, v = qkv((2,), (4,), 1024, 1024, 64, dtype=dtype, device="cuda")
    assert kernel_of(*leaves(q, k, v), is_causal=causal) in ("torch: flash", "torch: efficient")
    grad = normal(*q.shape, device="cuda")
    first, second = (run(sdpa, leaves(q, k, v), grad, is_causal=causal)[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("grad", [False, True])
def test_autocast(grad: bool) -> None:
    """The region's dtype: of this package's kernels (without a gradient) and of a back end by name, which does not cast itself."""
    q, k, v = qkv((2,), (4,), 192, 192, 64, device="cuda")
    with torch.autocast("cuda", BF16):
        inputs = leaves(q, k, v) if grad else [q, k, v]
        out = sdpa(*inputs)
    assert out.dtype == BF16
    if grad:
        assert all(t.dtype == FP32 for t in torch.autograd.grad(out.sum(), inputs))
    close(out, F.scaled_dot_product_attention(q.double(), k.double(), v.double()), 0.03)


def test_second_derivatives_are_refused() -> None:
    for dtype in (BF16, FP32):
        inputs = leaves(*qkv((1,), (2,), 192, 192, 64, dtype=dtype, device="cuda"))
        with pytest.raises((RuntimeError, NotImplementedError)):
            (first,) = torch.autograd.grad(sdpa(*inputs).sum(), inputs[0], create_graph=True)
            first.sum().backward()


def test_memory_is_linear() -> None:
    """No back end holds the scores, 512 MiB in float32 here."""
    q, k, v = qkv((1,), (8,), 4096, 4096, 64, dtype=BF16, device="cuda")
    for inputs, options in ((leaves(q, k, v), {}), ([q, k, v], {"is_causal": True}), (leaves(*(t.float() for t in (q, k, v))), {})):
        sdpa(*inputs, **options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = sdpa(*inputs, **options)
        if out.requires_grad:
            out.sum().backward()
        assert torch.cuda.max_memory_allocated() - before < 200 << 20


def test_back_ends_turned_off() -> None:
    q, k, v = qkv((2,), (4,), 256, 256, 64, dtype=BF16, device="cuda")
    with sdpa_kernel(SDPBackend.MATH):
        assert not kernel_of(q, k, v).startswith("torch")
        compare(q, k, v)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        inputs = leaves(q, k, v)
        assert kernel_of(*inputs) == "torch: flash" == launched(lambda: sdpa(*inputs))


def test_the_log_says_what_explain_says(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv((2,), (4,), 256, 256, 64, dtype=BF16, device="cuda")
    explained = attention_ext.explain(q, k, v)
    with caplog.at_level(logging.INFO, "attention_ext"):
        sdpa(q, k, v)
    (text,) = [record.getMessage() for record in caplog.records if record.name == "attention_ext"]
    assert text == f"sdpa on cuda {q.dtype}: {explained.kernel}, because {explained.reason}"


def test_one_thread_after_another() -> None:
    """cuDNN keeps plans by thread; what runs and its values do not depend on it."""
    import threading

    q, k, v = qkv((2,), (4,), 136, 136, 64, dtype=BF16, device="cuda")
    want, results = sdpa(q, k, v), []
    threads = [threading.Thread(target=lambda: results.append(sdpa(q, k, v))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and all(torch.equal(want, got) for got in results)
