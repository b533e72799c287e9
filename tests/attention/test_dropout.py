"""Dropout: softmax, then drop, then 1/(1-p); backward draws the same mask; p = 0 draws nothing; seeds reproduce."""

from __future__ import annotations

import io

import pytest
import reference
import torch
from helpers import FLOATS, captured, close, leaves, normal, qkv, run, sdpa, sdpa_with_lse
from torch import Tensor
from torch._inductor import config as inductor
from torch.export import export


def state(device: str) -> Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


def with_identity(L: int, S: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """V = I, so the output is the matrix of weights and its zeros are the dropped ones."""
    q, k, _ = qkv(L=L, S=S, dtype=dtype, device=device)
    return q, k, torch.eye(S, dtype=dtype, device=device).expand(2, 3, S, S)


def test_philox_known_answers() -> None:
    """Known answers published with the generator (Random123, philox4x32 with 7 rounds)."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    known = [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ones,) * 4, (ones, ones), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (pi, (0xA4093822, 0x299F31D0), (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ]
    for counter, key, want in known:
        got = reference.philox4x32(tuple(torch.tensor(c) for c in counter), key)
        assert tuple(int(word) for word in got) == want


def test_reference_mask() -> None:
    keep = reference.dropout_keep_mask(-(2**62) + 12345, 0.25, 3, 50, 70)
    assert keep.shape == (3, 50, 70) and abs(keep.double().mean().item() - 0.75) < 0.02
    rows = {tuple(row.tolist()) for row in keep.reshape(-1, 70)}
    assert len(rows) == 150, "two rows share their random numbers"
    assert torch.equal(keep[:, :, :9], reference.dropout_keep_mask(-(2**62) + 12345, 0.25, 3, 50, 9))
    assert reference.dropout_keep_mask(7, 0.0, 1, 2, 9).all() and not reference.dropout_keep_mask(7, 1.0, 1, 2, 9).any()


def test_p_zero_draws_no_random_numbers(device: str) -> None:
    q, k, v = leaves(*qkv(L=4, device=device))
    before = state(device)
    run(sdpa, [q, k, v], torch.ones(2, 3, 4, 16), dropout_p=0.0)
    assert torch.equal(before, state(device))
    sdpa(q, k, v, None, 0.5)
    assert not torch.equal(before, state(device))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_seeds_reproduce(device: str, mode: type, dtype: torch.dtype) -> None:
    q, k, v = leaves(*qkv(L=4, dtype=dtype, device=device))
    with mode():
        torch.manual_seed(1)
        a, b = sdpa(q, k, v, None, 0.5), sdpa(q, k, v, None, 0.5)
        torch.manual_seed(1)
        c = sdpa(q, k, v, None, 0.5)
    assert torch.equal(a, c) and not torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_p_one_is_zero(device: str, dtype: torch.dtype) -> None:
    inputs = leaves(*qkv(L=4, dtype=dtype, device=device))
    out, grads = run(sdpa, inputs, torch.ones(2, 3, 4, 16), dropout_p=1.0)
    assert (out == 0).all() and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), float("inf")])
def test_p_outside_of_0_to_1_is_refused(device: str, p: float) -> None:
    q, k, v = qkv(L=4, device=device)
    with pytest.raises(RuntimeError, match=r"^attention_ext: dropout_p: expected .*, got "):
        sdpa(q, k, v, None, p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_of_dropped_weights(device: str, p: float) -> None:
    """Within 5 standard deviations; and neither rows, heads nor batches repeat each other."""
    q, k, v = with_identity(64, 64, torch.float32, device)
    kept = sdpa(q, k, v, None, p) != 0
    n = kept.numel()
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    flat = kept.reshape(6, 64 * 64)
    assert len({tuple(row.tolist()) for row in flat}) == 6
    assert len({tuple(row.tolist()) for row in kept.reshape(-1, 64)}) > 0.9 * 6 * 64


def check_with_the_mask_of_forward(
    inputs: list[Tensor | None], grad: Tensor, out: Tensor, grads: list[Tensor], p: float, causal: bool = False
) -> None:
    """The mask is read off the output, where V = I; with it the oracle must give the output and every gradient."""
    doubles = leaves(*(t.detach().cpu().double() if t is not None and t.is_floating_point() else t for t in inputs))
    kept = (out != 0).cpu()
    want, _ = reference.attention(*doubles, causal, keep=kept, dropout_p=p)
    wanted = [t for t in doubles if t is not None and t.requires_grad]
    want_grads = torch.autograd.grad(want, wanted, grad.double())
    for a, b in zip((out, *grads), (want, *want_grads), strict=True):
        close(a, b, 32 * torch.finfo(out.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float"])
def test_backward_uses_the_mask_of_forward(device: str, dtype: torch.dtype, kind: str) -> None:
    p, S = 0.375, 23  # which rounds to itself: on the CPU PyTorch's operator drops, which does not round
    q, k, v = with_identity(19, S, dtype, device)
    mask = {"bool": torch.rand(19, S, device=device) < 0.8, "float": normal(19, S, dtype=dtype, device=device)}.get(kind)
    inputs = [*leaves(q, k, v.contiguous()), *leaves(mask)]
    grad = normal(2, 3, 19, S, dtype=dtype)
    out, grads = run(sdpa, inputs, grad, dropout_p=p, is_causal=kind == "causal")
    check_with_the_mask_of_forward(inputs, grad, out, grads, p, kind == "causal")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_before_drop(device: str, dtype: torch.dtype) -> None:
    """The surviving weights are the full softmax over 1 - p, not renormalised."""
    q, k, v = with_identity(9, 12, dtype, device)
    out = sdpa(q, k, v, None, 0.5).double().cpu()
    weights, _ = reference.attention(q, k, v)
    kept = out != 0
    close(out[kept].to(dtype), 2 * weights[kept], 4 * torch.finfo(dtype).eps)
    assert 0.2 < kept.double().mean() < 0.8


def test_grouped_heads_have_masks_of_their_own(device: str) -> None:
    q, k, _ = qkv(heads=(4, 2), L=16, S=16, device=device)
    eye = torch.eye(16, device=device).expand(2, 2, 16, 16)
    kept = sdpa(q, k, eye, None, 0.5, enable_gqa=True) != 0
    assert len({tuple(head.flatten().tolist()) for head in kept.reshape(8, -1)}) == 8


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_ranks(device: str, rank: int) -> None:
    batch, heads = {2: ((), ()), 3: ((), (3,)), 5: ((2, 2), (3,))}[rank]
    inputs = leaves(*qkv(batch, heads, L=9, device=device))
    out, grads = run(sdpa, inputs, torch.ones(*batch, *heads, 9, 16), dropout_p=0.3)
    assert out.isfinite().all() and out.dim() == rank and all(g.isfinite().all() and g.any() for g in grads)


P = 0.3125  # which rounds to itself: on the CPU PyTorch's operator drops, which does not round
ROUTERS = pytest.mark.parametrize("router", ["sdpa", "sdpa_with_lse"])


class Attend(torch.nn.Module):
    """Attention with dropout by one of the routers: on the CPU they go to PyTorch's operator and to this package's kernels."""

    def __init__(self, router: str) -> None:
        super().__init__()
        self.router = router

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return sdpa(q, k, v, mask, P) if self.router == "sdpa" else sdpa_with_lse(q, k, v, mask, P)[0]


def check_traced(traced, inputs: list[Tensor | None], of_eager: Tensor | None) -> None:
    """New masks at each call, those of an eager call (of_eager, from seed 5) with its generator's state, and right gradients."""
    grad = normal(2, 3, 19, 23)
    run(traced, inputs, grad)  # whatever compiling draws is drawn here
    torch.manual_seed(5)
    first, grads = run(traced, inputs, grad)
    second, more = run(traced, inputs, grad)
    torch.manual_seed(5)
    third, same = run(traced, inputs, grad)
    for out, of_out in ((first, grads), (second, more)):
        share = (out != 0).double().mean().item()
        assert abs(share - (1 - P)) < 5 * (P * (1 - P) / out.numel()) ** 0.5
        check_with_the_mask_of_forward(inputs, grad, out, of_out, P)
    assert not torch.equal(first != 0, second != 0)
    assert all(torch.equal(a, b) for a, b in zip((first, *grads), (third, *same), strict=True))
    if of_eager is not None:
        assert torch.equal(first != 0, of_eager != 0)
        close(first, of_eager)


def traced_problem(device: str, kind: str, router: str) -> tuple[list[Tensor | None], Tensor]:
    """Inputs that require grad, with V = I, and what an eager call gives from seed 5."""
    q, k, v = with_identity(19, 23, torch.float32, device)
    inputs = leaves(q, k, v.contiguous(), normal(19, 23, device=device) if kind == "float" else None)
    torch.manual_seed(5)
    return inputs, Attend(router)(*inputs).detach()


@ROUTERS
@pytest.mark.parametrize("kind", ["plain", "float"])
def test_compiled_backward_uses_the_mask_of_forward(device: str, kind: str, router: str) -> None:
    inputs, of_eager = traced_problem(device, kind, router)
    torch._dynamo.reset()
    check_traced(torch.compile(Attend(router), fullgraph=True, backend="aot_eager"), inputs, of_eager)


@ROUTERS
@pytest.mark.parametrize("own_generator", [False, True])  # inductor's own random numbers, or PyTorch's
def test_backward_of_inductor_uses_the_mask_of_forward(device: str, own_generator: bool, router: str) -> None:
    inputs, of_eager = traced_problem(device, "plain", router)
    torch._dynamo.reset()
    with inductor.patch(fallback_random=not own_generator):
        check_traced(torch.compile(Attend(router), fullgraph=True), inputs, None if own_generator else of_eager)


@ROUTERS
@pytest.mark.parametrize("kind", ["plain", "float"])
def test_exported_backward_uses_the_mask_of_forward(device: str, kind: str, router: str) -> None:
    """As exported, stored and loaded, and with the router taken apart, where the seed is drawn in the graph."""
    inputs, of_eager = traced_problem(device, kind, router)
    program = export(Attend(router), tuple(inputs))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    for way in (program, torch.export.load(stored), program.run_decompositions()):
        check_traced(way.module(), inputs, of_eager)


@pytest.mark.gpu
def test_cuda_graph_replays_with_new_masks() -> None:
    q, eye = normal(2, 2, 64, 64, device="cuda"), torch.eye(64, device="cuda").expand(2, 2, 64, 64)
    sdpa(q, q, eye, None, 0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(q, q, eye, None, 0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first == 0, out == 0)


@pytest.mark.gpu
def test_cuda_graph_backward_uses_the_mask_of_its_forward() -> None:
    q = normal(2, 2, 64, 64, device="cuda").requires_grad_()
    v = torch.eye(64, device="cuda").repeat(2, 2, 1, 1).requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        out = sdpa(q, q, v, None, 0.5)
        return out, *torch.autograd.grad(out.sum(), v)

    graph, (out, grad_v) = captured(step)
    for _ in range(2):
        graph.replay()
        close(grad_v, out.detach().sum(-2)[..., None].expand(2, 2, 64, 64), 1e-5)  # with V = I: column sums of the weights
