"""On the GPU: every launch is on the current stream, graphs record all of it, and errors of the card are named.

By the plan's choice and by each kernel of a name (forced.py).
"""

from __future__ import annotations

import gc
import threading
from functools import partial

import pytest
import reference
import torch
from forced import AUTO, CAP, attend, attend_with_lse, by_kernel, needs, workspace
from helpers import HALVES, captured, close, leaves, normal, qkv, run, sdpa, sdpa_forward
from kernels import KERNELS, Kernel

pytestmark = pytest.mark.gpu
KINDS = [{}, {"is_causal": True}, {"enable_gqa": True}]
NAMED = [kernel for kernel in KERNELS if kernel.device == "cuda"]


def wanted(q, k, v, options):
    return reference.attention(q, k, v, None, options.get("is_causal", False), None, options.get("enable_gqa", False))[0]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize(("kernel", "dtype", "E"), by_kernel((torch.float16,), (torch.float16,), (64, 512)))
def test_side_stream(kernel: Kernel, dtype: torch.dtype, E: int, options: dict) -> None:
    """The inputs appear late on the side stream; a launch elsewhere would read them too early."""
    q, k, v = qkv((1,), (2, 1) if options.get("enable_gqa") else (2,), L=128, E=E, dtype=dtype, device="cuda")
    needs(kernel, q, k, v, options.get("enable_gqa", False))
    attend(kernel, q, k, v, **options)
    x, stream = torch.zeros_like(q), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(q * 2)
        out = attend(kernel, x, k, v, **options)
    stream.synchronize()
    close(out, wanted(q * 2, k, v, options), 4 * torch.finfo(out.dtype).eps)


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize(("kernel", "dtype", "E"), by_kernel((torch.float32, *HALVES), head_dims=(64, 512)))
def test_graph_replays_with_new_inputs(kernel: Kernel, dtype: torch.dtype, E: int, options: dict) -> None:
    inputs = leaves(*qkv((1,), (2, 1) if options.get("enable_gqa") else (2,), L=130, E=E, dtype=dtype, device="cuda"))
    needs(kernel, *inputs, options.get("enable_gqa", False))
    op = partial(attend, kernel)
    grad = normal(1, 2, 130, E, dtype=dtype, device="cuda")
    graph, (out, grads) = captured(lambda: run(op, inputs, grad, **options))
    with torch.no_grad():
        for t in (*inputs, grad):
            t.copy_(torch.randn_like(t))
    graph.replay()
    fresh, fresh_grads = run(op, leaves(*(t.detach().clone() for t in inputs)), grad, **options)
    close(out, wanted(*inputs, options), 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5)
    for a, b in zip((out, *grads), (fresh, *fresh_grads), strict=True):
        close(a, b, 8 * torch.finfo(dtype).eps)


MASKS = ["bool", "float", "float32 row", "stride 0"]


def masked(kind: str, L: int, S: int, dtype: torch.dtype) -> torch.Tensor:
    """Row 5 is dead."""
    keep = torch.rand(L, S) < 0.6
    keep[:, 0], keep[5] = True, False
    return {
        "bool": lambda: keep.cuda(),
        "float": lambda: normal(3, L, S, dtype=dtype).masked_fill(~keep, float("-inf")).cuda(),
        "float32 row": lambda: normal(1, S).cuda(),
        "stride 0": lambda: keep[:, :1].cuda().expand(2, 3, L, S),
    }[kind]()


@pytest.mark.parametrize(("kernel", "dtype"), by_kernel((torch.float32, *HALVES)))
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_graph_with_masks_and_dropout(kernel: Kernel, dtype: torch.dtype, kind: str, p: float) -> None:
    """out, lse and every gradient of a replay, the mask's too, are those of an eager call with the same inputs and seed."""
    L, S = 70, 133
    inputs = leaves(*qkv(L=L, S=S, E=64, dtype=dtype, device="cuda"), masked(kind, L, S, dtype))
    needs(kernel, *inputs[:3])
    grad, grad_lse = normal(2, 3, L, 64, dtype=dtype, device="cuda"), normal(2, 3, L, device="cuda")
    wanted = [t for t in inputs if t.requires_grad]
    seed = torch.tensor([0], device="cuda")

    def step() -> list[torch.Tensor]:
        out, lse = attend_with_lse(kernel, *inputs, p, seed=seed if p else None)
        return [out, lse, *torch.autograd.grad((out, lse), wanted, (grad, grad_lse))]

    graph, results = captured(step)
    seen = []
    for number in (3, 4):
        with torch.no_grad():
            seed.fill_(number)
            for t in (*inputs[:3], grad):
                t.copy_(torch.randn_like(t))
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert torch.equal(got, want)
        seen.append(results[0].clone())
    assert not torch.equal(*seen)


