"""The backward of sm90_256 by name, against float64: lengths about its tiles' edges, groups, many tiles a CTA; and its plan."""

from __future__ import annotations

import error_rule
import pytest
import torch
from choice import CAP, Plan
from helpers import HALVES, oracle_with_grads, sdpa_backward, sdpa_forward, torch_own
from kernels import needs_the_card
from row_cases import KERNEL, draw, normal
from torch import Tensor

OPS = torch.ops.attention_ext
NAMES = ("pipeline", "sm90_256", "sm90_pipeline")
WIDEST = ((64, 64), (128, 128), (192, 192), (256, 256))  # (E, Ev) of each class
DIMS = (*WIDEST, (8, 64), (72, 72), (96, 128), (128, 16), (192, 128), (136, 256), (256, 8))
EDGES = (1, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193)
LENGTHS = [(L, EDGES[(i + apart) % len(EDGES)]) for i, L in enumerate(EDGES) for apart in (0, 4, 9)] + [(300, 500), (1000, 700)]


def plan(**more: int) -> Plan:
    facts = {"N": 64, "L": 1024, "S": 1024, "E": 128, "Ev": 128} | {name.replace("__", "."): value for name, value in more.items()}
    return Plan(*OPS.plan("backward", [*facts], [*facts.values()], 90, 132, CAP))


REFUSALS = [
    ({"E": 264}, "it takes head dims up to 256"),
    ({"Ev": 264}, "it takes head dims up to 256"),
    ({"type": 2}, "it takes float16 and bfloat16, not float32"),
    ({"L": (1 << 18) + 1}, "it loses precision beyond 262144 queries of a key head"),
    ({"L": 1 << 16, "key_group": 8, "value_group": 8}, "it loses precision beyond 262144 queries of a key head"),
    ({"S": (1 << 18) + 1}, "it loses precision beyond 262144 keys"),
    ({"key_group": 2}, "key and value have different head counts"),
    ({"N": 1 << 30, "L": 1 << 10}, "it counts tiles in 32 bits, and here are more"),
    ({"N": 1 << 20, "L": 1 << 15, "S": 1 << 15, "mask": 2, "mask_grad": 1}, "it counts tiles in 32 bits, and here are more"),
    ({"batch_dims": 4}, "strides keep 4 leading dims apart, and it takes 3"),
    ({"grad_out__row_alignment": 8}, "grad_out's rows do not all begin on 16-byte boundaries"),
]


@pytest.fixture
def hopper_kernels() -> None:
    if "9.0a" not in OPS.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")


@pytest.mark.parametrize(("facts", "clause"), REFUSALS, ids=str)
def test_refusals(facts: dict[str, int], clause: str) -> None:
    assert plan(**facts).refusals[NAMES.index("sm90_256")] == clause
    assert plan(**facts).kernel != "sm90_256"


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("E", [64, 128, 192, 256])
@pytest.mark.parametrize(("L", "S"), [(512, 512), (2048, 2048), (8192, 8192)])
def test_chosen(hopper_kernels: None, L: int, S: int, E: int, causal: int) -> None:
    """Where its tiles fill the card, as it leaves no scores in memory; grouped heads take no longer."""
    found = plan(L=L, S=S, E=E, Ev=E, causal=causal)
    if (L, E, causal) == (2048, 256, 0):  # the one case of these in which slices of scores cost less
        assert found.kernel == "sm90_pipeline", found.reason
        return
    assert found.kernel == "sm90_256", found.reason
    grouped = plan(L=L, S=S, E=E, Ev=E, causal=causal, N=512, key_group=8, value_group=8)
    apart = plan(L=L, S=S, E=E, Ev=E, causal=causal, N=512)
    assert grouped.kernel == "sm90_256"
    assert grouped.costs[1] <= 1.3 * apart.costs[1]


def backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, name: str = KERNEL.name, **options) -> list[Tensor]:
    gqa = q.size(1) != k.size(1)
    # The forward by one kernel whatever the batch: which one "auto" takes is seen in the last bits of what it leaves.
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, causal, enable_gqa=gqa, kernel_name=KERNEL.name)
    options |= {"enable_gqa": gqa, "kernel_name": name}
    grad_lse = options.pop("grad_lse", None)
    return list(sdpa_backward(grad, grad_lse, q, k, v, None, out, lse, None, 0.0, causal, **options)[:3])


