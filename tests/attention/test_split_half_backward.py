"""The backward by half terms, forced by name, against float64: no less exact than PyTorch's own in float32.

Slices are whole matrices, or rows of one with all keys, whose terms may come in pieces; what lies in several is carried in the
gradients. What two half terms are not enough for is made anew, as the pipeline makes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import error_rule
import pytest
import reference
import torch
from choice import Plan
from helpers import normal, oracle_with_grads, qkv, sdpa_backward, sdpa_forward, tf32, torch_own
from kernels import KERNELS, needs_the_card
from torch import Tensor

KERNEL = next(kernel for kernel in KERNELS if kernel.name == "sm90_split_half")
NAN, LOWEST, MIB = float("nan"), torch.finfo(torch.float32).min, 1 << 20
DIMS = ((32, 32), (64, 64), (128, 40), (136, 264), (520, 512), (1024, 1024), (71, 13))
FLOAT = 2  # of core/tensors.h


def planned(cap: int = 1 << 27, **facts: int) -> tuple[str, str, int]:
    """The chosen kernel, what this one refuses, and its estimate."""
    if "9.0a" not in torch.ops.attention_ext.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")
    typical = {"N": 8, "L": 512, "S": 512, "E": 128, "Ev": 128, "type": FLOAT}
    names, values = zip(*(typical | facts).items(), strict=True)
    index = torch.ops.attention_ext.kernels("backward").index(KERNEL.name)
    found = Plan(*torch.ops.attention_ext.plan("backward", names, values, 90, 132, cap))
    return found.kernel, found.refusals[index], found.costs[index]


@pytest.mark.parametrize(
    ("facts", "clause"),
    [
        ({}, ""),
        ({"type": 0}, "it takes float32, not float16"),
        ({"E": 0}, "it does not take sizes of 0"),
        ({"E": 31, "Ev": 40}, "sums of fewer than 32 products are more exact on CUDA cores"),
        ({"E": 32, "Ev": 1}, ""),
        ({"S": (1 << 16) + 1}, "it loses precision beyond 65536 keys"),
        ({"key_group": 2}, "key and value have different head counts"),
        ({"mask": 3, "mask_grad": 1}, ""),
        ({"key_group": 2, "value_group": 2, "causal": 1, "mask": 1, "dropout": 1}, ""),
    ],
    ids=str,
)
def test_what_it_takes(facts: dict[str, int], clause: str) -> None:
    assert planned(**facts)[1] == clause


def test_narrow_heads_cost_less() -> None:
    """Up to the head dim whose scores are made twice, and beyond."""
    costs = [planned(N=64, L=2048, S=2048, E=E, Ev=E)[2] for E in (64, 128, 136, 256)]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_narrow_heads_need_no_scores_in_memory() -> None:
    """With dropout they are, at a higher cost; a mask's gradient does without if the mask is of whole matrices."""
    facts = {"N": 64, "L": 2048, "S": 2048, "E": 64, "Ev": 64}
    mask = {"mask": 3, "mask_grad": 1}
    assert 3 * planned(**facts)[2] < 2 * planned(**facts, dropout=1)[2]
    assert planned(**facts, **mask, mask_rows=1)[2] < planned(**facts, **mask, mask_rows=0)[2]


def test_the_gradient_of_a_mask_is_chosen() -> None:
    """And costs something."""
    (kernel, _, cost), (_, _, without) = planned(mask=3, mask_grad=1), planned(mask=3)
    assert kernel == KERNEL.name and cost > without


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    "facts",
    [{"N": 1, "L": 16384, "S": 16384, "E": 512, "Ev": 512}, {"N": 64, "L": 2048, "S": 2048}, {"N": 16, "L": 1024, "S": 77}],
    ids=str,
)
def test_more_workspace_costs_no_more(facts: dict[str, int], causal: int) -> None:
    """And the pipeline, which needs the least, runs where not one tile of rows would fit."""
    kernels, _, costs = zip(*(planned(cap, causal=causal, **facts) for cap in (1, 1 << 26, 1 << 27, 1 << 29)), strict=True)
    assert kernels == ("pipeline", *[KERNEL.name] * 3)
    assert costs[1] >= costs[2] >= costs[3] > 0


@pytest.fixture
def hopper() -> Iterator[None]:
    needs_the_card(KERNEL)
    with tf32(False):
        yield


gpu = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


