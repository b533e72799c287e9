"""The pipeline's stages as operators: scores, softmax of rows, weighted values; together they are the forward."""

import math

import pytest
import reference
import torch
from helpers import HALVES, qkv
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


@pytest.mark.parametrize("fake", [False, True])
def test_refusals(device: str, fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad():
        scores = torch.randn(2, 4, 4, device=device)
        for bad, words in (
            (lambda: OPS.row_softmax(scores, dtype="int8"), "dtype: expected"),
            (lambda: OPS.row_softmax(scores.double()), "scores: expected"),
            (lambda: OPS.scores_values(scores, scores[..., 0], torch.randn(2, 5, 3, device=device)), "expected"),
            (lambda: OPS.qk_scores(scores, torch.randn(2, 4, 5, device=device)), "key: expected"),
        ):
            with pytest.raises(RuntimeError, match=f"attention_ext: .*{words}"):
                bad()


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
