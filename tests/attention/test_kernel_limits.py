"""What the CUDA kernels alone refuse, in their words: 2^31 rows, leading dims that do not merge, a card without an image."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import close, leaves, normal, run, sdpa, sdpa_backward, sdpa_forward, sdpa_with_lse
from paths import CSRC
from refusals import FAKE_DEVICES, refuses
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.attention_ext
FAKE_CUDA = FAKE_DEVICES[1:]
LARGEST = 2**31 - 1 - 1024
WORDS = f"matrices of at most {LARGEST} rows and columns, got shape "
PLAIN = (None, None, 0.0, False)


def repeated(rows: int, cols: int) -> Tensor:
    """(1, 1, rows, cols) in the memory of one element."""
    return torch.ones(1, 1, 1, 1, device="cuda").expand(1, 1, rows, cols)


def too_large(size: int) -> list[tuple[str, tuple[Tensor, ...], str]]:
    """The argument that is named, query, key and value, their shape."""
    one, tall, wide = repeated(1, 8), repeated(size, 8), repeated(1, size)
    return [
        ("query", (tall, one, one), f"(1, 1, {size}, 8)"),
        ("key", (one, tall, tall), f"(1, 1, {size}, 8)"),
        ("query", (wide, wide, one), f"(1, 1, 1, {size})"),
        ("value", (one, one, wide), f"(1, 1, 1, {size})"),
    ]


def refuse_sizes(by_kernel: bool) -> None:
    for size in (LARGEST + 1, 2**31, 2**40):
        for argument, tensors, shape in too_large(size):
            for op in (sdpa, sdpa_with_lse, lambda *qkv: sdpa_forward(*qkv, *PLAIN)):
                with torch.inference_mode(by_kernel):
                    refuses(argument, lambda op=op, tensors=tensors: op(*tensors), WORDS + shape)


@pytest.mark.gpu
def test_sizes_that_tiles_cannot_count() -> None:
    refuse_sizes(by_kernel=True)
    for argument, tensors, shape in too_large(2**31):
        refuses(argument, lambda tensors=tensors: sdpa_forward(*tensors, *PLAIN), WORDS + shape)


@pytest.mark.gpu
def test_sizes_that_tiles_cannot_count_where_a_gradient_is_needed() -> None:
    for argument, tensors, shape in too_large(2**31):
        refuses(argument, lambda tensors=tensors: sdpa(*leaves(*tensors)), WORDS + shape)


@pytest.mark.parametrize("device", FAKE_CUDA)
def test_sizes_that_tiles_cannot_count_of_fake_tensors(device: str) -> None:
    with FakeTensorMode():
        refuse_sizes(by_kernel=False)
        for _, (q, k, v), _ in too_large(LARGEST):  # no size less
            out, lse = sdpa_forward(q, k, v, *PLAIN)
            assert out.shape == (1, 1, q.size(-2), v.size(-1)) and lse.shape == out.shape[:-1]
        for argument, (q, k, v), shape in too_large(2**31):
            out = q.new_empty(1, 1, q.size(-2), v.size(-1))
            args = (out, None, q, k, v, None, out, q.new_empty(out.shape[:-1]), None, 0.0, False)
            refuses(argument, lambda args=args: sdpa_backward(*args), WORDS + shape)


def stages_refuse_sizes() -> None:
    one, tall, wide = repeated(1, 8), repeated(2**31, 8), repeated(1, 2**31)
    refuses("query", lambda: OPS.qk_scores(tall, one), WORDS + f"(1, 1, {2**31}, 8)")
    refuses("key", lambda: OPS.qk_scores(one, tall), WORDS + f"(1, 1, {2**31}, 8)")
    refuses("scores", lambda: OPS.row_softmax(wide), WORDS + f"(1, 1, 1, {2**31})")
    refuses("weights", lambda: OPS.scores_values(wide, one[..., 0], tall), WORDS + f"(1, 1, 1, {2**31})")
    refuses("value", lambda: OPS.scores_values(one[..., :1], one[..., 0], wide), WORDS + f"(1, 1, 1, {2**31})")


@pytest.mark.gpu
def test_stages_refuse_sizes_that_tiles_cannot_count() -> None:
    stages_refuse_sizes()


@pytest.mark.parametrize("device", FAKE_CUDA)
def test_stages_of_fake_tensors_refuse_sizes_that_tiles_cannot_count(device: str) -> None:
    with FakeTensorMode():
        stages_refuse_sizes()


APART = "at most 8 leading dims that strides keep apart, got (" + ", ".join("2" * 12) + ")"


def of_rank_14(L: int, E: int, device: str, *, apart: bool) -> Tensor:
    """(2, ..., 2, L, E) with twelve leading dims: contiguous, or in an order of memory that no two of them merge in."""
    tensor = normal(*(2,) * 12, L, E, device=device)
    return tensor.permute(*reversed(range(12)), 12, 13) if apart else tensor


def refuse_ranks(device: str) -> None:
    q, k = (of_rank_14(n, 2, device, apart=True) for n in (3, 4))
    scores = of_rank_14(3, 4, device, apart=True)
    out, lse = q.contiguous(), q[..., 0].contiguous()
    refuses("query", lambda: sdpa_forward(q, k, k, *PLAIN), APART)
    refuses("query", lambda: sdpa_forward(out, k, k, *PLAIN), APART)
    refuses("query", lambda: sdpa_forward(out, k[..., :1, :], k[..., :1, :], q[..., :1], *PLAIN[1:]), APART)
    refuses("query", lambda: sdpa_backward(out, None, q, k, k, None, out, lse, None, 0.0, False), APART)
    refuses("query", lambda: OPS.qk_scores(q, k), APART)
    refuses("scores", lambda: OPS.row_softmax(scores), APART)
    refuses("weights", lambda: OPS.scores_values(scores, lse, k), APART)


@pytest.mark.gpu
def test_leading_dims_that_do_not_merge() -> None:
    refuse_ranks("cuda")
    q = of_rank_14(3, 2, "cuda", apart=True)
    with torch.inference_mode():
        refuses("query", lambda: sdpa_forward(q, q, q, *PLAIN), APART)


@pytest.mark.parametrize("device", FAKE_CUDA)
def test_leading_dims_of_fake_tensors_that_do_not_merge(device: str) -> None:
    with FakeTensorMode():
        refuse_ranks(device)


def ranks_that_merge(device: str) -> list[tuple[Tensor, ...]]:
    """query, key, value: contiguous, broadcast, with dims of size 1 in any order, and with eight dims apart."""
    q, k = (of_rank_14(n, 2, device, apart=False) for n in (3, 4))
    one = normal(1, 4, 2, device=device).expand(*(2,) * 12, 4, 2)
    ones = normal(*(1,) * 4, *(2,) * 8, 3, 2, device=device).permute(3, 11, 0, 10, 9, 8, 1, 7, 6, 5, 4, 2, 12, 13)
    eight = normal(*(2,) * 8, 3, 2, device=device).permute(*reversed(range(8)), 8, 9)
    return [(q, k, k), (q, one, one), (ones, ones, ones), (eight, eight, eight)]


def test_leading_dims_that_merge(device: str) -> None:
    """On the CPU all of them."""
    apart = of_rank_14(3, 2, device, apart=True)
    for tensors in [*ranks_that_merge(device), *[(apart,) * 3] * (device == "cpu")]:
        out, lse = sdpa_forward(*tensors, *PLAIN)
        want, want_lse = sdpa_forward(*(t.contiguous().flatten(0, -3) for t in tensors), *PLAIN)
        close(out.flatten(0, -3), want, 1e-5)
        close(lse.flatten(), want_lse.flatten(), 1e-5)


@pytest.mark.parametrize("device", FAKE_DEVICES)
def test_leading_dims_of_fake_tensors_that_merge(device: str) -> None:
    with FakeTensorMode():
        for q, k, v in ranks_that_merge(device):
            assert sdpa_forward(q, k, v, *PLAIN)[0].shape == (*q.shape[:-1], v.size(-1))


def test_any_rank_through_sdpa(device: str) -> None:
    """Where the kernels cannot, PyTorch's operator does it."""
    inputs = [of_rank_14(3, 2, device, apart=True) for _ in range(3)]
    grad = torch.ones(inputs[0].shape)
    out, grads = run(sdpa, leaves(*inputs), grad)
    flat = [t.reshape(64, 64, 3, 2) for t in inputs]
    want, want_grads = run(sdpa, leaves(*flat), grad.view(64, 64, 3, 2))
    for got, right in zip((out, *grads), (want, *want_grads), strict=True):
        close(got.reshape(right.shape), right, 1e-5)


