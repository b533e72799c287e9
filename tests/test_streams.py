"""On the GPU: every launch is on the current stream, graphs record all of it, and errors of the card are named."""

from __future__ import annotations

import pytest
import reference
import torch
from helpers import HALVES, close, leaves, normal, qkv, run, sdpa

pytestmark = pytest.mark.gpu
KINDS = [{}, {"is_causal": True}, {"enable_gqa": True}]


def wanted(q, k, v, options):
    return reference.attention(q, k, v, None, options.get("is_causal", False), None, options.get("enable_gqa", False))[0]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("E", [64, 512])
def test_side_stream(E: int, options: dict) -> None:
    """The inputs appear late on the side stream; a launch elsewhere would read them too early."""
    q, k, v = qkv((1,), (2, 1) if options.get("enable_gqa") else (2,), L=128, E=E, dtype=torch.float16, device="cuda")
    sdpa(q, k, v, **options)
    x, stream = torch.zeros_like(q), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(q * 2)
        out = sdpa(x, k, v, **options)
    stream.synchronize()
    close(out, wanted(q * 2, k, v, options), 4 * torch.finfo(out.dtype).eps)


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("E", [64, 512])
def test_graph_replays_with_new_inputs(E: int, dtype: torch.dtype, options: dict) -> None:
    inputs = leaves(*qkv((1,), (2, 1) if options.get("enable_gqa") else (2,), L=130, E=E, dtype=dtype, device="cuda"))
    grad = normal(1, 2, 130, E, dtype=dtype, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(sdpa, inputs, grad, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grads = run(sdpa, inputs, grad, **options)
    with torch.no_grad():
        for t in (*inputs, grad):
            t.copy_(torch.randn_like(t))
    graph.replay()
    fresh, fresh_grads = run(sdpa, leaves(*(t.detach().clone() for t in inputs)), grad, **options)
    close(out, wanted(*inputs, options), 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5)
    for a, b in zip((out, *grads), (fresh, *fresh_grads), strict=True):
        close(a, b, 8 * torch.finfo(dtype).eps)


def test_no_synchronisation() -> None:
    inputs = leaves(*qkv(L=64, E=64, dtype=torch.float16, device="cuda"))
    grad = normal(2, 3, 64, 64, dtype=torch.float16, device="cuda")
    run(sdpa, inputs, grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(sdpa, inputs, grad)
        run(sdpa, inputs, grad, dropout_p=0.3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_this_card_is_served_or_named() -> None:
    q = normal(1, 1, 16, 64, dtype=torch.float16, device="cuda")
    try:
        out = sdpa(q, q, q)
    except RuntimeError as error:
        card = "sm_{}{}".format(*torch.cuda.get_device_capability())
        assert card in str(error) or "TORCH_CUDA_ARCH_LIST" in str(error)
    else:
        close(out, reference.attention(q, q, q)[0], 4 * torch.finfo(out.dtype).eps)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device() -> None:
    q = normal(1, 2, 64, 64, dtype=torch.float16, device="cuda:1")
    with torch.cuda.device(0):
        out = sdpa(q, q, q)
    assert out.device == q.device
    close(out, reference.attention(q, q, q)[0], 4 * torch.finfo(out.dtype).eps)