@pytest.mark.parametrize(("kernel", "dtype"), by_kernel((torch.float16,), (torch.float16,)))
def test_side_stream_of_the_backward_pass(kernel: Kernel, dtype: torch.dtype) -> None:
    """The incoming gradient appears late on the side stream, and autograd runs the backward pass on the stream of the forward."""
    inputs = leaves(*qkv((1,), (2,), L=128, E=64, dtype=dtype, device="cuda"))
    needs(kernel, *inputs)
    grad = normal(1, 2, 128, 64, dtype=dtype, device="cuda")
    _, want = run(partial(attend, kernel), inputs, grad)
    late, stream = torch.zeros_like(grad), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attend(kernel, *inputs)
        torch.cuda._sleep(200_000_000)
        late.copy_(grad)
        grads = torch.autograd.grad(out, inputs, late)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


@pytest.mark.parametrize(("kernel", "dtype"), by_kernel((torch.float16,), (torch.float16,)))
def test_threads_on_streams_of_their_own(kernel: Kernel, dtype: torch.dtype) -> None:
    inputs, grad = qkv(L=130, E=64, dtype=dtype, device="cuda"), normal(2, 3, 130, 64, dtype=dtype, device="cuda")
    needs(kernel, *inputs)
    op = partial(attend, kernel)
    out, grads = run(op, leaves(*inputs), grad, is_causal=True)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got, got_grads = run(op, leaves(*inputs), grad, is_causal=True)
                if not all(torch.equal(a, b) for a, b in zip((got, *got_grads), (out, *grads), strict=True)):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


QUIET = {
    "half": {},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.3},
    "grouped": {"heads": (4, 2), "enable_gqa": True},
    "value heads": {"heads": (6, 2, 3), "enable_gqa": True},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "float32 mask": {"mask": "float32 row"},
    "odd head dim": {"E": 71},
    "wide": {"E": 512},
}


def quiet(kernel: Kernel, name: str) -> tuple[list[torch.Tensor], dict]:
    case = dict(QUIET[name])
    dtype, kind = case.pop("dtype", torch.float16), case.pop("mask", None)
    inputs = list(qkv(heads=case.pop("heads", (3,)), L=70, S=133, E=case.pop("E", 64), dtype=dtype, device="cuda"))
    needs(kernel, *inputs, case.get("enable_gqa", False))
    return [*inputs, masked(kind, 70, 133, dtype) if kind else None], case


def by_name(kernels: list[Kernel], *more: bool) -> list:
    """(kernel, name, *more) for the cases of QUIET whose dtype and head dim it takes."""
    cases = {name: (case.get("dtype", torch.float16), case.get("E", 64)) for name, case in QUIET.items()}
    rows = [(kernel, name) for kernel in kernels for name, (dtype, E) in cases.items() if kernel.takes_sizes(dtype, E, E)]
    return [pytest.param(kernel, name, *more, id="-".join(map(str, (kernel.name, name, *more)))) for kernel, name in rows]


