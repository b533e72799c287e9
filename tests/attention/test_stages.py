"""The pipeline's stages as operators: scores, softmax of rows, weighted values; together they are the forward."""

import math

import pytest
import reference
import torch
from helpers import HALVES, qkv
from refusals import FAKE_DEVICES, refuses
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.attention_ext
SHAPES = [(1, 1, 1, 1), (7, 9, 8, 8), (130, 70, 72, 40), (33, 260, 9, 7), (5, 1500, 16, 16), (3, 9000, 16, 24)]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("L", "S", "E", "Ev"), SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_stages_are_the_forward(device: str, L: int, S: int, E: int, Ev: int, dtype: torch.dtype, causal: bool) -> None:
    q, k, v = qkv(L=L, S=S, E=E, Ev=Ev, dtype=dtype, device=device)
    want, want_lse = reference.attention(q, k, v, None, causal)
    scores = OPS.qk_scores(q, k, None, causal)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    hidden = torch.ones(L, S, dtype=torch.bool).triu(1) if causal else torch.zeros(L, S, dtype=torch.bool)
    assert torch.equal((scores == -math.inf).cpu(), hidden.expand(scores.shape))
    exact = (q.double() @ k.double().mT / math.sqrt(E)).cpu().masked_fill(hidden, -math.inf)
    torch.testing.assert_close(scores.cpu().double(), exact, rtol=1e-5, atol=1e-5)

    weights, row_sum, lse = OPS.row_softmax(scores, dtype=str(dtype).removeprefix("torch."))
    assert weights.dtype == dtype
    torch.testing.assert_close(lse.cpu().double(), want_lse.cpu(), rtol=1e-5, atol=1e-5)
    share = (weights.double() / row_sum.unsqueeze(-1).double()).cpu()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(share, torch.softmax(exact, -1), rtol=4 * eps + 4e-5, atol=1e-7)
    out = OPS.scores_values(weights, row_sum, v)
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().double(), want.cpu(), rtol=8 * eps, atol=4 * eps + 1e-5 * (dtype != torch.float64))


def test_grouped_heads_and_masks(device: str) -> None:
    q, k, v = qkv((2,), (4, 2), L=9, S=11, E=16, device=device)
    mask = torch.rand(9, 11, device=device) > 0.5
    mask[3] = False
    want, _ = reference.attention(q, k, v, mask, gqa=True)
    weights, row_sum, lse = OPS.row_softmax(OPS.qk_scores(q, k, mask, enable_gqa=True))
    out = OPS.scores_values(weights, row_sum, v, enable_gqa=True)
    torch.testing.assert_close(out.cpu().double(), want.cpu(), rtol=1e-5, atol=1e-5)
    assert (out[:, :, 3] == 0).all()
    assert (row_sum[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == -math.inf).all()


def test_an_input_that_requires_grad_is_refused(device: str) -> None:
    q = torch.randn(1, 1, 4, 8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="qk_scores has no gradient"):
        OPS.qk_scores(q, q)
    with pytest.raises(RuntimeError, match="row_softmax has no gradient"):
        OPS.row_softmax(torch.randn(4, 4, device=device, requires_grad=True))
    with torch.no_grad():
        assert OPS.qk_scores(q, q).shape == (1, 1, 4, 4)


ARGUMENTS = {
    "qk_scores": ("query", "key", "attn_mask"),
    "row_softmax": ("scores",),
    "scores_values": ("weights", "row_sum", "value"),
}


def ones(stage: str, device: str, **others: str) -> dict[str, torch.Tensor]:
    """Operands that the stage takes, by name, on one device but for the others."""
    return {name: torch.ones((4, 4)[name == "row_sum" :], device=others.get(name, device)) for name in ARGUMENTS[stage]}


def grads_are_refused(device: str) -> None:
    for stage, names in ARGUMENTS.items():
        for argument in names:
            tensors = ones(stage, device)
            tensors[argument].requires_grad_()
            words = f"a tensor that does not require grad, got one that does: {stage} has no gradient, sdpa has one"
            refuses(argument, lambda stage=stage, tensors=tensors: getattr(OPS, stage)(*tensors.values()), words)
            with torch.no_grad():
                getattr(OPS, stage)(*tensors.values())


def test_every_input_that_requires_grad_is_refused(device: str) -> None:
    grads_are_refused(device)


@pytest.mark.parametrize("device", FAKE_DEVICES)
def test_every_fake_input_that_requires_grad_is_refused(device: str) -> None:
    with FakeTensorMode():
        grads_are_refused(device)


def devices_differ(device: str) -> None:
    own, other = torch.ones(1, device=device).device, "cpu" if device == "cuda" else "meta"
    for stage, of, names in (("qk_scores", "query's", ("key", "attn_mask")), ("scores_values", "weights'", ("row_sum", "value"))):
        for name in names:
            tensors = ones(stage, device, **{name: other})
            words = f"the {of} device {own}, got {other}"
            if name == "row_sum":
                words = f"shape (4,), torch.float32 on {own}, got shape (4,), torch.float32 on {other}"
            refuses(name, lambda stage=stage, tensors=tensors: getattr(OPS, stage)(*tensors.values()), words)


def test_devices_differ(device: str) -> None:
    devices_differ(device)


@pytest.mark.parametrize("device", FAKE_DEVICES)
def test_devices_of_fake_tensors_differ(device: str) -> None:
    with FakeTensorMode():
        devices_differ(device)


def layout_is_refused(device: str, wrong: torch.Tensor, got: str) -> None:
    for stage, names in ARGUMENTS.items():
        for name in names:
            tensors = ones(stage, device) | {name: wrong}
            words = f"a dense (strided) tensor, got {got}"
            refuses(name, lambda stage=stage, tensors=tensors: getattr(OPS, stage)(*tensors.values()), words)


def test_layouts(device: str) -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(4, 4)], layout=torch.jagged)
    layout_is_refused(device, torch.eye(4).to_sparse().to(device), "layout torch.sparse_coo")
    layout_is_refused(device, nested.to(device), "a nested tensor")


def test_layouts_of_fake_tensors() -> None:
    mode = FakeTensorMode()
    sparse = mode.from_tensor(torch.eye(4).to_sparse())
    with mode:
        layout_is_refused("cpu", sparse, "layout torch.sparse_coo")


def test_autocast_leaves_products_alone(device: str) -> None:
    """Scores and sums stay in float32 inside a region of lower precision."""
    q = torch.randn(2, 40, 64, device=device)
    want = OPS.qk_scores(q, q)
    weights, row_sum, _ = OPS.row_softmax(want)
    out = OPS.scores_values(weights, row_sum, q)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(OPS.qk_scores(q, q), want) and torch.equal(OPS.scores_values(weights, row_sum, q), out)


def test_opcheck(device: str) -> None:
    q = torch.randn(2, 3, 5, 8, device=device)
    scores = OPS.qk_scores(q, q)
    weights, row_sum, _ = OPS.row_softmax(scores)
    torch.library.opcheck(OPS.qk_scores.default, (q, q))
    torch.library.opcheck(OPS.row_softmax.default, (scores,))
    torch.library.opcheck(OPS.scores_values.default, (weights, row_sum, q))
