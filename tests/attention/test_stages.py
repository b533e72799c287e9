"""The pipeline's stages as operators: scores, softmax of rows, weighted values; together they are the forward."""

import math

import pytest
import reference
import torch
from helpers import HALVES, qkv
from refusals import FAKE_DEVICES, build, refuses, t
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


FLOATING = "dtype float16, bfloat16, float32 or float64"
W, SUM, VALUE = t(2, 4, 5, 7), t(2, 4, 5), t(2, 4, 7, 6)
VALUES = "leading dimensions that broadcast to the weights' shape (2, 4, 5, 7), got shape "
HALF, DOUBLE, INT = torch.float16, torch.float64, torch.int64
# stage, arguments, options, the argument that is named, the words behind "expected "
STAGES = [
    ("qk_scores", (t(2, 4, 5, 8), t(2, 4, 7, 9)), {}, "key", "the query's head dim E = 8 as its last size, got shape (2, 4, 7, 9)"),
    ("qk_scores", (t(2, 4, 5, 8), None), {}, "key", "a tensor, got None"),
    ("qk_scores", (t(8), t(7, 8)), {}, "query", "rank 2 or more, got shape (8,) of rank 1"),
    ("qk_scores", (t(5, 8, dtype=INT), t(7, 8, dtype=INT)), {}, "query", f"{FLOATING}, got torch.int64"),
    ("qk_scores", (t(5, 8), t(7, 8, dtype=HALF)), {}, "key", "the query's dtype torch.float32, got torch.float16"),
    (
        "qk_scores",
        (t(2, 4, 5, 8), t(3, 4, 7, 8)),
        {},
        "key",
        "leading dimensions that broadcast with the query's shape (2, 4, 5, 8), got shape (3, 4, 7, 8)",
    ),
    (
        "qk_scores",
        (t(2, 4, 5, 8), t(2, 3, 7, 8)),
        {"enable_gqa": True},
        "key",
        "a head count that divides the query's 4, got shape (2, 3, 7, 8)",
    ),
    (
        "qk_scores",
        (t(2, 4, 5, 8), t(2, 4, 7, 8), t(2, 5, 7)),
        {},
        "attn_mask",
        "a shape of rank 2 or more that broadcasts to (2, 4, 5, 7), got shape (2, 5, 7)",
    ),
    (
        "qk_scores",
        (t(5, 8), t(7, 8), t(5, 7, dtype=INT)),
        {},
        "attn_mask",
        "dtype bool, float32 or the query's torch.float32, got torch.int64",
    ),
    (
        "qk_scores",
        (t(5, 8), t(7, 8), t(5, 7), True),
        {},
        "attn_mask",
        "None together with is_causal=True, got a mask of shape (5, 7)",
    ),
    ("row_softmax", (None,), {}, "scores", "a tensor, got None"),
    ("row_softmax", (t(5, 7),), {"dtype": "int8"}, "dtype", 'float16, bfloat16, float32 or float64, got "int8"'),
    ("row_softmax", (t(7),), {}, "scores", "rank 2 or more and torch.float32 for float32 weights, got shape (7,), torch.float32"),
    (
        "row_softmax",
        (t(5, 7, dtype=DOUBLE),),
        {"dtype": "float16"},
        "scores",
        "rank 2 or more and torch.float32 for float16 weights, got shape (5, 7), torch.float64",
    ),
    (
        "row_softmax",
        (t(5, 7),),
        {"dtype": "float64"},
        "scores",
        "rank 2 or more and torch.float64 for float64 weights, got shape (5, 7), torch.float32",
    ),
    ("scores_values", (None, SUM, VALUE), {}, "weights", "a tensor, got None"),
    ("scores_values", (W, None, VALUE), {}, "row_sum", "a tensor, got None"),
    ("scores_values", (W, SUM, None), {}, "value", "a tensor, got None"),
    ("scores_values", (t(7), t(), t(7, 6)), {}, "weights", "rank 2 or more, got shape (7,) of rank 1"),
    ("scores_values", (W, SUM, t(7)), {}, "value", "rank 2 or more, got shape (7,) of rank 1"),
    (
        "scores_values",
        (t(5, 7), t(5), t(7, 6)),
        {"enable_gqa": True},
        "weights",
        "rank 3 or more with enable_gqa, got shape (5, 7) of rank 2",
    ),
    ("scores_values", (t(5, 7, dtype=INT), t(5), t(7, 6, dtype=INT)), {}, "weights", f"{FLOATING}, got torch.int64"),
    ("scores_values", (W, SUM, t(2, 4, 7, 6, dtype=HALF)), {}, "value", "the weights' dtype torch.float32, got torch.float16"),
    (
        "scores_values",
        (t(5, 7, dtype=HALF), t(5, dtype=HALF), t(7, 6, dtype=HALF)),
        {},
        "row_sum",
        "shape (5,), torch.float32 on {device}, got shape (5,), torch.float16 on {device}",
    ),
    (
        "scores_values",
        (t(5, 7, dtype=DOUBLE), t(5), t(7, 6, dtype=DOUBLE)),
        {},
        "row_sum",
        "shape (5,), torch.float64 on {device}, got shape (5,), torch.float32 on {device}",
    ),
    (
        "scores_values",
        (W, t(2, 4, 7), VALUE),
        {},
        "row_sum",
        "shape (2, 4, 5), torch.float32 on {device}, got shape (2, 4, 7), torch.float32 on {device}",
    ),
    (
        "scores_values",
        (W, t(4, 5), VALUE),
        {},
        "row_sum",
        "shape (2, 4, 5), torch.float32 on {device}, got shape (4, 5), torch.float32 on {device}",
    ),
    (
        "scores_values",
        (W, SUM, t(2, 4, 5, 6)),
        {},
        "value",
        "the weights' last size S = 7 as its second to last size, got shape (2, 4, 5, 6)",
    ),
    ("scores_values", (W, SUM, t(2, 2, 7, 6)), {}, "value", VALUES + "(2, 2, 7, 6)"),
    ("scores_values", (W, SUM, t(3, 4, 7, 6)), {}, "value", VALUES + "(3, 4, 7, 6)"),
    ("scores_values", (W, SUM, t(1, 2, 4, 7, 6)), {}, "value", VALUES + "(1, 2, 4, 7, 6)"),
    (
        "scores_values",
        (W, SUM, t(2, 3, 7, 6)),
        {"enable_gqa": True},
        "value",
        "a head count that divides the weights' 4, got shape (2, 3, 7, 6)",
    ),
    (
        "scores_values",
        (W, SUM, t(2, 0, 7, 6)),
        {"enable_gqa": True},
        "value",
        "at least one head with enable_gqa, got shape (2, 0, 7, 6)",
    ),
    ("scores_values", (W, SUM, t(3, 2, 7, 6)), {"enable_gqa": True}, "value", VALUES + "(3, 2, 7, 6)"),
]


def stage_refuses(device: str, stage: str, specs: tuple, options: dict, argument: str, words: str) -> None:
    args = [build(spec, device) if isinstance(spec, tuple) else spec for spec in specs]
    words = words.format(device=torch.ones(1, device=device).device)
    refuses(argument, lambda: getattr(OPS, stage)(*args, **options), words)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("number", range(len(STAGES)))
def test_refusals(device: str, number: int, inference: bool) -> None:
    """In inference mode the kernels check for themselves; None for a tensor does not reach those on CUDA."""
    if inference and None in STAGES[number][1]:
        pytest.skip("PyTorch's own error")
    with torch.inference_mode(inference):
        stage_refuses(device, *STAGES[number])


@pytest.mark.parametrize("device", FAKE_DEVICES)
@pytest.mark.parametrize("number", range(len(STAGES)))
def test_refusals_of_fake_tensors(device: str, number: int) -> None:
    with FakeTensorMode():
        stage_refuses(device, *STAGES[number])


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
