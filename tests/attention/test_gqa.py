"""Grouped heads: query head h reads key head h // (Hq // Hk), K and V may differ, nothing is repeated in memory."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, compare, leaves, normal, qkv, run, sdpa
from torch._subclasses.fake_tensor import FakeTensorMode

HEADS = [(4, 4), (4, 2), (4, 1), (6, 3), (6, 2, 3), (6, 1, 2), (8, 4, 1), (33, 11), (5, 5, 1)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_head_counts(device: str, heads: tuple[int, ...], dtype: torch.dtype, poison: None) -> None:
    q, k, v = qkv(heads=heads, L=7, S=9, E=8, dtype=dtype, device=device)
    _, grads = compare(q, k, v, gqa=True)
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)]


@pytest.mark.parametrize("batch", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (6, 2, 3)], ids=str)
def test_ranks_and_masks(device: str, batch: tuple[int, ...], heads: tuple[int, ...]) -> None:
    q, k, v = qkv(batch, heads, L=7, S=9, E=8, Ev=12, device=device)
    compare(q, k, v, gqa=True, causal=True)
    compare(q, k, v, torch.rand(7, 9, device=device) < 0.7, gqa=True)
    compare(q, k, v, normal(heads[0], 1, 9, device=device).requires_grad_(), gqa=True)


def test_query_head_reads_its_own_group(device: str) -> None:
    """One key only, so the output is that group's value."""
    q, k = normal(1, 6, 3, 8, device=device), normal(1, 2, 1, 8, device=device)
    v = torch.arange(2.0, device=device).view(1, 2, 1, 1).expand(1, 2, 1, 8)
    out = sdpa(q, k, v, enable_gqa=True)
    assert torch.equal(out[0, :, 0, 0].cpu(), torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]))


@pytest.mark.parametrize("gqa", [False, True])
def test_one_key_head_broadcasts(device: str, gqa: bool) -> None:
    q, k, v = qkv(heads=(4, 1), L=7, S=9, E=8, device=device)
    compare(q, k, v, gqa=gqa)
    compare(q, k, v, gqa=gqa, causal=True)


@pytest.mark.parametrize("lead", [(), (1,), (2,)], ids=str)
def test_leading_dims_broadcast(device: str, lead: tuple[int, ...]) -> None:
    q, k, v = (
        normal(2, 4, 7, 8, device=device),
        normal(*lead, 2, 9, 8, device=device),
        normal(1, 2, 9, 8, device=device),
    )
    compare(q, k, v, gqa=True)


def test_strided_grouped_heads(device: str) -> None:
    """One packed projection (B, L, Hq + 2 Hk, E), as models make it."""
    packed = normal(2, 11, 8, 16, device=device).transpose(1, 2)
    q, k, v = packed.split([4, 2, 2], 1)
    compare(q, k, v, gqa=True, causal=True)
    one = normal(2, 1, 11, 16, device=device).expand(2, 2, 11, 16)
    compare(q, one, one, gqa=True)


@pytest.mark.parametrize(("hq", "hk"), [(3, 2), (33, 2), (4, 8), (5, 3), (4, 0)])
@pytest.mark.parametrize("fake", [False, True])
def test_counts_that_do_not_divide_are_refused(device: str, hq: int, hk: int, fake: bool) -> None:
    q, k = normal(1, hq, 5, 8, device=device), normal(1, hk, 5, 8, device=device)
    if fake:
        with FakeTensorMode() as mode:
            q, k = mode.from_tensor(q), mode.from_tensor(k)
    for gqa in (True, False):
        with pytest.raises(RuntimeError, match=r"^attention_ext: key: expected .*, got "):
            sdpa(q, k, k, enable_gqa=gqa)


def test_value_heads_that_do_not_divide_are_refused(device: str) -> None:
    q, k, v = qkv(heads=(6, 2, 4), L=3, E=8, device=device)
    with pytest.raises(RuntimeError, match=r"^attention_ext: value: expected .*, got "):
        sdpa(q, k, v, enable_gqa=True)


def test_rank_two_is_refused(device: str) -> None:
    q, k, v = qkv((), (), L=3, E=8, device=device)
    with pytest.raises(RuntimeError, match=r"^attention_ext: (query|enable_gqa): expected .*, got "):
        sdpa(q, k, v, enable_gqa=True)


def test_no_query_heads(device: str) -> None:
    inputs = leaves(*qkv(heads=(0, 2), L=3, E=8, device=device))
    out, grads = run(sdpa, inputs, torch.ones(2, 0, 3, 8), enable_gqa=True)
    assert out.shape == (2, 0, 3, 8) and all((g == 0).all() and g.shape == t.shape for g, t in zip(grads, inputs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("E", [64, 512])
def test_memory_is_linear_in_length(masked: bool, E: int) -> None:
    """No score matrix, no repeated keys, no expanded mask: the scores alone would be 4.3 GB."""
    L = 8192
    q = normal(1, 32, L, E, dtype=torch.bfloat16, device="cuda")
    k = q[:, :4].contiguous()
    mask = torch.zeros(1, 1, 1, L, device="cuda", dtype=torch.bfloat16).expand(1, 32, L, L) if masked else None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    sdpa(q, k, k, mask, enable_gqa=True)
    assert torch.cuda.max_memory_allocated() - base < 4 * q.nbytes + (192 << 20)
