"""The logger attention_ext names at level INFO the kernel that ran, and why; on CUDA that is what the profiler sees."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import leaves, normal, qkv, sdpa, sdpa_forward, sdpa_with_lse
from kernels import KERNELS, params
from random_cases import draw_case
from random_inputs import build
from randomised import kernels_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import attention_ext

CLASS_512, CLASS_1024 = (384, 512), (768, 1024)  # head-dim classes of the two kernels that share FusedTile
LINE = re.compile(r"(\w+) on (\w+) (torch\.\w+): (\w+|torch: \w+), because (.+)")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, ...]]]:
    """What was logged since the last call: (operator, device, dtype, kernel, reason)."""
    caplog.set_level(logging.INFO, "attention_ext")

    def read() -> list[tuple[str, ...]]:
        found = [LINE.fullmatch(r.getMessage()) for r in caplog.records if r.name == "attention_ext"]
        caplog.clear()
        assert all(found)
        return [match.groups() for match in found if match]

    return read


def launched(call: Callable[[], object]) -> set[str]:
    """The forward kernels, by this package's names, that a call launches."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profiler.key_averages())
    parts = {
        "pipeline": "qk_scores_kernel",
        "sm90_256": "rows_forward_kernel",
        "sm90_pipeline": "WgmmaScoresWork",
        "sm90_split_half": "split_half_blocks_kernel",
    }
    found = {kernel for kernel, part in parts.items() if part in names}
    for width in map(int, re.findall(r"fused_forward_kernel<[^>]*FusedTile<\w+, (?:\(int\))?(\d+)", names)):
        assert width in CLASS_512 + CLASS_1024
        found.add("sm90_512" if width in CLASS_512 else "sm90_1024")
    return found


PROBLEMS = {
    "plain": ((2, 4), 512, 512, 128, torch.float16, {}),
    "widest": ((1, 8), 1024, 1024, 512, torch.bfloat16, {"is_causal": True}),
    "few rows": ((1, 1), 4096, 4096, 512, torch.float16, {}),
    "above 512": ((1, 8), 1024, 1024, 1024, torch.bfloat16, {}),
    "short above 512": ((4, 8), 64, 64, 768, torch.float16, {}),
    "float32": ((1, 8), 256, 256, 64, torch.float32, {}),
    "one row": ((4, 8), 1, 2048, 512, torch.float16, {}),
    "odd head dim": ((1, 8), 256, 256, 65, torch.float16, {}),
}


def problem(name: str) -> tuple[list[Tensor], dict]:
    (B, H), L, S, E, dtype, options = PROBLEMS[name]
    return list(qkv((B,), (H,), L, S, E, dtype=dtype, device="cuda")), options


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__)
def test_names_what_the_profiler_sees(name: str, mode, lines) -> None:
    (q, k, v), options = problem(name)
    explained = attention_ext.explain(q, k, v, **options)
    with mode():
        for operator, call in (("sdpa", sdpa), ("sdpa_with_lse", sdpa_with_lse)):
            lines()
            call(q, k, v, **options)
            ((logged, _, _, kernel, reason),) = lines()
            assert logged == operator and (operator != "sdpa" or (kernel, reason) == (explained.kernel, explained.reason))
            own = not kernel.startswith("torch: ")  # of PyTorch's: test_torch_route_gpu.py
            assert launched(lambda call=call: call(q, k, v, **options)) == ({kernel} if own else set())


