"""What the pipeline's stages refuse, real and fake, in whole sentences."""

import pytest
import torch
from refusals import FAKE_DEVICES, build, refuses, t
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.attention_ext
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
