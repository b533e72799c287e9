"""A card other than the current one: results, streams, graphs and random numbers are its own; operands on two are refused."""

from __future__ import annotations

import threading

import pytest
import reference
import torch
from helpers import HALVES, check_lse, close, leaves, normal, qkv, run, sdpa, sdpa_backward, sdpa_forward, sdpa_with_lse
from torch import Tensor

from attention_ext import explain, merge_partials

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
OTHER = "cuda:1"


@pytest.fixture(autouse=True)
def first_is_current():
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0, "the current device was changed"


def problem(dtype: torch.dtype, device: str = OTHER) -> list[Tensor]:
    keep = torch.rand(70, 133) < 0.7
    keep[3] = False
    mask = normal(70, 133).masked_fill(~keep, float("-inf"))
    return [*(t.to(device) for t in qkv(heads=(4, 2), L=70, S=133, E=64, dtype=dtype)), mask.to(device)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_forward_and_backward(dtype: torch.dtype, p: float) -> None:
    inputs, grad = problem(dtype), normal(2, 4, 70, 64, dtype=dtype, device=OTHER)
    seed = torch.tensor([11], device=OTHER) if p else None
    keep = reference.dropout_keep_mask(11, p, 8, 70, 133).view(2, 4, 70, 133) if p else None
    doubles = [t.cpu().double().requires_grad_() for t in inputs]
    want, want_lse = reference.attention(*doubles, gqa=True, keep=keep, dropout_p=p)
    right = torch.autograd.grad(want, doubles, grad.cpu().double())
    out, lse = sdpa_forward(*inputs, seed, p, False, enable_gqa=True)
    grads = sdpa_backward(grad, None, *inputs, out, lse, seed, p, False, enable_gqa=True, mask_grad=True)
    assert all(t.device == torch.device(OTHER) for t in (out, lse, *grads))
    for got, exact in zip((out, *grads), (want, *right), strict=True):
        close(got, exact, 16 * torch.finfo(dtype).eps)
    check_lse(lse, want_lse.detach(), dtype)


def test_autograd_of_out_and_lse() -> None:
    inputs = leaves(*problem(torch.float32))
    out, lse = sdpa_with_lse(*inputs, enable_gqa=True)
    out, lse = merge_partials([out, out], [lse, lse])
    grads = torch.autograd.grad(out.sum() + lse.masked_fill(lse.isinf(), 0.0).sum(), inputs)
    assert all(t.device == torch.device(OTHER) and t.isfinite().all() for t in (out, *grads))


def test_random_numbers_are_that_devices() -> None:
    q, k, v = (t.to(OTHER) for t in qkv(L=16))
    before = torch.cuda.get_rng_state(0), torch.cuda.get_rng_state(1)
    sdpa(q, k, v, None, 0.5)
    assert torch.equal(before[0], torch.cuda.get_rng_state(0)) and not torch.equal(before[1], torch.cuda.get_rng_state(1))
    results = []
    for _ in range(2):
        torch.cuda.manual_seed_all(3)
        results.append(run(sdpa, leaves(q, k, v), torch.ones(2, 3, 16, 16), dropout_p=0.5))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_side_stream_of_the_other_device() -> None:
    q, k, v = (t.to(OTHER) for t in qkv((1,), (2,), L=128, E=64, dtype=torch.float16))
    grad = normal(1, 2, 128, 64, dtype=torch.float16, device=OTHER)
    want, want_grads = run(sdpa, leaves(q * 2, k, v), grad)
    x, stream = torch.zeros_like(q), torch.cuda.Stream(OTHER)
    stream.wait_stream(torch.cuda.current_stream(OTHER))
    with torch.cuda.stream(stream):  # makes the other device current, too
        torch.cuda._sleep(100_000_000)
        x.copy_(q * 2)
        out, grads = run(sdpa, leaves(x, k, v), grad)
    stream.synchronize()
    assert torch.equal(out, want) and all(torch.equal(a, b) for a, b in zip(grads, want_grads, strict=True))


def test_launches_follow_the_tensors_device_not_the_current_stream_of_another() -> None:
    """A side stream of the first device is current; the work of the second one goes to its own current stream."""
    q, k, v = (t.to(OTHER) for t in qkv((1,), (2,), L=128, E=64))
    want = reference.attention(q, k, v)[0]
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        torch.cuda._sleep(100_000_000)
        out = sdpa(q, k, v)
        torch.cuda.current_stream(OTHER).synchronize()
        close(out, want, 1e-5)


def test_graph_on_the_other_device() -> None:
    q, k, v = leaves(*(t.to(OTHER) for t in qkv(L=64, E=64, dtype=torch.float16)))
    grad = normal(2, 3, 64, 64, dtype=torch.float16, device=OTHER)
    with torch.cuda.device(OTHER):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(sdpa, [q, k, v], grad)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out, grads = run(sdpa, [q, k, v], grad)
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    want, want_grads = run(sdpa, leaves(q, k, v), grad)
    torch.cuda.synchronize(OTHER)
    assert torch.equal(out, want) and all(torch.equal(a, b) for a, b in zip(grads, want_grads, strict=True))


def test_threads_on_two_devices() -> None:
    inputs = {d: [t.to(d) for t in qkv(L=65, E=64)] for d in ("cuda:0", OTHER)}
    wants = {d: run(sdpa, leaves(*t), torch.ones(2, 3, 65, 64)) for d, t in inputs.items()}
    wrong: list[str] = []

    def work(device: str) -> None:
        for _ in range(20):
            out, grads = run(sdpa, leaves(*inputs[device]), torch.ones(2, 3, 65, 64))
            right = (wants[device][0], *wants[device][1])
            if not all(torch.equal(a, b) for a, b in zip((out, *grads), right, strict=True)):
                wrong.append(device)

    threads = [threading.Thread(target=work, args=(d,)) for d in (*inputs, *inputs)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


@pytest.mark.parametrize("argument", ["key", "value", "attn_mask"])
@pytest.mark.parametrize("op", [sdpa, sdpa_with_lse, explain], ids=["sdpa", "sdpa_with_lse", "explain"])
def test_operands_on_two_devices_are_refused(op, argument: str) -> None:
    named = dict(zip(("query", "key", "value", "attn_mask"), problem(torch.float32), strict=True))
    named[argument] = named[argument].to("cuda:0")
    with pytest.raises(RuntimeError, match=rf"^attention_ext: {argument}: expected the query's device cuda:1, got cuda:0"):
        op(**named, enable_gqa=True)


def test_seed_and_gradient_on_another_device_are_refused() -> None:
    q, k, v = (t.to(OTHER) for t in qkv(L=16))
    with pytest.raises(RuntimeError, match=r"^attention_ext: seed: expected .* cuda:1, got "):
        sdpa_forward(q, k, v, None, torch.zeros(1, dtype=torch.int64, device="cuda:0"), 0.5, False)
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False)
    with pytest.raises(RuntimeError, match=r"^attention_ext: grad_out: expected .*, got "):
        sdpa_backward(out.to("cuda:0"), None, q, k, v, None, out, lse, None, 0.0, False)
    with pytest.raises(RuntimeError, match=r"^attention_ext: lses\[1\]: expected .*, got "):
        merge_partials([out, out], [lse, lse.to("cuda:0")])
