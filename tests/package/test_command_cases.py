"""The calls that the command is about, and what it says of cards that need not be there."""

from __future__ import annotations

import json

import cases
import pytest
import torch
import torch.nn.functional as F
from choice import planned

import attention_ext
from attention_ext.__main__ import main
from attention_ext._libraries import BUILD, Build
from attention_ext._torch_private import cudnn_comes_first, sdp_settings
from attention_ext.command import cards, explanation
from attention_ext.command.arguments import parse
from attention_ext.command.cases import CASES, Case, parse_shape, three_calls

hopper = pytest.mark.skipif(not BUILD.has_hopper_kernels, reason="a build without the kernels for Hopper")
SIZES = ("B", "Hq", "Hk", "L", "S", "E", "Ev", "dtype", "causal")
H100 = cards.CARDS["h100"]


def test_named_calls_are_those_of_the_benches() -> None:
    """The benches cannot lend theirs to the package: they also run next to older wheels."""
    theirs = {case.name: case for case in (*cases.CASES, *cases.SMALL)}
    for name, case in CASES.items():
        assert name == case.name and case.what
        assert [getattr(case, size) for size in SIZES] == [getattr(theirs[name], size) for size in SIZES], name
        assert case.flop(False) == theirs[name].flop


def test_sizes() -> None:
    assert parse_shape("1,8,2,16, 32,64") == (1, 8, 2, 16, 32, 64, 64)
    assert parse_shape("1,8,2,16,32,64,48") == (1, 8, 2, 16, 32, 64, 48)
    case = Case("", 1, 8, 2, 16, 32, 64, torch.float32, False, 48)
    assert case.shapes == ((1, 8, 16, 64), (1, 2, 32, 64), (1, 2, 32, 48))
    assert case.nbytes == 4 * sum(t.numel() for t in case.inputs(torch.device("cpu")))
    assert str(case) == "query (1, 8, 16, 64), key (1, 2, 32, 64), value (1, 2, 32, 48), float32"
    assert Case.of_record(json.loads(json.dumps(case.record))) == case
    products = [64, 48], [64, 48, 48, 64, 64, 64, 48]  # of the forward; of both with the scores computed again
    assert [case.flop(backward) for backward in (False, True)] == [2 * 8 * 16 * 32 * sum(widths) for widths in products]


@pytest.mark.parametrize(
    ("args", "dtype", "causal"),
    [
        (["kb97"], torch.float16, False),
        (["kb97", "--dtype", "fp32", "--causal"], torch.float32, True),
        (["g512c"], torch.bfloat16, True),
        (["--shape", "1,2,2,4,4,8", "--device", "cpu"], torch.float32, False),
        (["--shape", "1,2,2,4,4,8", "--card", "h100"], torch.bfloat16, False),
        (["--shape", "1,2,2,4,4,8", "--dtype", "half", "--causal"], torch.float16, True),
    ],
    ids=str,
)
def test_dtype_and_causal(args: list[str], dtype: torch.dtype, causal: bool) -> None:
    (case,) = parse(["explain", *args]).cases
    assert (case.dtype, case.causal) == (dtype, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ["2,4,4,16,24,8", "2,4,2,24,16,8,6", "1,4,1,1,9,8"])
def test_three_calls(shape: str, causal: bool) -> None:
    case = Case("", *parse_shape(shape)[:6], torch.float64, causal, parse_shape(shape)[6])
    q, k, v = case.inputs(torch.device("cpu"))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=case.Hq != case.Hk)
    call = three_calls(case)
    for _ in range(2):
        torch.testing.assert_close(call(q, k, v), want, rtol=1e-12, atol=1e-12)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grad = torch.randn_like(want)
    wants = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True), leaves, grad)
    torch.testing.assert_close(torch.autograd.grad(call(*leaves), leaves, grad), wants, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("card", cards.CARDS.values(), ids=list(cards.CARDS))
@pytest.mark.parametrize("case", [*cases.CASES, *cases.SMALL], ids=lambda case: case.name)
def test_a_card_that_is_not_there(case: cases.Case, card: cards.Card) -> None:
    """Own kernels as the plan has them for the benches; PyTorch's where it was measured faster on Hopper."""
    own = Case(*(getattr(case, size) for size in ("name", "B", "Hq", "Hk", "L", "S", "E", "dtype", "causal", "Ev")))
    capability = 10 * card.capability[0] + card.capability[1]
    plan = planned(case, capability, card.sms)
    assert cards._plan(own, card, "forward") == plan[:4]
    assert cards.backward_kernel(own, card) == planned(case, capability, card.sms, table="backward").kernel
    found = cards.explained(own, card)
    if found.kernel.startswith("torch: "):
        assert not found.preferred and (case.name == "dec128" or (capability < 90 and max(case.E, case.Ev) <= 256))
    else:
        assert (found.kernel, found.workspace, found.preferred) == (plan.kernel, plan.workspace, plan.preferred)
        assert found.reason.startswith(f"{plan.reason}; PyTorch's operator does not run: ")
    assert (cards.explained(own, card, gradient=True).kernel == "torch: cudnn") <= (card.is_hopper and case.E <= 256)


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_card_that_is_there(name: str, backward: bool) -> None:
    """The same answer as from tensors, where torch has its usual settings and a cuDNN that comes first."""
    case = CASES[name]
    q, k, v = (torch.empty(s, dtype=case.dtype, device="cuda", requires_grad=backward) for s in case.shapes)
    if not cudnn_comes_first(tuple(sdp_settings()[3])):
        pytest.skip("this cuDNN does not come first")
    assert cards.explained(case, cards.at(torch.device("cuda")), backward) == attention_ext.explain(q, k, v, **case.options)


@hopper
def test_explain_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "g512cgqa", "--card", "h100", "--backward"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "On NVIDIA H100, compute capability 9.0, which need not be there: g512cgqa: query (1, 32, 8192, 512)",
        "kernel sm90_512 backward sm90_pipeline because its estimate of",
        "workspace 0 bytes faster measured faster than PyTorch's operator: attention_ext.preferred is True",
        "call attention_ext.sdpa(query, key, value, is_causal=True, enable_gqa=True)",
    ):
        assert part in text, part


def test_explain_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--shape", "1,4,2,8,8,16", "--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "kernel torch because that is the plan for cpu tensors" in text and "On the CPU nothing gets faster" in text
    assert "enable_gqa=True)" in text and "is_causal" not in text


def test_explain_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no card either: what an H100 would run."""
    assert main(["explain", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("No CUDA device is used here. On NVIDIA H100, compute capability 9.0 it would be:\n")
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()[:1] and line.split()[0] in CASES}
    assert rows.keys() == {name for name in CASES if not name.startswith("small")}
    for name, row in rows.items():
        found = cards.explained(CASES[name], H100)
        assert f" {found.kernel} " in row and row.endswith(" yes") == found.preferred


def test_explain_says_what_the_build_is_without(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for built_for, without in (("8.0", True), ("8.0;9.0a", False)):
        monkeypatch.setattr(explanation, "BUILD", Build("0.1.0", "unknown", 13, built_for))
        for card in ("h100", "a100"):
            assert main(["explain", "kb97", "--card", card]) == 0
            said = "This build is without the kernels for Hopper" in capsys.readouterr().out
            assert said == (without and card == "h100")


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "kb97", "dec128", "--json", "--card", "h200"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "NVIDIA H200" and [entry["name"] for entry in found["cases"]] == ["kb97", "dec128"]
    assert [entry["preferred"] for entry in found["cases"]] == [BUILD.has_hopper_kernels, False] and found["cases"][1][
        "kernel"
    ] == "torch: cudnn"
