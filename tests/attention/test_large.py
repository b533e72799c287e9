"""Sizes at which 32-bit arithmetic ends: offsets past 2^31 elements, more than 65535 heads, more than 100,000 rows or keys.

Where the whole result cannot be compared, the incoming gradient is zero but for a few rows on both sides of each boundary: all
gradients are then exact functions of those rows.
"""

from __future__ import annotations

from functools import lru_cache

import error_rule
import pytest
import reference
import torch
from forced import attend_with_lse, by_kernel, needs
from helpers import check_lse, close, is_float, leaves, normal, sdpa_backward, sdpa_forward
from kernel_names import kernel_names
from kernels import KERNELS, Kernel, needs_the_card, rows_on_16_bytes
from torch import Tensor

pytestmark = pytest.mark.gpu
EPS = 2.0**-8  # bfloat16
MOST_WGMMA_KEYS = 1 << 18  # csrc/core/arithmetic.h


def free(gib: float) -> None:
    """Skips where so much memory is not to be had."""
    torch.cuda.empty_cache()
    have = torch.cuda.mem_get_info()[0] / 2**30
    if have < gib:
        pytest.skip(f"needs {gib:.0f} GiB of free GPU memory, {have:.0f} are")


@pytest.fixture(autouse=True)
def give_back():
    yield
    torch.cuda.empty_cache()