TORCH_INCLUDE = Path(torch.__file__).parent / "include"
COMPILES = "STABLE_TORCH_ERROR_CODE_CHECK" in (TORCH_INCLUDE / "torch/csrc/stable/macros.h").read_text()
CUDA_INCLUDE = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
NO_IMAGE = """
#include "binding/checks.h"
#include <cstdio>
attention_ext::DeviceInfo attention_ext::device_info(int device) { return {device != 3 ? -1 : 75, 1}; }
extern "C" const char* cudaGetErrorString(cudaError_t) { return "the runtime's words"; }
int main() {
  for (cudaError_t status : {cudaSuccess, cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction, cudaErrorUnknown}) {
    try {
      attention_ext::check_status("sdpa_forward", status, 3);
      std::puts("taken");
    } catch (const std::runtime_error& error) {
      std::puts(error.what());
    }
  }
}
"""


@pytest.mark.skipif(not COMPILES, reason="needs headers of torch that csrc/ compiles with")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(not (CUDA_INCLUDE / "cuda_runtime_api.h").exists(), reason="needs the headers of a CUDA toolkit")
def test_a_card_without_an_image_is_named(tmp_path: Path) -> None:
    """The sentence itself, compiled with a runtime that knows one card, of compute capability 7.5."""
    source, program = tmp_path / "no_image.cpp", tmp_path / "no_image"
    source.write_text(NO_IMAGE)
    macros = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", '-DATTENTION_EXT_BUILT_FOR="8.0+PTX;9.0a"']
    folders = [f"-I{folder}" for folder in (CSRC, TORCH_INCLUDE, CUDA_INCLUDE)]
    command = ["g++", "-std=c++17", "-O2", "-ffunction-sections", "-Wl,--gc-sections", *macros, *folders, str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    missing = (
        "sdpa_forward: cuda:3 has compute capability 7.5, and this build of attention_ext has kernels for 8.0+PTX;9.0a; "
        "build it for this card with TORCH_CUDA_ARCH_LIST"
    )
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == ["taken", missing, missing, "sdpa_forward: CUDA error: the runtime's words"]