def draw(heads: tuple[int, int], L: int, S: int, dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value, grad_out."""
    q, k, v = qkv((2,), heads, L, S, *dims, device="cuda")
    return q, k, v, normal(*q.shape[:-1], dims[1], device="cuda")


def gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None = None, causal: bool = False, **options
) -> list[Tensor]:
    gqa, kernel = q.size(1) != k.size(1), options.pop("kernel_name", KERNEL.name)
    call = {"enable_gqa": gqa, "key_lengths": options.pop("key_lengths", None)}
    grad_lse, seed, p = options.pop("grad_lse", None), options.pop("seed", None), options.pop("p", 0.0)
    out, lse = sdpa_forward(q, k, v, mask, seed, p, causal, **call)
    return sdpa_backward(grad, grad_lse, q, k, v, mask, out, lse, seed, p, causal, kernel_name=kernel, **call, **options)[:3]


def hold(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None = None, causal: bool = False, **options) -> None:
    """The error rule, and the same bits twice."""
    gqa, inputs = q.size(1) != k.size(1), [q, k, v, mask]
    want, _, want_grads = oracle_with_grads(inputs, grad, causal, None, gqa)
    _, own_grads = torch_own(inputs, grad, want, causal, None, gqa)
    grads, again = (gradients(q, k, v, grad, mask, causal, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    error_rule.check_gradients(grads, want_grads, own_grads, torch.float32)


@on_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_lengths(dims: tuple[int, int], causal: bool, poison_all: None) -> None:
    for L, S in ((1, 1), (1, 333), (100, 1), (64, 64), (65, 129), (127, 300), (300, 127), (257, 500)):
        error_rule.settle(lambda L=L, S=S: hold(*draw((3, 3), L, S, dims), causal=causal))


@on_gpu
@pytest.mark.parametrize("cap", [1 << 27, 8 * MIB, 3 * MIB, 600_000, 1], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dims", [(72, 136), (72, 128), (33, 64), (32, 24)], ids=str)  # scores kept, made twice, not in memory
def test_slices(dims: tuple[int, int], heads: tuple[int, int], causal: bool, cap: int, poison_all: None) -> None:
    for L, S in ((600, 700), (900, 200), (200, 900)):
        error_rule.settle(lambda L=L, S=S: hold(*draw(heads, L, S, dims), causal=causal, workspace_bytes=cap))


@on_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("L", "S"), [(128, 6000), (6000, 128), (1500, 1500)])
def test_sums_in_parts(L: int, S: int, causal: bool, poison_all: None) -> None:
    """Few long sums: parts of one, by several SMs, are added in one order."""
    error_rule.settle(lambda: hold(*draw((2, 1), L, S, (40, 64)), causal=causal))
    error_rule.settle(lambda: hold(*draw((1, 1), L, S, (136, 72)), causal=causal))


@on_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 96)], ids=str)
def test_sums_in_shares(dims: tuple[int, int], poison_all: None) -> None:
    """Two matrices at a time have 72 long sums: an equal share of their steps for each SM, also where lengths leave some out."""
    room = {"workspace_bytes": 64 * MIB}
    inputs, lengths = draw((2, 2), 1500, 1500, dims), torch.tensor([700, 0], device="cuda", dtype=torch.int32)
    error_rule.settle(lambda: hold(*inputs, **room))
    ours, want = (gradients(*inputs, key_lengths=lengths, kernel_name=name, **room) for name in (KERNEL.name, "pipeline"))
    for a, b in zip(ours, want, strict=True):
        assert (a.double() - b.double()).norm() <= 2e-6 * b.double().norm()


@on_gpu
@pytest.mark.parametrize("kind", ["bool", "bias", "of keys"])
def test_masks(kind: str, poison_all: None) -> None:
    q, k, v, grad = draw((4, 2), 200, 333, (64, 72))
    mask = (
        torch.rand(2, 1, 200, 333, device="cuda") < 0.6
        if kind == "bool"
        else normal(1, 1, 200 if kind == "bias" else 1, 333).cuda()
    )
    if kind != "of keys":
        mask[..., 7, :] = False if kind == "bool" else -float("inf")
    grads = gradients(q, k, v, grad, mask)
    _, _, want = oracle_with_grads([q, k, v, mask.detach()], grad, False, None, True)
    for ours, wanted in zip(grads, want, strict=False):
        assert (ours.cpu().double() - wanted).norm() <= 1e-6 * wanted.norm()
    assert bool((grads[0][..., 7, :] == 0).all()) == (kind != "of keys")


@on_gpu
@pytest.mark.parametrize("E", [32, 64, 128, 136])
@pytest.mark.parametrize("kind", ["causal", "bool"])
def test_a_single_key(kind: str, E: int) -> None:
    """The gradient of a query that sees one key is 0, bit by bit, but for what comes by the log-sum-exp."""
    q, k, v, grad = draw((2, 2), 100, 300, (E, 64))
    mask = torch.rand(100, 300, device="cuda") < 0.5 if kind == "bool" else None
    if mask is not None:
        mask[0] = torch.arange(300, device="cuda") == 77
    assert (gradients(100 * q, k, v, grad, mask, kind == "causal")[0][..., 0, :] == 0).all()


@on_gpu
@pytest.mark.parametrize("dims", [(64, 64), (264, 136)], ids=str)
def test_grad_lse_lengths_and_dropout(dims: tuple[int, int]) -> None:
    """As the pipeline has them."""
    q, k, v, grad = draw((4, 2), 200, 333, dims)
    lengths, seed = torch.tensor([65, 0], device="cuda", dtype=torch.int32), torch.tensor([99], device="cuda")
    of_lse = normal(2, 4, 200).cuda()
    for options in ({"grad_lse": of_lse}, {"key_lengths": lengths}, {"seed": seed, "p": 0.3}, {"seed": seed, "p": 1.0}):
        for causal in (False, True):
            ours, want = (
                gradients(q, k, v, grad, causal=causal, kernel_name=name, **options) for name in (KERNEL.name, "pipeline")
            )
            for a, b in zip(ours, want, strict=True):
                assert (a.double() - b.double()).norm() <= 2e-6 * b.double().norm(), options


@on_gpu
def test_what_lies_behind_a_length_is_not_read() -> None:
    q, k, v, grad = draw((2, 2), 200, 300, (64, 136))
    lengths = torch.tensor([77, 0], device="cuda", dtype=torch.int32)
    want = gradients(q, k, v, grad, key_lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        k[row, :, length:] = v[row, :, length:] = NAN
    assert all(torch.equal(a, b) for a, b in zip(gradients(q, k, v, grad, key_lengths=lengths), want, strict=True))


@on_gpu
@pytest.mark.parametrize(
    ("kind", "causal"),
    [*itertools.product(("columns", "columns of value", "a small row of value"), (False, True)), ("lowest", False)],
)
def test_what_is_made_anew(kind: str, causal: bool) -> None:
    """Not much less exact than the pipeline."""
    q, k, v, grad = draw((4, 2), 200, 300, (72, 72))
    scales = torch.exp2(torch.randint(-16, 17, (72,), device="cuda").float())
    mask = None
    if kind == "columns":
        q, k = q * scales, k / scales
    elif kind == "columns of value":
        v, grad = v * scales, grad / scales
    elif kind == "lowest":
        mask = torch.zeros(200, 300, device="cuda")
        mask[7] = LOWEST
    else:
        v[..., 5, :] *= 2.0**-20
    inputs = [t.double() if t is not None else None for t in (q, k, v, mask)]
    leaves = [t.requires_grad_() for t in inputs[:3]]
    out, _ = reference.attention(*leaves, inputs[3], causal, None, True, device="cuda")
    want = torch.autograd.grad(out, leaves, grad.double())
    ours, pipelines = (gradients(q, k, v, grad, mask, causal, kernel_name=name) for name in (KERNEL.name, "pipeline"))
    for a, b, wanted in zip(ours, pipelines, want, strict=True):
        assert (a - wanted).norm() <= 2 * (b - wanted).norm() + 1e-7 * wanted.norm()


@on_gpu
@pytest.mark.parametrize("index", range(4), ids=["query", "key", "value", "grad_out"])
def test_not_finite(index: int) -> None:
    """Such a key head is what the pipeline makes of it; others are as without."""
    inputs = list(draw((4, 2), 100, 200, (64, 64)))
    plain = gradients(*inputs)
    inputs[index] = inputs[index].clone()
    inputs[index][0, 0, 3, 5] = NAN
    ours, want = (gradients(*inputs, kernel_name=name) for name in (KERNEL.name, "pipeline"))
    assert any(t.isnan().any() for t in ours)
    for a, b, before, heads in zip(ours, want, plain, (2, 1, 1), strict=True):
        assert torch.equal(a[0, heads:], before[0, heads:]) and torch.equal(a[1], before[1])
        torch.testing.assert_close(a[0, :heads].nan_to_num(), b[0, :heads].nan_to_num(), rtol=1e-4, atol=1e-5)


@on_gpu
def test_repeats() -> None:
    q, k, v, grad = draw((4, 2), 700, 700, (136, 72))
    first = gradients(q, k, v, grad, causal=True)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(gradients(q, k, v, grad, causal=True), first, strict=True))