def check(
    name: str, heads: tuple[int, int], L: int, S: int, dims: tuple[int, int], dtype: torch.dtype, causal: bool, B: int = 2
) -> None:
    def trial() -> None:
        q, k, v = draw(B, heads, L, S, dims, dtype)
        grad = normal(B, heads[0], L, dims[1], dtype=dtype)
        inputs, gqa = [q, k, v, None], heads[0] != heads[1]
        want, _, want_grads = oracle_with_grads(inputs, grad, causal, None, gqa)
        _, own_grads = torch_own(inputs, grad, want, causal, None, gqa)
        error_rule.check_gradients(backward(q, k, v, grad, causal), want_grads, own_grads, dtype)

    try:
        error_rule.settle(trial)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


@pytest.fixture
def hopper() -> None:
    needs_the_card(KERNEL)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_lengths(hopper: None, dims: tuple[int, int], causal: bool, poison_all: None) -> None:
    for number, (L, S) in enumerate(LENGTHS):
        check(f"{L} x {S}", (3, 3), L, S, dims, HALVES[number % 2], causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (16, 2)], ids=str)
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_grouped(hopper: None, dims: tuple[int, int], heads: tuple[int, int], causal: bool, poison_all: None) -> None:
    for number, (L, S) in enumerate([(1, 300), (65, 77), (300, 257)]):
        check(f"{L} x {S}", heads, L, S, dims, HALVES[number % 2], causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(16, 16), (16, 2)], ids=str)
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_bits(hopper: None, dims: tuple[int, int], heads: tuple[int, int], causal: bool, poison_all: None) -> None:
    """Two or three tiles for each of 132 SMs: the same bits again, and those of a batch row alone."""
    q, k, v = draw(6, heads, 380, 600, dims, torch.bfloat16)
    grad = normal(6, heads[0], 380, dims[1], dtype=torch.bfloat16)
    together = backward(q, k, v, grad, causal)
    for _ in range(20):
        assert all(torch.equal(one, other) for one, other in zip(together, backward(q, k, v, grad, causal), strict=True))
    for row in range(0, 6, 5):
        one = slice(row, row + 1)
        alone = backward(q[one], k[one], v[one], grad[one], causal)
        assert all(torch.equal(a[one], b) for a, b in zip(together, alone, strict=True)), row


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{"wide_grads": True}, {"scale": -0.1}, {"scale": 0.0}, {"grad_lse": True}], ids=str)
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_options(hopper: None, dims: tuple[int, int], options: dict, causal: bool, poison_all: None) -> None:
    """As the pipeline's for every card has them, in float32 where that is possible."""
    q, k, v = draw(2, (4, 4), 200, 333, dims, torch.float16)
    grad = normal(2, 4, 200, dims[1], dtype=torch.float16)
    lse = {"grad_lse": normal(2, 4, 200)} if "grad_lse" in options else {}
    scale = {"scale": options["scale"]} if "scale" in options else {}
    out, of = sdpa_forward(q, k, v, None, None, 0.0, causal, **scale)
    arguments = (grad, lse.get("grad_lse"), q, k, v, None, out, of, None, 0.0, causal)
    got, want = (sdpa_backward(*arguments, wide_grads=True, kernel_name=name, **scale) for name in (KERNEL.name, "pipeline"))
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        assert (ours - theirs).norm() <= 2e-3 * theirs.norm() + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_a_large_log_sum_exp_changes_no_other_row(hopper: None, dims: tuple[int, int], causal: bool, poison_all: None) -> None:
    """Some queries of a block are made by the difference first, or all, or none: of the others dQ keeps its bits."""
    for rows in ([0], [31, 32], [63, 64, 95, 96], [127, 128, 332]):
        q, k, v = draw(2, (4, 2), 333, 400, dims, torch.float16)
        grad = normal(2, 4, 333, dims[1], dtype=torch.float16)
        out, lse = sdpa_forward(q, k, v, None, None, 0.0, causal, enable_gqa=True)
        large = q.clone()
        large[:, :, rows] *= 6000  # of a query that sees one key as well
        large_out, large_lse = sdpa_forward(large, k, v, None, None, 0.0, causal, enable_gqa=True)
        assert bool((large_lse[:, :, rows].abs() >= 1024).any())
        others = [row for row in range(333) if row not in rows]
        large_out[:, :, others], large_lse[:, :, others] = out[:, :, others], lse[:, :, others]
        options = {"enable_gqa": True, "kernel_name": KERNEL.name}
        want = sdpa_backward(grad, None, q, k, v, None, out, lse, None, 0.0, causal, **options)[:3]
        got = sdpa_backward(grad, None, large, k, v, None, large_out, large_lse, None, 0.0, causal, **options)[:3]
        assert torch.equal(got[0][:, :, others], want[0][:, :, others]), rows
        assert all(bool(one.isfinite().all()) for one in got)


