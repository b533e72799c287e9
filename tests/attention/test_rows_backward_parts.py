"""The backward of sm90_256 where a tile of keys is walked in parts: few keys under many queries, or many query heads a key head."""

from __future__ import annotations

import error_rule
import pytest
import torch
from choice import CAP, Plan
from helpers import HALVES, oracle_with_grads, sdpa_backward, sdpa_forward, torch_own
from kernels import needs_the_card
from row_cases import KERNEL, NAN, draw, hidden, normal, some
from torch import Tensor

OPS = torch.ops.attention_ext
WIDEST = ((64, 64), (128, 128), (192, 192), (256, 256))  # (E, Ev) of each class
DIMS = (*WIDEST, (72, 40), (16, 128), (192, 128), (136, 256))
# Query heads, key heads, L, S, causal: one tile of keys, two of 64, groups that are cut evenly, unevenly, and with their blocks.
CUT = [
    ((3, 3), 2048, 50, False), ((3, 3), 4100, 60, True), ((32, 1), 300, 129, False), ((32, 1), 515, 200, True),
    ((10, 2), 1500, 33, False), ((12, 2), 2048, 64, True), ((3, 1), 8192, 1, False),
]  # fmt: skip


def cost(heads: tuple[int, int], L: int, S: int, causal: bool, E: int, cap: int = CAP, key_heads: int = 64) -> int:
    """Estimated, of the backward."""
    facts = {"N": key_heads * heads[0] // heads[1], "L": L, "S": S, "E": E, "Ev": E, "causal": causal}
    facts |= dict.fromkeys(("key_group", "value_group"), heads[0] // heads[1])
    return Plan(*OPS.plan("backward", [*facts], [*map(int, facts.values())], 90, 132, cap)).costs[1]


@pytest.fixture
def hopper_kernels() -> None:
    if "9.0a" not in OPS.build_info()[3]:
        pytest.skip("this build has no kernels for Hopper")


@pytest.mark.parametrize("E", [64, 128, 192, 256])
@pytest.mark.parametrize(("heads", "L", "S", "causal"), CUT, ids=str)
def test_cut(hopper_kernels: None, heads: tuple[int, int], L: int, S: int, causal: bool, E: int) -> None:
    """Without room nothing is cut, and the estimate is another."""
    assert cost(heads, L, S, causal, E) != cost(heads, L, S, causal, E, cap=0)


@pytest.mark.parametrize("E", [64, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("L", "S"), [(1, 77), (128, 128), (1024, 1024), (2048, 2048), (8192, 8192), (256, 4096)])
def test_not_cut(hopper_kernels: None, L: int, S: int, group: int, E: int) -> None:
    for causal in (False, True):
        assert cost((group, 1), L, S, causal, E) == cost((group, 1), L, S, causal, E, cap=0)


@pytest.mark.parametrize("key_heads", [64, 600, 5000])
def test_cut_only_where_launches_fill_the_card(hopper_kernels: None, key_heads: int) -> None:
    """Two parts of a head: of 66 heads, or of all there are, a launch has a CTA for each SM."""
    L, S, E = 2048, 77, 64
    rows, head = 13 * key_heads * L, 2 * S * 4 * 2 * E
    whole, *some = (
        cost((1, 1), L, S, False, E, cap=rows + held * head, key_heads=key_heads) for held in (0, 1, 63, 65, 66, key_heads)
    )
    if key_heads == 64:
        assert some[:2] == [whole] * 2 and whole not in some[2:]
    else:
        assert some[:3] == [whole] * 3 and whole not in some[3:]
        turns = -(-key_heads // 66)
        assert some[3] - some[4] >= 2 * 2500 * (turns - 1)  # two launches a turn


@pytest.mark.parametrize("E", [64, 128, 192, 256])
def test_keys_that_no_query_sees_cost_their_zeros(hopper_kernels: None, E: int) -> None:
    """No tile's time, but what memory takes for 2 bytes an element."""
    zeros = 64 * (4096 - 256) * 2 * E * 2 / 1950
    assert abs(cost((1, 1), 256, 4096, True, E) - cost((1, 1), 256, 256, True, E) - zeros) < 1000


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    mask: Tensor | None,
    causal: bool,
    p: float = 0.0,
    name: str = KERNEL.name,
    **more,
) -> tuple[Tensor, ...]:
    """Of query, key and value. more: key_lengths, for both; options of the backward."""
    both = {"enable_gqa": q.size(1) != k.size(1), "key_lengths": more.pop("key_lengths", None)}
    seed = torch.tensor([7], device="cuda") if p else None
    out, lse = sdpa_forward(q, k, v, mask, seed, p, causal, kernel_name="auto" if p or mask is not None else name, **both)
    return sdpa_backward(grad, None, q, k, v, mask, out, lse, seed, p, causal, kernel_name=name, **both, **more)[:3]


@pytest.fixture
def hopper() -> None:
    needs_the_card(KERNEL)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_errors(hopper: None, dims: tuple[int, int], poison_all: None) -> None:
    for number, (heads, L, S, causal) in enumerate(CUT):
        dtype, gqa = HALVES[number % 2], heads[0] != heads[1]

        def trial() -> None:
            q, k, v = draw(2, heads, L, S, dims, dtype)  # noqa: B023
            grad = normal(2, heads[0], L, dims[1], dtype=dtype)  # noqa: B023
            inputs = [q, k, v, None]
            want, _, want_grads = oracle_with_grads(inputs, grad, causal, None, gqa)  # noqa: B023
            _, own_grads = torch_own(inputs, grad, want, causal, None, gqa)  # noqa: B023
            error_rule.check_gradients(list(backward(q, k, v, grad, None, causal)), want_grads, own_grads, dtype)  # noqa: B023

        error_rule.settle(trial)


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dims", WIDEST, ids=str)
def test_bits(hopper: None, dims: tuple[int, int], p: float, poison_all: None) -> None:
    """The same again, of a batch row alone, and where the workspace holds the parts of some key heads at a time."""
    for B, heads, L, S, causal in [(34, (4, 4), 1920, 60, False), (24, (32, 1), 384, 129, True), (20, (10, 2), 1920, 64, False)]:
        q, k, v = draw(B, heads, L, S, dims, torch.bfloat16)
        grad = normal(B, heads[0], L, dims[1], dtype=torch.bfloat16)
        want = backward(q, k, v, grad, None, causal, p)
        for _ in range(10):
            assert all(torch.equal(one, other) for one, other in zip(want, backward(q, k, v, grad, None, causal, p), strict=True))
        rows, fill = 13 * B * heads[0] * L, -(-132 // -(-S // (128 if max(dims) <= 128 else 64)))  # of records; parts for 132 SMs
        for parts in (fill + 8, 5 * fill // 4):  # of some of the key heads
            some_at_a_time = backward(q, k, v, grad, None, causal, p, workspace_bytes=rows + parts * S * 4 * sum(dims))
            assert all(torch.equal(one, other) for one, other in zip(want, some_at_a_time, strict=True)), parts
        whole = backward(q, k, v, grad, None, causal, p, workspace_bytes=1)
        too_few = backward(q, k, v, grad, None, causal, p, workspace_bytes=rows + fill // 2 * S * 4 * sum(dims))
        assert all(torch.equal(one, other) for one, other in zip(whole, too_few, strict=True))
        assert torch.equal(whole[0], want[0])
        for one, other in zip(want[1:], whole[1:], strict=True):
            assert (one - other).norm() <= 4e-3 * other.norm()
        if p == 0.0:  # dropout draws by the number of the head
            last = slice(B - 1, B)
            alone = backward(q[last], k[last], v[last], grad[last], None, causal)
            assert all(torch.equal(a[last], b) for a, b in zip(want, alone, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["bool", "hidden blocks", "bias", "float32", "lengths"])
@pytest.mark.parametrize("dims", [*WIDEST, (12, 20)], ids=str)
def test_as_the_pipeline(hopper: None, dims: tuple[int, int], kind: str, p: float, poison_all: None) -> None:
    """Masks, dropout, lengths, rows that see no key; in float32. Rows of 12 and 20 columns lie on 16-byte boundaries."""
    for heads, L, S in [((3, 3), 2050, 60), ((32, 1), 300, 200), ((10, 2), 1100, 50)]:
        pitch = tuple(-(-width // 8) * 8 for width in dims)
        q, k, v = draw(2, heads, L, S, pitch, torch.float16)
        q, k, v, grad = q[..., : dims[0]], k[..., : dims[0]], v[..., : dims[1]], normal(2, heads[0], L, pitch[1], dtype=q.dtype)
        mask, more = None, {}
        match kind:
            case "bool":
                mask = some(L, S)
                mask[:3] = False
            case "hidden blocks":
                mask = hidden(some(2, 1, L, S), L, S)
            case "bias":
                mask = hidden(normal(L, S, dtype=q.dtype), L, S)
            case "float32":
                mask = normal(heads[0], L, S)
            case _:
                more = {"key_lengths": torch.tensor([S - 7, 0], dtype=torch.int32, device="cuda")}
        arguments = (q, k, v, grad[..., : dims[1]], mask, False, p)
        got, want = (backward(*arguments, name=name, wide_grads=True, **more) for name in (KERNEL.name, "pipeline"))
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == torch.float32
            assert (ours - theirs).norm() <= 2e-3 * theirs.norm() + 1e-3, (heads, L, S)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(3, 3), (32, 1)], ids=str)
@pytest.mark.parametrize("dims", [*WIDEST, (72, 40), (12, 20)], ids=str)
def test_keys_that_no_query_sees(hopper: None, dims: tuple[int, int], heads: tuple[int, int], poison_all: None) -> None:
    """Causal, fewer queries than keys: zeros, whatever blocks of keys hold that begin after the last query. Gradients of 12 and 20
    columns have no rows on 16-byte boundaries."""
    pitch = tuple(-(-width // 8) * 8 for width in dims)
    for L, S in ((1, 300), (64, 129), (200, 3000)):
        q, k, v = draw(2, heads, L, S, pitch, torch.bfloat16)
        q, k, v, grad = q[..., : dims[0]], k[..., : dims[0]], v[..., : dims[1]], normal(2, heads[0], L, pitch[1], dtype=q.dtype)
        arguments = (grad[..., : dims[1]], None, True)
        want = [backward(q, k, v, *arguments, wide_grads=wide) for wide in (False, True)]
        for t in (k, v):
            t[:, :, L + 128 :] = NAN
        for number, of in enumerate(want):
            got = backward(q, k, v, *arguments, wide_grads=bool(number))
            assert all(torch.equal(one, other) for one, other in zip(got, of, strict=True)), (L, S, number)
            assert not any(one[:, :, L:].any() for one in got[1:]), (L, S, number)
            # The gradient of the only key that a query sees is 0, as its probability is 1 whatever the score.
            assert all(bool(one[:, :, :L].any()) for one in got[1 if L > 1 else 2 :]), (L, S, number)
