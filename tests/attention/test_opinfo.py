"""PyTorch's own sample inputs for scaled_dot_product_attention (OpInfo), and samples of the same kind that it lacks.

torch.testing._internal imports NumPy, without which PyTorch's samples are skipped, and expecttest, which may be missing.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
import unittest
from functools import partial

import error_rule
import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import check_lse, leaves, normal, qkv, sdpa, sdpa_with_lse
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import make_tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Sample = tuple[list[Tensor | None], dict]


def opinfo() -> list:
    """PyTorch's records of its operators.

    Of expecttest their import takes a base class for tests, so a stand-in serves. It would also forbid this process, other tests
    included, to set the flags of torch.backends.
    """
    pytest.importorskip("numpy", reason="torch.testing._internal needs NumPy")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("expecttest") is None:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            patch.setitem(sys.modules, "expecttest", stand_in)
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_methods_invocations import op_db
    return op_db


def of_pytorch(device: str, dtype: torch.dtype) -> list[Sample]:
    """[query, key, value, attn_mask], options."""
    (info,) = (op for op in opinfo() if op.name == "nn.functional.scaled_dot_product_attention")
    samples = []
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        options = dict(sample.kwargs)
        samples.append(([sample.input, *sample.args, options.pop("attn_mask", None)], options))
    return samples


def of_our_own(device: str, dtype: torch.dtype) -> list[Sample]:
    """Grouped heads, head dims that differ, masks of every kind beside them, drawn as PyTorch draws its own."""
    make = partial(make_tensor, device=device, dtype=dtype)
    samples: list[Sample] = []
    for heads, (E, Ev), causal in itertools.product([(4, 4), (4, 2), (6, 1), (6, 2, 3)], [(8, 16), (16, 8), (8, 1)], [False, True]):
        hq, hk, hv = (*heads, heads[-1])[:3]
        tensors = [make(4, hq, 3, E), make(4, hk, 6, E), make(4, hv, 6, Ev), None]
        samples.append((tensors, {"is_causal": causal, "enable_gqa": True}))
        if not causal:
            for mask in (make(3, 6), make(hq, 1, 6), make(4, 1, 3, 1), torch.rand(4, 1, 3, 6, device=device) < 0.7):
                samples.append(([*tensors[:3], mask], {"enable_gqa": True, "scale": 0.4}))
    samples.append(([make(4, 3, 8), make(4, 6, 8), make(4, 6, 16), None], {"is_causal": True}))
    samples.append(([make(3, 8), make(6, 8), make(6, 16), make(3, 6)], {}))
    return samples


def with_lse(*tensors: Tensor | None, **options) -> Tensor:
    return sdpa_with_lse(*tensors, **options)[0]


@pytest.fixture
def own_precision(device: str):
    """On CUDA, MATH in the tensors' dtype: by default it computes half types in float32, as no fused kernel does."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before or device == "cuda")
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.mark.parametrize("samples", [of_pytorch, of_our_own])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples(device: str, dtype: torch.dtype, samples, own_precision: None) -> None:
    """Out and gradients beside float64 and PyTorch's MATH back end: the error rule over the numbers of all samples together.

    A single sample has a few dozen numbers of large scores, so the largest rounding error of one is no measure for another.
    """
    error_rule.settle(lambda: check_samples(device, dtype, samples))


def check_samples(device: str, dtype: torch.dtype, samples) -> None:
    pooled: dict[tuple, list[tuple[Tensor, ...]]] = {}
    for tensors, options in samples(device, dtype):
        p, options = options.get("dropout_p", 0.0), {n: o for n, o in options.items() if n != "dropout_p"}
        if p > 0.0:
            out = sdpa(*tensors, p, **options)
            torch.autograd.grad(out.sum(), [t for t in tensors if t is not None])
            assert out.isfinite().all() and out.shape == sdpa(*tensors, **options).shape
        causal, scale, gqa = options.get("is_causal", False), options.get("scale"), options.get("enable_gqa", False)
        doubles = leaves(*(t.detach().double().cpu() if t is not None and t.is_floating_point() else t for t in tensors))
        want, want_lse = reference.attention(*doubles, causal, scale, gqa)
        grad = normal(*want.shape, dtype=dtype)
        right = torch.autograd.grad(want, [t for t in doubles if t is not None and t.requires_grad], grad.double())
        runs = []
        for op in (sdpa, with_lse, F.scaled_dot_product_attention):
            mine = leaves(*tensors)
            with sdpa_kernel(SDPBackend.MATH):
                out = op(*mine, **options)
            wanted = [t for t in mine if t is not None and t.requires_grad]
            runs.append((out.detach(), *torch.autograd.grad(out, wanted, grad.to(device))))
        *ours, own = runs
        for name, results in zip(("sdpa", "sdpa_with_lse"), ours, strict=True):
            for index, (got, exact, base) in enumerate(zip(results, (want.detach(), *right), own, strict=True)):
                assert got.shape == exact.shape == base.shape and got.dtype == base.dtype
                pooled.setdefault((name, index), []).append((got, exact, base))
        check_lse(sdpa_with_lse(*tensors, **options)[1], want_lse.detach(), dtype)
    for (name, index), triples in pooled.items():
        assert len(triples) >= (25 if index < 4 else 1)
        got, exact, base = (torch.cat([t[i].flatten() for t in triples]) for i in range(3))
        error_rule.check_error(f"{name}, result {index}", got, exact, base, 0.0, dtype)


def test_without_opinfo(device: str) -> None:
    """The shapes of PyTorch's samples, spelt out, so that they are covered without NumPy."""
    for batch, heads in (((), (4,)), ((4,), (4,))):
        for causal, gqa in itertools.product((False, True), repeat=2):
            q, k, v = leaves(*qkv(batch, heads, L=3, S=6, E=8, device=device))
            out = sdpa(q, k, v, None, 0.0, causal, enable_gqa=gqa)
            want, _ = reference.attention(q, k, v, None, causal, None, gqa)
            torch.testing.assert_close(out.detach().cpu().double(), want.detach(), rtol=1e-5, atol=1e-5)
    q, (k, v) = normal(4, 3, 8, device=device), (normal(4, 4, 6, 8, device=device) for _ in range(2))
    want, _ = reference.attention(q, k, v, normal(3, 6).to(device) * 0)
    torch.testing.assert_close(sdpa(q, k, v).cpu().double(), want, rtol=1e-5, atol=1e-5)