@pytest.mark.gpu
def test_the_kernels_differ() -> None:
    """The problems above are served by every kernel there is, on a card that has them all."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    found = {attention_ext.explain(*problem(name)[0], **problem(name)[1]).kernel for name in PROBLEMS}
    assert found - {"torch: cudnn", "torch: efficient"} == {kernel.name for kernel in KERNELS if kernel.device == "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("value off by two bytes", lambda q, k, v: (q, k, _shifted(v)), "value's rows do not all begin on 16-byte boundaries"),
        ("key off by two bytes", lambda q, k, v: (q, _shifted(k), v), "key's rows do not all begin on 16-byte boundaries"),
        ("query by columns", lambda q, k, v: (q.mT.contiguous().mT, k, v), "query's columns are not adjacent in memory"),
        ("broadcast rows", lambda q, k, v: (q, k, v[:, :, :1].expand(v.shape)), "value's rows are broadcast"),
        ("four leading dims", lambda q, k, v: tuple(map(_reversed, (q, k, v))), "strides keep 4 leading dims apart"),
        ("no keys", lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "sizes of 0"),
        ("float64", lambda q, k, v: (q.double(), k.double(), v.double()), "float64"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_the_reason_names_the_cause(name: str, spoil, reason: str, lines) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    q, k, v = spoil(*qkv((1,), (8,), L=256, E=128, dtype=torch.float16, device="cuda"))
    explained = attention_ext.explain(q, k, v)
    assert explained.kernel == "pipeline" and reason in explained.reason
    sdpa(q, k, v)
    assert lines()[-1][3:] == (explained.kernel, explained.reason)


def _shifted(t: Tensor) -> Tensor:
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


def _reversed(t: Tensor) -> Tensor:
    """Twice the heads as four leading dims of 2, the last one slowest."""
    return t.repeat(2, 1, 1, 1).view(2, 2, 2, 2, *t.shape[-2:]).permute(3, 2, 1, 0, 4, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_random_cases_run_what_explain_says(part: int, lines) -> None:
    """explain, the log and the profiler agree on the kernel, whatever the sizes, strides and masks."""
    for seed in range(20 * part, 20 * part + 20):
        case = draw_case(random.Random(seed), kernels_of("cuda"))
        q, k, v, mask = (None if placed is None else placed.view for placed in build(case, "cuda")[0])
        if 0 in (*case.scores, case.query[-1], case.value[-1]):
            continue  # kernels without a tile are not launched
        options = {"is_causal": case.causal, "scale": case.scale, "enable_gqa": case.gqa}
        explained = attention_ext.explain(q, k, v, mask, **options)
        lines()
        found = launched(partial(sdpa, q, k, v, mask, **options))
        assert {(line[3], line[4]) for line in lines()} == {(explained.kernel, explained.reason)}, case
        own = not explained.kernel.startswith("torch: ")
        assert found == ({explained.kernel} if own else set()), case


@pytest.mark.parametrize("kernel", params())
def test_by_name(kernel, lines) -> None:
    if not kernel.runs_here():
        pytest.skip(f"{kernel.name} needs compute capability {kernel.capability}")
    dtype = torch.float16 if torch.float16 in kernel.dtypes else torch.float32
    q, k, v = qkv((1,), (4,), L=64, E=64, dtype=dtype, device=kernel.device)
    q.requires_grad_()
    out, _ = sdpa_forward(q, k, v, None, None, 0.0, False, kernel_name=kernel.name)
    out.sum().backward()
    forward, backward = lines()
    assert forward[0] == "sdpa_forward" and forward[3] == kernel.name
    chosen = torch.ops.attention_ext.kernels("backward") if kernel.backward == "auto" else [kernel.backward]
    assert backward[0] == "sdpa_backward" and backward[3] in chosen
    if kernel.device == "cuda":
        assert launched(lambda: sdpa_forward(q, k, v, None, None, 0.0, False, kernel_name=kernel.name)) == {kernel.name}


@pytest.mark.parametrize("K", [64, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_linear(device: str, K: int, dtype: torch.dtype, lines) -> None:
    x, weight = normal(2, 32, K, dtype=dtype, device=device), normal(16, K, dtype=dtype, device=device)
    if dtype == torch.float32:
        attention_ext.linear_float32(x, weight)
    attention_ext.linear_batchnorm_softmax(x[0], weight, scale=1.0, training=True)
    logged = lines()
    assert [line[0] for line in logged] == ["linear_float32"] * (dtype == torch.float32) + ["linear_batchnorm_softmax"]
    if device == "cpu":
        assert {line[3] for line in logged} == {"torch"}
        return
    (kernel,) = {line[3] for line in logged}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        attention_ext.linear_batchnorm_softmax(x[0], weight, scale=1.0, training=True)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profiler.key_averages())
    part = {"tiled": "tiled_linear_kernel", "split_half": "split_half_linear_kernel", "sm90_split_half": "WgmmaLinearWork"}
    assert part[kernel] in names and not any(part[other] in names for other in part if other not in (kernel, "tiled"))


def test_tensors_that_are_not_what_a_kernel_gets(device: str, lines) -> None:
    """A wrapper (here a fake tensor, as good as a DTensor) is logged without asking for the kernel of its contents."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(4, 8, device=device), torch.empty(3, 8, device=device)
        attention_ext.linear_float32(x, weight)
    assert [(line[0], line[3]) for line in lines()] == [("linear_float32", "linear_float32")]


def test_nothing_below_info(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = leaves(*qkv())
    with caplog.at_level(logging.WARNING, "attention_ext"):
        sdpa(q, k, v).sum().backward()
        sdpa_with_lse(q, k, v)[0].sum().backward()
    assert not caplog.records


def test_gradient_on_the_cpu(lines) -> None:
    q, k, v = leaves(*qkv())
    sdpa_with_lse(q, k, v)[0].sum().backward()
    assert [(line[0], line[3]) for line in lines()] == [("sdpa_with_lse", "reference"), ("sdpa_backward", "reference")]


def calls(device: str) -> dict[str, tuple]:
    q, row = torch.ones(1, 2, 4, 8, device=device), torch.ones(1, 2, 4, device=device)
    x, weight, ones = q[0, 0], q[0, 1], torch.ones(4, device=device)
    return {
        "sdpa": (q, q, q),
        "sdpa_with_lse": (q, q, q),
        "sdpa_forward": (q, q, q, None, None, 0.0, False),
        "sdpa_backward": (q, None, q, q, q, None, q, row, None, 0.0, False),
        "qk_scores": (q, q),
        "row_softmax": (q,),
        "scores_values": (q, row, q.mT),
        "linear_float32": (x, weight),
        "linear_batchnorm_softmax": (x, weight, None, None, None, ones, ones, ones, False, 1e-5),
    }


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_every_operator_speaks_once(device: str, mode, lines) -> None:
    """Also where it is called by itself in inference mode, which skips autograd."""
    for operator, arguments in calls(device).items():
        with mode():
            getattr(torch.ops.attention_ext, operator)(*arguments)
        assert [line[0] for line in lines()] == [operator]
