"""What the tests share: the operators, inputs, PyTorch's own result, and one comparison of a whole call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import error_rule
import reference
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_ext  # noqa: F401  registers torch.ops.attention_ext

sdpa = torch.ops.attention_ext.sdpa
sdpa_with_lse = torch.ops.attention_ext.sdpa_with_lse
sdpa_forward = torch.ops.attention_ext.sdpa_forward
sdpa_backward = torch.ops.attention_ext.sdpa_backward

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
T = TypeVar("T")
baselines_taken: list[str] = []  # by torch_own in the test that runs; conftest.py empties it and writes it into the report


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """N(0, 1), the same numbers on every device."""
    return torch.randn(shape).to(dtype).to(device)


def qkv(
    batch: tuple[int, ...] = (2,),
    heads: tuple[int, ...] = (3,),
    L: int = 19,
    S: int | None = None,
    E: int = 16,
    Ev: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """query (*batch, Hq, L, E), key (*batch, Hk, S, E), value (*batch, Hv, S, Ev); heads is (Hq,), (Hq, Hk), (Hq, Hk, Hv)."""
    hq, hk, hv = (*heads, *heads[-1:] * (3 - len(heads))) if heads else ((), (), ())
    S, Ev = L if S is None else S, E if Ev is None else Ev
    lead = [(*batch, h) if heads else batch for h in (hq, hk, hv)]
    shapes = ((*lead[0], L, E), (*lead[1], S, E), (*lead[2], S, Ev))
    q, k, v = (normal(*shape, dtype=dtype, device=device) for shape in shapes)
    return q, k, v


def leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same memory as new leaves that require grad (a boolean mask as it is)."""
    return [t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]


def is_float(mask: Tensor | None) -> bool:
    return mask is not None and mask.is_floating_point()


def run(op, inputs: list[Tensor | None], grad_out: Tensor | None, **options) -> tuple[Tensor, list[Tensor]]:
    """out and, given grad_out, the gradients of every input that requires one."""
    out = op(*inputs, **options)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    if grad_out is None or not wanted:
        return out, []
    return out, list(torch.autograd.grad(out, wanted, grad_out.to(out.dtype).to(out.device)))


