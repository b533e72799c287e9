"""What does not fit ends in torch.OutOfMemoryError with PyTorch's message, from every operator, however it is called."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import leaves, normal, qkv, sdpa, sdpa_backward, sdpa_forward, sdpa_with_lse

import attention_ext

pytestmark = pytest.mark.gpu
OPS = torch.ops.attention_ext
LIMIT = 192 << 20  # bytes that this process may hold while a test runs


def leave(size: int) -> None:
    """This process may get so many bytes more."""
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)


@pytest.fixture(autouse=True)
def little_memory():
    gc.collect()
    torch.cuda.empty_cache()
    leave(LIMIT)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def calls() -> dict:
    """name: a call whose result or workspace is larger than LIMIT, though its operands are small."""
    q, k, _ = qkv((1,), (64,), L=1024, S=64, E=64, dtype=torch.float16, device="cuda")
    wide = normal(1, 1, 64, 1, dtype=torch.float16, device="cuda").expand(1, 64, 64, 4096)  # 512 MiB of out
    x, weight = normal(16384, 16, device="cuda"), normal(8192, 16, device="cuda")  # 512 MiB of out
    long = normal(1, 16, 4096, 64, device="cuda")
    out, lse = torch.zeros_like(long), long.new_zeros(1, 16, 4096)
    # Results of 16 MiB and a workspace of up to 256 MiB: a later allocation of a call. It is the pipeline's, as fused kernels need
    # next to none. Its backward has two arrays of 64 MiB for each head of a slice, which in twice the cap has three heads.
    workspace = 256 << 20
    scores = normal(1, 1, 8192, 1, device="cuda").expand(1, 4, 8192, 4096)  # 512 MiB of weights
    return {
        "sdpa": lambda: sdpa(q, k, wide),
        "sdpa_with_lse": lambda: sdpa_with_lse(q, k, wide),
        "sdpa_forward": lambda: sdpa_forward(q, k, wide, None, None, 0.0, False),
        "sdpa_forward, workspace": lambda: sdpa_forward(
            long, long, long, None, None, 0.0, False, workspace_bytes=workspace, kernel_name="pipeline"
        ),
        "sdpa_backward": lambda: sdpa_backward(
            out, None, long, long, long, None, out, lse, None, 0.0, False, workspace_bytes=2 * workspace, kernel_name="pipeline"
        ),
        "qk_scores": lambda: OPS.qk_scores(long, long),
        "row_softmax": lambda: OPS.row_softmax(scores),
        "scores_values": lambda: OPS.scores_values(q[..., :64], q.new_ones((1, 64, 1024), dtype=torch.float32), wide),
        "linear_float32": lambda: attention_ext.linear_float32(x, weight),
        "linear_float32, rank 3": lambda: attention_ext.linear_float32(x.view(2, -1, 16), weight),
        "linear_batchnorm_softmax": lambda: attention_ext.linear_batchnorm_softmax(x, weight, scale=1.0, training=True),
    }


@pytest.mark.parametrize("mode", ["eager", "no_grad", "inference"])
@pytest.mark.parametrize("name", ["sdpa", "sdpa_with_lse", "sdpa_forward", "sdpa_forward, workspace", "sdpa_backward", "qk_scores",
                                  "row_softmax", "scores_values", "linear_float32", "linear_float32, rank 3",
                                  "linear_batchnorm_softmax"])  # fmt: skip
def test_type_and_message(name: str, mode: str) -> None:
    call = calls()[name]
    context = {"eager": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    for _ in range(2):  # once checked and routed, once known
        with context(), pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"):
            call()


def test_with_a_gradient() -> None:
    """The same inside autograd's functions, forward and backward."""
    q, k, _ = leaves(*qkv((1,), (64,), L=1024, S=64, E=64, dtype=torch.float16, device="cuda"))
    wide = normal(1, 1, 64, 1, dtype=torch.float16, device="cuda").expand(1, 64, 64, 4096)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        sdpa(q, k, wide)
    x, weight = leaves(normal(16384, 16, device="cuda"), normal(8192, 16, device="cuda"))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        attention_ext.linear_float32(x, weight)
    (q,) = leaves(normal(1, 16, 2048, 64, device="cuda"))
    out = sdpa(q, q, q).sum()
    torch.cuda.empty_cache()
    leave(4 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        out.backward()


def test_compiled() -> None:
    call = calls()["sdpa_with_lse"]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.compile(call, backend="aot_eager")()


def test_a_caller_that_takes_less_goes_on() -> None:
    q, k, _ = qkv((1,), (64,), L=1024, S=64, E=64, dtype=torch.float16, device="cuda")
    wide = normal(1, 1, 64, 1, dtype=torch.float16, device="cuda").expand(1, 64, 64, 4096)
    width = 4096
    while True:
        try:
            out = sdpa(q, k, wide[..., :width])
            break
        except torch.OutOfMemoryError:
            width //= 2
    assert 256 <= width < 4096 and out[0, 0].isfinite().all()