def gpu_normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def boundary_rows(n: int) -> list[int]:
    """The first and last rows, and those around the offsets 2^30, 2^31 and 2^32 of an n x n matrix."""
    edges = [bound // n for bound in (2**30, 2**31, 2**32)]
    rows = {0, 1, n // 2, n - 1, *(e + d for e in edges for d in (-1, 0, 1, 2))}
    return sorted(r for r in rows if r < n)


def random_mask(n: int, kind: str) -> Tensor:
    """(n, n), every element drawn for itself, a strip at a time."""
    mask = torch.empty(n, n, device="cuda", dtype=torch.bool if kind == "bool" else torch.bfloat16)
    for strip in mask.split(4096):
        strip.random_(0, 2) if kind == "bool" else strip.normal_()
    return mask


def rows_only(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: list[int], grad: Tensor, dtype, device, **options):
    """The rows alone: out, lse, and the gradients of the rows' queries, of k, v and of the rows of a float mask."""
    given = [t.detach().to(device, dtype).requires_grad_() for t in (q[..., rows, :], k, v)]
    part = None if mask is None else mask[rows].to(device)
    if is_float(part):
        part = part.to(dtype).requires_grad_()
        given.append(part)
    out, lse = reference.attention(*given[:3], part, dtype=dtype, device=device, **options)
    return out.detach(), lse.detach(), torch.autograd.grad(out, given, grad[..., rows, :].to(device, dtype))


@pytest.mark.parametrize(
    ("n", "kind", "p"),
    [(46400, "bool", 0.0), (46400, "float", 0.0), (65600, "bool", 0.0), (65600, "float", 0.0), (65600, "bool", 0.25)],
)
def test_offsets_of_the_mask(n: int, kind: str, p: float) -> None:
    """n^2 elements pass 2^31 or 2^32; so do the scores that dropout counts. Forward, backward, and the mask's own gradient."""
    bytes_of = n * n * (1 if kind == "bool" else 2 + 2 + 4)  # a float mask has a gradient, summed in float32
    free(bytes_of / 2**30 + 4)
    q, k, v = (gpu_normal(1, 1, n, 64) for _ in range(3))
    mask, rows = random_mask(n, kind), boundary_rows(n)
    grad = torch.zeros_like(q)
    grad[..., rows, :] = gpu_normal(1, 1, len(rows), 64)
    seed, options = None, {}
    if p:
        seed = torch.tensor([2**40 + 12345], device="cuda")
        options = {"keep": reference.dropout_keep_mask(int(seed), p, 1, n, n, rows=rows), "dropout_p": p}
    want, want_lse, want_grads = rows_only(q, k, v, mask, rows, grad, torch.float64, "cpu", **options)
    base, _, base_grads = rows_only(q, k, v, mask, rows, grad, torch.bfloat16, "cuda", **options)
    out, lse = sdpa_forward(q, k, v, mask, seed, p, False)
    error_rule.check_error("out", out[..., rows, :], want, base)
    check_lse(lse[..., rows], want_lse, torch.bfloat16)
    grads = sdpa_backward(grad, None, q, k, v, mask, out, lse, seed, p, False, mask_grad=kind == "float")
    others = torch.ones(n, dtype=torch.bool, device="cuda")
    others[rows] = False
    assert not grads[0][..., others, :].any()
    picked = [grads[0][..., rows, :], grads[1], grads[2]]
    if kind == "float":
        for first in range(0, n, 4096):
            assert not grads[3][first : first + 4096][others[first : first + 4096]].any()
        picked.append(grads[3][rows])
    assert len(picked) == len(want_grads)
    error_rule.check_gradients(picked, want_grads, base_grads, torch.bfloat16)


FAR = {"heads": (1, 8), "rows": (2, 8), "rows, odd": (2, 1), "columns": (3, 1)}  # the dim of the large stride, which is a multiple


def far_views() -> list:
    """(kernel, operand, dim, multiple): a kernel of aligned operands takes query, key and value only with rows on 16 bytes."""
    return [
        pytest.param(kernel, operand, *FAR[far], id=f"{kernel.name}-{operand}-{far}")
        for kernel in KERNELS
        if kernel.device == "cuda"
        for operand in ("query", "key", "value", "attn_mask", "grad_out")
        for far in FAR
        if FAR[far][1] % 8 == 0 or not kernel.aligned or operand in ("attn_mask", "grad_out")
    ]


@pytest.mark.parametrize(("kernel", "operand", "dim", "multiple"), far_views())
def test_offsets_of_an_operand(kernel: Kernel, operand: str, dim: int, multiple: int) -> None:
    """A view whose strides reach past 2^31 elements, in memory full of NaN, gives what a dense copy gives the same kernel."""
    needs_the_card(kernel)
    shapes = {
        "query": (1, 3, 9, 8),
        "key": (1, 3, 10, 8),
        "value": (1, 3, 10, 8),
        "attn_mask": (1, 3, 9, 10),
        "grad_out": (1, 3, 9, 8),
    }
    dtype = torch.bfloat16 if torch.bfloat16 in kernel.dtypes else torch.float32
    free(3 * dtype.itemsize)
    memory = torch.full((2**31 + 2**28,), float("nan"), device="cuda", dtype=dtype)
    given = {name: gpu_normal(*shape, dtype=dtype) for name, shape in shapes.items()}
    shape = shapes[operand]
    strides = list(given[operand].stride())
    strides[dim] = (2**31 + 2**20) // (shape[dim] - 1) // 8 * 8 + multiple % 8
    given[operand] = memory.as_strided(shape, strides, 0).copy_(given[operand])
    assert memory.numel() > sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) > 2**31
    # The backward by name: "auto" may choose for the copy one that does not take the view.
    backward = "pipeline"
    if kernel.aligned and all(rows_on_16_bytes(given[name]) for name in ("query", "key", "value", "grad_out")):
        backward = kernel.name if kernel.name in kernel_names("backward") else "sm90_pipeline"
    options = {"mask_grad": True, "kernel_name": backward}
    results = []
    for t in (given, {name: t.contiguous() for name, t in given.items()}):
        tensors = [t[name] for name in ("query", "key", "value", "attn_mask")]
        assert kernel.takes(*tensors[:3])
        out, lse = sdpa_forward(*tensors, None, 0.0, False, kernel_name=kernel.name)
        results.append((out, lse, *sdpa_backward(t["grad_out"], None, *tensors, out, lse, None, 0.0, False, **options)))
    assert all(t.isfinite().all() for t in results[0])
    for got, want in zip(*results, strict=True):
        close(got, want, EPS)


@lru_cache(maxsize=2)  # the order of the tests is that of a problem in both dtypes
def many_heads(batch: int, heads: tuple[int, ...], dtype: torch.dtype) -> tuple:
    """query, key, value, mask and grad_out with batch * heads matrices of scores; out, lse and gradients in float64 with dropout by
    seed 77, p = 0.3; how far an element of the mask's gradient may be off.

    An element of the mask's gradient is a float32 sum of heads * L terms of either sign. Each addition rounds the sum so far by up
    to half an eps of it, independently of the others, so the error grows like eps times the root of the sum of the squares of these
    partial sums (here float64, in the order of the heads). Twice the half of that eps is 3.5 standard deviations of even rounding.
    A term that is lost stays far above it.
    """
    L, S, E, p = 3, 5, 8, 0.3
    q, k, v = (gpu_normal(batch, h, n, E, dtype=dtype) for h, n in ((heads[0], L), (heads[-1], S), (heads[-1], S)))
    mask, grad = gpu_normal(batch, 1, 1, S, dtype=dtype), gpu_normal(batch, heads[0], L, E, dtype=dtype)
    keep = reference.dropout_keep_mask(77, p, batch * heads[0], L, S).view(batch, heads[0], L, S)
    given = [t.cpu().double() for t in (q, k, v, mask)]
    given[3] = given[3].expand(batch, heads[0], L, S).clone()  # so that its gradient is the terms
    given = [t.requires_grad_() for t in given]
    want, want_lse = reference.attention(*given, gqa=len(heads) > 1, keep=keep, dropout_p=p)
    *right, terms = torch.autograd.grad(want, given, grad.cpu().double())
    partial = terms.flatten(1, 2).cumsum(1)
    mask_grad = partial[:, -1].view(batch, 1, 1, S)
    of_the_sum = torch.finfo(torch.float32).eps * float(partial.square().sum(1).sqrt().max())
    return (q, k, v, mask, grad), (want.detach(), want_lse.detach(), *right, mask_grad), of_the_sum


@pytest.mark.parametrize(("kernel", "dtype"), by_kernel((torch.float16, torch.float32), (torch.float16,)))
@pytest.mark.parametrize(("batch", "heads"), [(70_000, (1,)), (300, (300,)), (1, (65_537,)), (20_000, (8, 2))], ids=str)
def test_many_heads(kernel: Kernel, dtype: torch.dtype, batch: int, heads: tuple[int, ...]) -> None:
    """batch * heads beyond 65535, the largest grid of a CUDA launch but for its first dim; all of it compared, dropout too."""
    (*inputs, grad), (want, want_lse, *right, mask_grad), of_the_sum = many_heads(batch, heads, dtype)
    needs(kernel, *inputs[:3], len(heads) > 1)
    inputs, seed = leaves(*inputs), torch.tensor([77], device="cuda")
    out, lse = attend_with_lse(kernel, *inputs, 0.3, enable_gqa=len(heads) > 1, seed=seed)
    *grads, got_mask_grad = torch.autograd.grad(out, inputs, grad)
    tolerance = 8 * torch.finfo(dtype).eps
    for got, of in zip((out, *grads), (want, *right), strict=True):
        close(got, of, tolerance)
    close(got_mask_grad, mask_grad, tolerance + of_the_sum / max(1.0, error_rule.largest(mask_grad)))
    check_lse(lse, want_lse, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("L", "S"), [(3, 131_077), (5, 100_003), (131_077, 3), (100_003, 5), (262_147, 1)])
def test_long(L: int, S: int, causal: bool, dtype: torch.dtype) -> None:
    """More than 100,000 keys, or rows, forward and backward."""
    q, k, v = (gpu_normal(1, 2, n, 16, dtype=dtype) for n in (L, S, S))
    grad = gpu_normal(1, 2, L, 16, dtype=dtype)
    results = []
    for of, device in ((torch.float64, "cpu"), (dtype, "cuda")):
        given = [t.to(device, of).requires_grad_() for t in (q, k, v)]
        out, lse = reference.attention(*given, None, causal, dtype=of, device=device)
        results.append((out.detach(), lse.detach(), *torch.autograd.grad(out, given, grad.to(device, of))))
    (want, want_lse, *right), (base, _, *own) = results
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, causal)
    grads = sdpa_backward(grad, None, q, k, v, None, out, lse, None, 0.0, causal)
    check_lse(lse, want_lse, dtype)
    among = error_rule.largest(*right)
    for name, got, one, other in zip(("out", "query", "key", "value"), (out, *grads), (want, *right), (base, *own), strict=False):
        error, bound = error_rule.errors(got, one)[0], error_rule.errors(other, one)[0]
        size = among if error_rule.largest(one) < 1e-6 * among else 0.0
        unit = error_rule.ulp(dtype, error_rule.largest(one)) + 64 * error_rule.ulp(torch.float32, size)
        limit = 4 * bound + unit  # 4: each sums 100,000 terms in an order of its own
        assert error <= limit, f"{name}: error {error:.3e}, the formula's {bound:.3e}, limit {limit:.3e}"