@pytest.mark.parametrize(("kernel", "name", "with_lse"), [*by_name([AUTO["cuda"], *NAMED], False), *by_name([AUTO["cuda"]], True)])
def test_no_synchronisation(kernel: Kernel, name: str, with_lse: bool) -> None:
    inputs, options = quiet(kernel, name)
    first = (lambda *t, **o: attend_with_lse(kernel, *t, **o)[0]) if with_lse else partial(attend, kernel)
    grad = torch.ones_like(first(*inputs, **options))
    run(first, leaves(*inputs), grad, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(first, leaves(*inputs), grad, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("kernel", "name"), by_name([AUTO["cuda"], *NAMED]))
def test_no_hidden_allocation(kernel: Kernel, name: str) -> None:
    """After a call torch's allocator holds its results and nothing else; during it, no more than explain says beside them."""
    inputs, options = quiet(kernel, name)
    attend(kernel, *inputs, **options)
    gc.collect()  # what tests before left behind would be freed in between
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats
    retries = stats()["num_alloc_retries"]
    torch.cuda.reset_peak_memory_stats()
    before = stats()["requested_bytes.all.current"]
    out = attend(kernel, *inputs, **options)
    assert stats()["requested_bytes.all.current"] - before == out.nbytes
    rows = 8 * out.shape[:-1].numel()  # the log-sum-exp, and at most as much again
    limit = out.nbytes + rows + workspace(kernel, *inputs, **options) + 2048
    assert stats()["requested_bytes.all.peak"] - before <= limit
    grads = run(partial(attend, kernel), leaves(*inputs), torch.ones_like(out), **options)[1]
    held = out.nbytes + sum(g.nbytes for g in grads)
    assert stats()["requested_bytes.all.current"] - before == held, "a backward pass keeps its gradients and nothing else"
    assert stats()["num_alloc_retries"] == retries


@pytest.mark.parametrize(("kernel", "dtype", "E"), by_kernel((torch.bfloat16,), (torch.bfloat16,), (64, 512)))
@pytest.mark.parametrize("masked_by", [None, "bool", "float"])
def test_memory_of_a_forward_pass_is_linear_in_length(kernel: Kernel, dtype: torch.dtype, E: int, masked_by: str | None) -> None:
    """Grouped heads, a broadcast mask: all scores in half precision would be 4.3 GB."""
    L = 8192
    q, k = (torch.randn(1, heads, L, E, dtype=dtype, device="cuda") for heads in (32, 4))
    needs(kernel, q, k, k, enable_gqa=True)
    row = torch.zeros(1, 1, 1, L, device="cuda", dtype=dtype)
    mask = None if masked_by is None else row if masked_by == "float" else (row == 0).expand(1, 32, L, L)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats
    torch.cuda.reset_peak_memory_stats()
    before = stats()["requested_bytes.all.current"]
    out, lse = attend_with_lse(kernel, q, k, k, mask, enable_gqa=True)
    extra = stats()["requested_bytes.all.peak"] - before - out.nbytes - lse.nbytes
    planned = workspace(kernel, q, k, k, mask, enable_gqa=True)
    assert planned <= CAP and extra <= planned + 2048


@pytest.mark.parametrize("E", [64, 512])
@pytest.mark.parametrize("masked_by", [None, "bool", "float"])
def test_memory_of_a_backward_pass_is_linear_in_length(masked_by: str | None, E: int) -> None:
    """Grouped heads, a broadcast mask: the scores of one pass would be 4.3 GB, the mask expanded as much."""
    L = 8192
    q = normal(1, 32, L, E, dtype=torch.bfloat16, device="cuda").requires_grad_()
    k = q.detach()[:, :4].clone().requires_grad_()
    mask = torch.zeros(1, 1, 1, L, device="cuda", dtype=torch.bfloat16, requires_grad=masked_by == "float")
    full = None if masked_by is None else (mask if masked_by == "float" else mask == 0).expand(1, 32, L, L)
    wanted = [q, k, mask] if masked_by == "float" else [q, k]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    out, _ = sdpa_forward(
        q, k, k, full if masked_by == "bool" else None if full is None else mask, None, 0.0, False, enable_gqa=True
    )
    torch.autograd.grad(out, wanted, torch.ones((), device="cuda", dtype=out.dtype).expand(out.shape))
    assert torch.cuda.max_memory_allocated() - base < 8 * q.nbytes + (256 << 20)


def test_this_card_is_served_or_named() -> None:
    q = normal(1, 1, 16, 64, dtype=torch.float16, device="cuda")
    try:
        out = sdpa(q, q, q)
    except RuntimeError as error:
        card = "sm_{}{}".format(*torch.cuda.get_device_capability())
        assert card in str(error) or "TORCH_CUDA_ARCH_LIST" in str(error)
    else:
        close(out, reference.attention(q, q, q)[0], 4 * torch.finfo(out.dtype).eps)