@pytest.mark.gpu
@pytest.mark.parametrize("L", [1, 16, 17, 21, 32, 33, 63, 65])
def test_a_large_log_sum_exp_in_short_matrices(hopper: None, L: int, poison_all: None) -> None:
    """A CTA takes the rows of several: every other batch row has large ones, and each has the bits that it has alone."""
    q, k, v = draw(5, (3, 3), L, 200, (128, 128), torch.bfloat16)
    q[::2] *= 6000
    inputs = [normal(5, 3, L, 128, dtype=torch.bfloat16), q, k, v, *sdpa_forward(q, k, v, None, None, 0.0, False)]

    def run(rows: slice) -> list[Tensor]:
        grad, *operands, out, lse = (t[rows] for t in inputs)
        return list(sdpa_backward(grad, None, *operands, None, out, lse, None, 0.0, False, kernel_name=KERNEL.name)[:3])

    whole = run(slice(None))
    for row in range(5):
        alone = run(slice(row, row + 1))
        assert all(torch.equal(one, other[row : row + 1]) for one, other in zip(alone, whole, strict=True)), row


def masks(kind: str, B: int, H: int, L: int, S: int, dtype: torch.dtype) -> Tensor | None:
    def shown(*shape: int) -> Tensor:
        return torch.rand(shape, device="cuda") < 0.7

    match kind:
        case "bool":
            return shown(B, 1, L, S)
        case "padding":
            return torch.arange(S, device="cuda") < torch.randint(1, S + 1, (B, 1, 1, 1), device="cuda")
        case "bias":
            return normal(1, H, L, S, dtype=dtype).masked_fill(~shown(1, H, L, S), float("-inf"))
        case "float":
            return normal(B, 1, L, S)
    return None


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["none", "bool", "padding", "bias", "float"])
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_masks(hopper: None, dims: tuple[int, int], kind: str, p: float, poison_all: None) -> None:
    """As the pipeline's for every card has them: rows of the mask on 16-byte boundaries and not, groups, rows that see no key."""
    for number, (L, S, heads) in enumerate([(200, 320, (4, 4)), (129, 333, (4, 4)), (65, 64, (6, 2)), (300, 257, (2, 2))]):
        causal, dtype = kind == "none" and number % 2 == 1, torch.float16
        q, k, v = draw(2, heads, L, S, dims, dtype)
        grad = normal(2, heads[0], L, dims[1], dtype=dtype)
        mask = masks(kind, 2, heads[0], L, S, dtype)
        if kind == "bool" and mask is not None:
            mask[:, :, :3] = False
        seed = torch.tensor([7], device="cuda") if p else None
        gqa = heads[0] != heads[1]
        out, lse = sdpa_forward(q, k, v, mask, seed, p, causal, enable_gqa=gqa)
        arguments = (grad, None, q, k, v, mask, out, lse, seed, p, causal)
        options = {"wide_grads": True, "enable_gqa": gqa}
        got, want = (sdpa_backward(*arguments, kernel_name=name, **options)[:3] for name in (KERNEL.name, "pipeline"))
        for ours, theirs in zip(got, want, strict=True):
            assert (ours - theirs).norm() <= 2e-3 * theirs.norm(), (L, S)