@pytest.mark.parametrize(("kernel", "dtype"), by_kernel((torch.float16,), (torch.float16,)))
@pytest.mark.parametrize("width", [5_000_011, 33])
def test_workspace_stays_small_for_long_rows(kernel: Kernel, dtype: torch.dtype, width: int) -> None:
    """One row over millions of keys, and millions of rows over a few keys, within the workspace's cap and the rows' own size."""
    L, S = (2, width) if width > 1000 else (4_000_003, width)
    if S > MOST_WGMMA_KEYS and kernel.capability:
        pytest.skip(f"{kernel.name} takes {MOST_WGMMA_KEYS} keys at most")
    q, k, v = (torch.ones(1, 1, n, 8, device="cuda", dtype=dtype) for n in (L, S, S))
    needs(kernel, q, k, v)
    v[..., 0, :] = 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]  # without what the allocator rounds up
    out, lse = attend_with_lse(kernel, q, k, v)
    extra = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - out.nbytes - lse.nbytes
    assert extra <= max(128 << 20, 2 * (S + 8) * 4 + 4096), f"{extra >> 20} MiB"
    out, lse = (torch.stack((t.amin(), t.amax())) for t in (out, lse))  # all elements are the same
    close(out, torch.full((2,), (S - 1) / S), 2.0**-10)
    check_lse(lse, torch.full((2,), 8**0.5 + torch.tensor(float(S)).log().item()), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_over_millions_of_keys(dtype: torch.dtype) -> None:
    """Tensor Cores truncate as they add, 4 % of one sum of 5,000,011 ones: the stage alone, and the query's gradient."""
    S = 5_000_011
    weights, value = (torch.ones(1, *size, device="cuda", dtype=dtype) for size in ((3, S), (S, 20)))
    row_sum = torch.full((1, 3), float(S), device="cuda")
    out = torch.ops.attention_ext.scores_values(weights, row_sum, value)
    close(out, torch.ones(out.shape), torch.finfo(dtype).eps)

    if dtype == torch.float16:
        return  # the gradients of the scores would be below its normal numbers
    sign = 1.0 - 2.0 * (torch.arange(S, device="cuda") % 2)
    sign[-1] = 0.0
    q = torch.zeros(1, 1, 2, 8, device="cuda", dtype=dtype, requires_grad=True)
    k = v = sign[:, None].expand(S, 8).to(dtype)[None, None]
    (grad,) = torch.autograd.grad(torch.ops.attention_ext.sdpa(q, k, v).sum(), q)
    close(grad, torch.full(grad.shape, 8**0.5 * (S - 1) / S), 2 * torch.finfo(dtype).eps)


def test_dropout_rows_share_nothing_past_the_boundary() -> None:
    """Rows 2^32 scores apart have random numbers of their own: q = 0 makes the output a plain mean of the kept values."""
    n, p = 65_600, 0.5
    q = torch.zeros(1, 1, n, 8, device="cuda", dtype=torch.float32)
    v = normal(1, 1, n, 8, device="cuda")
    out, _ = sdpa_forward(q, q, v, None, torch.tensor([5], device="cuda"), p, False)
    rows = boundary_rows(n)
    keep = reference.dropout_keep_mask(5, p, 1, n, n, rows=rows)[0]
    want = keep.double() @ v[0, 0].cpu().double() / (n * (1 - reference.rounded_dropout_p(p)))
    close(out[0, 0, rows], want, 1e-5)
    assert len({tuple(row) for row in out[0, 0, rows].tolist()}) == len(rows)