def torch_own(inputs: list[Tensor | None], grad_out: Tensor | None, want: Tensor, causal, scale, gqa):
    """PyTorch's own result: its default, or its math, or the formula in three calls, whichever first is not plainly wrong."""

    def math(*args, **options):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(*args, **options)

    def formula(q, k, v, mask, *, is_causal, scale, enable_gqa):
        return reference.attention(q, k, v, mask, is_causal, scale, enable_gqa, dtype=q.dtype, device=q.device)[0]

    def padded(q, k, v, mask, *, is_causal, scale, enable_gqa):
        extra = -k.size(-2) % 16
        full = mask.expand(*mask.shape[:-2], q.size(-2), k.size(-2))
        hidden = False if mask.dtype == torch.bool else float("-inf")
        full = F.pad(full if mask.dtype == torch.bool else full.to(q.dtype), (0, extra), value=hidden)
        k, v = (F.pad(t, (0, 0, 0, extra)) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, full, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    # Fresh copies where memory is not aligned: PyTorch's CUDA kernels take such operands for aligned ones, which ends in an error
    # that no later call of the process survives.
    # Dense copies where rows overlap as well.
    def own(t: Tensor | None) -> Tensor | None:
        if t is None or not t.is_cuda:
            return t if t is None or t.data_ptr() % 16 == 0 else t.detach().clone()
        apart = t.dim() < 2 or t.size(-2) <= 1 or t.stride(-2) >= t.size(-1) or t.stride(-1) != 1
        return t if t.data_ptr() % 16 == 0 and apart else t.detach().contiguous().clone()

    inputs = [own(t) for t in inputs]
    # The same goes for its fused CUDA kernels with masks whose rows are not on 16-byte boundaries: there it gets the same problem
    # with the mask expanded and the keys padded to a multiple of 16 by masked ones.
    masked_on_cuda = len(inputs) > 3 and inputs[3] is not None and inputs[0].is_cuda
    default = padded if masked_on_cuda else F.scaled_dot_product_attention
    for name, op in (("default", default), ("math", math), ("three calls", formula)):
        try:
            out, grads = run(op, leaves(*inputs), grad_out, is_causal=causal, scale=scale, enable_gqa=gqa)
        except (RuntimeError, IndexError):
            continue
        finite = all(bool(t.isfinite().all()) for t in (out, *grads))
        if out.shape == want.shape and finite and error_rule.errors(out, want)[1] < error_rule.WRONG:
            baselines_taken.append(name)
            return out, grads
    raise AssertionError("PyTorch has no usable result to compare with")


def oracle_with_grads(inputs: list[Tensor | None], grad_out: Tensor | None, causal, scale, gqa):
    """out, lse and gradients in float64."""
    doubles = [t.detach().cpu().double() if t is not None and t.is_floating_point() else t for t in inputs]
    doubles = leaves(*doubles)
    out, lse = reference.attention(*doubles, causal, scale, gqa)
    wanted = [t for t in doubles if t is not None and t.requires_grad]
    if grad_out is None:
        return out, lse, []
    return out, lse, list(torch.autograd.grad(out, wanted, grad_out.cpu().double(), materialize_grads=True))


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of the call, which runs once before on another stream, as PyTorch asks for; what it returns under capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # an allocation outside of torch's allocator, or a wait, would be an error here
        result = call()
    return graph, result


def redrawn(tensor: Tensor) -> Tensor:
    """Another draw of the same kind: the same strides over a copy of the memory with random signs."""
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.detach().untyped_storage())
    signs = torch.randint(0, 2, memory.shape).mul(2).sub(1).to(tensor.device, tensor.dtype)
    return (memory * signs).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def compare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    gqa: bool = False,
    backward: bool = True,
    op=sdpa,
) -> tuple[Tensor, list[Tensor]]:
    """Runs `op` forward and backward and holds it to the error rule; returns out and the gradients of q, k, v (and mask)."""
    results: list[tuple[Tensor, list[Tensor]]] = []

    def trial() -> None:
        inputs = [*(redrawn(t) if results else t for t in (query, key, value)), mask]
        shape = reference.attention(*(None if t is None else t.detach() for t in inputs), causal, scale, gqa)[0].shape
        grad_out = normal(*shape, dtype=query.dtype) if backward else None
        want, _, want_grads = oracle_with_grads(inputs, grad_out, causal, scale, gqa)
        base, base_grads = torch_own(inputs, grad_out, want, causal, scale, gqa)
        out, grads = run(op, leaves(*inputs), grad_out, is_causal=causal, scale=scale, enable_gqa=gqa)
        results.append((out.detach(), grads))
        assert len(grads) == len(want_grads), "a gradient is missing"
        error_rule.check_error("out", out, want, base)
        error_rule.check_gradients(grads, want_grads, base_grads, query.dtype)

    error_rule.settle(trial)
    return results[0]


def close(got: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    """For results without a rounding model of their own: within 16 eps of the dtype, relative to the largest value."""
    eps = torch.finfo(got.dtype).eps
    limit = (16 * eps if tolerance is None else tolerance) * max(1.0, error_rule.largest(want))
    torch.testing.assert_close(got.detach().cpu().double(), want.detach().cpu().double(), rtol=0.0, atol=limit)


def check_lse(lse: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Natural logarithm, float32 (float64 for float64), -inf exactly for a dead row."""
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and lse.shape == want.shape
    alive = want.isfinite()
    assert torch.equal(lse.cpu() == float("-inf"), ~alive)
    close(lse.detach().cpu()[alive], want[alive])


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """PyTorch's own setting for float32 products on CUDA."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