def hiding(kind: str, heads: int, L: int, S: int, dtype: torch.dtype) -> Tensor:
    """Masks that hide whole blocks: of queries 128 to 255 all, of keys 256 to 383 all."""
    row, key = torch.arange(L, device="cuda")[:, None], torch.arange(S, device="cuda")
    away = (row * S // L - key).abs()
    match kind:
        case "padding":
            shown = key < torch.tensor([S // 3, S - 65], device="cuda")[:, None, None, None]
        case "documents":
            shown = (row * 5 // L == key * 5 // S)[None, None]
        case "heads":
            shown = away < S // 16 * torch.arange(1, heads + 1, device="cuda")[None, :, None, None]
        case _:
            shown = (away < S // 8)[None, None]
    shown = shown & ((key < 256) | (key >= 384))
    if kind != "padding":
        shown = shown & ((row < 128) | (row >= 256))
    return torch.where(shown, 0.5, float("-inf")).to(dtype) if kind == "bias" else shown


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["band", "padding", "documents", "heads", "bias"])
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_hidden_blocks_are_left_out(hopper: None, dims: tuple[int, int], kind: str, p: float, poison_all: None) -> None:
    """The bits of all blocks multiplied, as without room for the marks; and NaN in keys that are hidden from all is not read."""
    for number, (L, S, heads) in enumerate([(1024, 1024, (2, 2)), (777, 1101, (4, 2)), (300, 2000, (6, 2))]):
        dtype = HALVES[number % 2]
        q, k, v = draw(2, heads, L, S, dims, dtype)
        grad = normal(2, heads[0], L, dims[1], dtype=dtype)
        mask = hiding(kind, heads[0], L, S, dtype)
        seed = torch.tensor([7], device="cuda") if p else None
        out, lse = sdpa_forward(q, k, v, mask, seed, p, False, enable_gqa=heads[0] != heads[1])

        def run(key: Tensor, value: Tensor, **options: int) -> list[Tensor]:
            options |= {"enable_gqa": heads[0] != heads[1], "kernel_name": KERNEL.name}  # noqa: B023
            return list(sdpa_backward(grad, None, q, key, value, mask, out, lse, seed, p, False, **options)[:3])  # noqa: B023

        want = run(k, v, workspace_bytes=1)
        hidden = [t.clone() for t in (k, v)]
        for t in hidden:
            t[:, :, 288:384] = float("nan")  # whole blocks of every class
        for got in (run(k, v), run(*hidden)):
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True)), (L, S)
        assert kind == "padding" or not want[0][:, :, 128:256].any()
        assert not want[1][:, :, 256:384].any() and not want[2][:, :, 256:384].any()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_nan_after_the_last_key(hopper: None, dims: tuple[int, int], causal: bool, poison_all: None) -> None:
    lengths, S = (0, 1, 95, 96, 97, 127, 128, 129, 193, 300, 400, -3), 300
    q, k, v = draw(len(lengths), (2, 2), 200, S, dims, torch.float16)
    grad = normal(len(lengths), 2, 200, dims[1], dtype=torch.float16)
    given = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    hidden = torch.arange(S, device="cuda")[:, None] >= given.view(-1, 1, 1, 1)
    found = []
    for name, value in ((KERNEL.name, float("nan")), ("pipeline", 0.0)):
        inputs = (q, k.masked_fill(hidden, value), v.masked_fill(hidden, value))
        out, lse = sdpa_forward(*inputs, None, None, 0.0, causal, key_lengths=given)
        options = {"key_lengths": given, "kernel_name": name}
        found.append(sdpa_backward(grad, None, *inputs, None, out, lse, None, 0.0, causal, **options)[:3])
    for ours, theirs in zip(*found, strict=True):
        assert bool(ours.isfinite().all())
        assert (ours.double() - theirs.double()).norm() <= 2e-3 * theirs.double().norm()
    assert not found[0][1].masked_select(hidden).any() and not found[0][2].masked_select(hidden).any()
