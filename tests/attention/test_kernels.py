"""The contract of each kernel by itself, forced by name: every kernel of kernels.py, with the head dims and dtypes that it takes.

Its backward pass is that of the kernel named there, so that what one leaves for the other (log-sum-exp, dropout) has to fit.
"""

from __future__ import annotations

import error_rule
import pytest
import reference
import torch
from helpers import (
    HALVES,
    check_lse,
    close,
    is_float,
    leaves,
    normal,
    oracle_with_grads,
    qkv,
    sdpa_backward,
    sdpa_forward,
    torch_own,
)
from kernels import KERNELS, Kernel, needs_the_card, params, rows_on_16_bytes, with_contract_dims, with_head_dims
from torch import Tensor

NEG_INF = float("-inf")
# lengths, flags and masks; L and S are no multiples of a tile, several tiles, one row, one key
# scale: in units of 1 / sqrt(E), so the standard deviation of the logits
CASES = {
    "plain": {"L": 70, "S": 133},
    "one row": {"L": 1, "S": 300},
    "one key": {"L": 130, "S": 1},
    "causal": {"L": 129, "S": 129, "causal": True},
    "causal, L < S": {"L": 65, "S": 257, "causal": True},
    "causal, L > S": {"L": 257, "S": 65, "causal": True},
    "scale 0": {"L": 40, "S": 70, "scale": 0.0, "causal": True},
    "negative scale": {"L": 70, "S": 40, "scale": -2.8, "causal": True},
    "long logits": {"L": 40, "S": 133, "scale": 32.0},
    "bool": {"L": 70, "S": 133, "mask": "bool"},
    "same dtype": {"L": 70, "S": 133, "mask": "same"},
    "float32": {"L": 70, "S": 133, "mask": "float32"},
    "by key": {"L": 40, "S": 133, "mask": "key"},
    "by query": {"L": 40, "S": 133, "mask": "query"},
    "by head": {"L": 40, "S": 70, "mask": "head"},
    "by batch": {"L": 40, "S": 70, "mask": "batch"},
    "stride 0": {"L": 70, "S": 133, "mask": "expanded"},
    "transposed": {"L": 70, "S": 133, "mask": "transposed"},
    "dead tiles first": {"L": 70, "S": 300, "mask": "late"},
    "lowest": {"L": 70, "S": 133, "mask": "lowest"},
    "everything dead": {"L": 70, "S": 133, "mask": "none"},
    "grouped": {"L": 70, "S": 133, "heads": (4, 2), "gqa": True},
    "grouped, causal": {"L": 70, "S": 133, "heads": (6, 2), "gqa": True, "causal": True},
    "one key head": {"L": 70, "S": 133, "heads": (6, 1), "gqa": True, "causal": True},
    "grouped, value heads": {"L": 40, "S": 70, "heads": (6, 2, 3), "gqa": True, "mask": "head"},
    "rank 2": {"L": 70, "S": 133, "batch": (), "heads": ()},
    "rank 5": {"L": 33, "S": 70, "batch": (2, 2), "heads": (1,), "mask": "bool"},
    "BLHE": {"L": 70, "S": 133, "BLHE": True, "causal": True},
}
FEW = [n for n in CASES if n in ("plain", "causal, L < S", "bool", "float32", "grouped, causal", "dead tiles first", "BLHE")]


def a_mask(kind: str, dtype: torch.dtype, scores: tuple[int, ...], device: str) -> Tensor:
    """Every row but one sees a key (none: no row does)."""
    *lead, L, S = scores
    keep = torch.rand(L, S) < 0.6
    keep[:, S - 1], keep[L // 2] = True, False
    by_batch = (torch.rand(*lead[:1], 1, L, S) < 0.7).index_fill(-1, torch.tensor([0]), True)
    values = {
        "bool": lambda: keep,
        "same": lambda: normal(L, S, dtype=dtype).masked_fill(~keep, NEG_INF),
        "float32": lambda: normal(L, S).masked_fill(~keep, NEG_INF),
        "key": lambda: normal(1, S, dtype=dtype),
        "query": lambda: keep[:, :1],
        "head": lambda: normal(lead[-1], 1, S, dtype=dtype),
        "batch": lambda: by_batch,
        "expanded": lambda: keep[:, :1],
        "transposed": lambda: normal(S, L, dtype=dtype),
        "late": lambda: keep & (torch.arange(S) >= S - S // 4),
        "lowest": lambda: normal(L, S).masked_fill(~keep, torch.finfo(torch.float32).min),
        "none": lambda: torch.zeros(L, S, dtype=torch.bool),
    }[kind]().to(device)
    return values.expand(scores) if kind == "expanded" else values.mT if kind == "transposed" else values


def problem(kernel: Kernel, name: str, dtype: torch.dtype, E: int, Ev: int) -> tuple[list[Tensor | None], dict]:
    case = dict(CASES[name])
    q, k, v = qkv(case.get("batch", (2,)), case.get("heads", (2,)), case["L"], case["S"], E, Ev, dtype, kernel.device)
    if case.get("BLHE"):
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    if not kernel.takes(q, k, v):
        pytest.skip(f"{kernel.name} does not take such operands")
    mask = a_mask(case["mask"], dtype, (*q.shape[:-1], k.size(-2)), kernel.device) if "mask" in case else None
    scale = case["scale"] / E**0.5 if "scale" in case else None
    return [q, k, v, mask], {"causal": case.get("causal", False), "scale": scale, "gqa": case.get("gqa", False)}


def both(kernel: Kernel, inputs: list[Tensor | None], options: dict, grad: Tensor, seed: Tensor | None = None, p: float = 0.0):
    """out, lse and the four gradients."""
    rest = {"scale": options["scale"], "enable_gqa": options["gqa"]}
    out, lse = sdpa_forward(*inputs, seed, p, options["causal"], kernel_name=kernel.name, **rest)
    rest |= {"mask_grad": is_float(inputs[3]), "kernel_name": kernel.backward}
    return out, lse, sdpa_backward(grad, None, *inputs, out, lse, seed, p, options["causal"], **rest)


def forward_and_backward(kernel: Kernel, name: str, dtype: torch.dtype, E: int, Ev: int) -> None:
    inputs, options = problem(kernel, name, dtype, E, Ev)
    grad = normal(*inputs[0].shape[:-1], Ev, dtype=dtype, device=kernel.device)
    want, want_lse, want_grads = oracle_with_grads(inputs, grad, *options.values())
    own, own_grads = torch_own(inputs, grad, want, *options.values())
    out, lse, grads = both(kernel, inputs, options, grad)
    error_rule.check_error("out", out, want, own)
    check_lse(lse, want_lse, dtype)
    dead = (want_lse == NEG_INF).to(kernel.device)
    assert (out[dead] == 0).all() and (grads[0][dead] == 0).all()
    error_rule.check_gradients(grads, want_grads, own_grads, dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), with_contract_dims())
def test_contract(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, name: str, poison_all: None) -> None:
    needs_the_card(kernel)
    error_rule.settle(lambda: forward_and_backward(kernel, name, dtype, E, Ev))


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), with_head_dims((torch.float32, torch.bfloat16)))
def test_head_dims(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, name: str, poison_all: None) -> None:
    needs_the_card(kernel)
    error_rule.settle(lambda: forward_and_backward(kernel, name, dtype, E, Ev))


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", ["plain", "causal, L < S", "bool", "grouped, causal", "one key head", "rank 5"])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), with_contract_dims((torch.float32, *HALVES), at_most=2))
def test_dropout_is_the_mask_of_philox(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, name: str, p: float) -> None:
    """One mask, whatever kernel draws it: forward and backward against the oracle with that mask."""
    needs_the_card(kernel)

    def trial() -> None:
        inputs, options = problem(kernel, name, dtype, E, Ev)
        q, k = inputs[:2]
        number = int(torch.randint(-(2**63), 2**63 - 1, (1,)))
        seed = torch.tensor([number], device=kernel.device)
        scores = (*q.shape[:-1], k.size(-2))
        keep = reference.dropout_keep_mask(number, p, q.shape[:-2].numel(), *scores[-2:]).view(scores)
        grad = normal(*q.shape[:-1], Ev, dtype=dtype, device=kernel.device)
        results = []
        for of, device in ((torch.float64, "cpu"), (dtype, kernel.device)):
            given = [t.detach().to(device, of) if t is not None and t.is_floating_point() else t for t in inputs]
            given = leaves(*given)
            out, _ = reference.attention(*given, *options.values(), keep=keep, dropout_p=p, dtype=of, device=device)
            wanted = [t for t in given if t is not None and t.requires_grad]
            results.append((out, *torch.autograd.grad(out, wanted, grad.to(device, of), materialize_grads=True)))
        out, _, grads = both(kernel, inputs, options, grad, seed, p)
        (want, *want_grads), (own, *own_grads) = results
        error_rule.check_error("out", out, want, own)
        error_rule.check_gradients(grads, want_grads, own_grads, dtype)

    error_rule.settle(trial)


@pytest.mark.parametrize("kernel", params())
def test_dropout_zeros_lie_where_the_reference_says(kernel: Kernel) -> None:
    """V = I shows the weights, a slice of keys at a time where the kernel takes no Ev as large as S."""
    needs_the_card(kernel)
    dtype, E = kernel.dtypes[-1], min(max(kernel.head_dims[0], 16), 512) + 15 & ~15
    q, k, _ = qkv((2,), (3,), L=33, S=E, E=E, dtype=dtype, device=kernel.device)
    eye = torch.eye(E, dtype=dtype, device=kernel.device).expand(2, 3, E, E)
    out, _ = sdpa_forward(q * 0.1, k, eye, None, torch.tensor([99], device=kernel.device), 0.3, False, kernel_name=kernel.name)
    assert torch.equal(out.cpu() != 0, reference.dropout_keep_mask(99, 0.3, 6, 33, E).view(2, 3, 33, E))


@pytest.mark.parametrize("heads", [(3,), (4, 2)], ids=str)
@pytest.mark.parametrize(("L", "S", "batch"), [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 7, 0)])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), with_contract_dims(HALVES, at_most=1))
def test_empty(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, L: int, S: int, batch: int, heads: tuple[int, ...]) -> None:
    needs_the_card(kernel)
    inputs = [*qkv((batch,), heads, L, S, E, Ev, dtype, kernel.device), None]
    if not kernel.takes(*inputs[:3]):
        pytest.skip(f"{kernel.name} takes no empty dims")
    grad = torch.ones(batch, heads[0], L, Ev, dtype=dtype, device=kernel.device)
    out, lse, grads = both(kernel, inputs, {"causal": False, "scale": None, "gqa": len(heads) > 1}, grad)
    want, want_lse = reference.attention(*inputs, gqa=len(heads) > 1)
    close(out, want)
    check_lse(lse, want_lse, dtype)
    assert [g.shape for g in grads[:3]] == [t.shape for t in inputs[:3]] and all(g.isfinite().all() for g in grads)
    assert (L and S) or all((g == 0).all() for g in grads)


@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "same", "late", "grouped", "dropout"])
@pytest.mark.parametrize("S", [1, 64, 128, 133, 256, 257])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), [row for row in with_head_dims(HALVES) if row.values[2] == 1024])
def test_few_keys_and_many_rows(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, S: int, kind: str) -> None:
    """More row tiles than a card has processors, over keys of one block, of two, and of three: the last columns of Ev as well."""
    needs_the_card(kernel)
    heads = (4, 2) if kind == "grouped" else (3, 3)
    E, Ev = (520, Ev + 264) if S in (64, 256) else (E, Ev)
    batch, L = (10, 280) if kernel.device == "cuda" else (1, 70)  # the reference on the CPU has no tiles

    def trial() -> None:
        q, k, v = qkv((batch,), heads, L, S, E, Ev, dtype, kernel.device)
        mask = a_mask(kind, dtype, (*q.shape[:-1], S), kernel.device) if kind in ("bool", "same", "late") else None
        options = {"causal": kind == "causal", "scale": None, "gqa": kind == "grouped"}
        p, seed, keep = 0.0, None, None
        if kind == "dropout":
            p, seed = 0.3, torch.tensor([5], device=kernel.device)
            keep = reference.dropout_keep_mask(5, p, 3 * batch, L, S).view(batch, 3, L, S)
        out, lse = sdpa_forward(q, k, v, mask, seed, p, options["causal"], enable_gqa=options["gqa"], kernel_name=kernel.name)
        results = []
        for of, device in ((torch.float64, "cpu"), (dtype, kernel.device)):
            results.append(reference.attention(q, k, v, mask, *options.values(), keep=keep, dropout_p=p, dtype=of, device=device))
        (want, want_lse), (own, _) = results
        error_rule.check_error("out", out, want, own)
        check_lse(lse, want_lse, dtype)

    error_rule.settle(trial)


@pytest.mark.parametrize("kind", ["plain", "causal", "grouped, causal"])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), [row for row in with_contract_dims(HALVES) if row.values[0].capability])
def test_many_tiles_and_several_blocks(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, kind: str, poison_all: None) -> None:
    """Two or three tiles of 64 rows for each of an H100's 132 processors, whose CTAs stay, over up to three or four blocks of 128
    keys. Those of 128 and 192 rows have more tiles in test_row_kernels.py."""
    needs_the_card(kernel)
    causal, grouped = "causal" in kind, "grouped" in kind
    heads, L, S = ((10, 2) if grouped else (5, 5)), 421, 300 if dtype == torch.float16 else 400
    # 280 tiles of 64 rows, or 288 of 12 queries with 5 heads each; above 512 two CTAs share the columns of values
    batch = (8 if Ev <= 512 else 4) // (2 if grouped else 1)

    def trial() -> None:
        q, k, v = qkv((batch,), heads, L, S, E, Ev, dtype, kernel.device)
        out, lse = sdpa_forward(q, k, v, None, None, 0.0, causal, enable_gqa=grouped, kernel_name=kernel.name)
        (want, want_lse), (own, _) = (
            reference.attention(q, k, v, None, causal, None, grouped, dtype=of, device=kernel.device)
            for of in (torch.float64, dtype)
        )
        error_rule.check_error("out", out, want, own)
        check_lse(lse, want_lse.cpu(), dtype)

    error_rule.settle(trial)


@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), with_contract_dims(HALVES))
def test_logits_beyond_65504(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int) -> None:
    needs_the_card(kernel)
    q = torch.full((1, 1, 40, E), 250.0, dtype=dtype, device=kernel.device)
    k = q[..., :1, :].repeat(1, 1, 70, 1)
    k[..., ::2, :] = 200.0
    v = normal(1, 1, 70, Ev, dtype=dtype, device=kernel.device)
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, kernel_name=kernel.name)
    close(out, v[..., 1::2, :].double().mean(-2, True).expand(1, 1, 40, Ev), 2 * torch.finfo(dtype).eps)
    check_lse(lse, reference.attention(q, k, v)[1], dtype)


@pytest.mark.parametrize("kernel", params())
def test_bitwise_the_same_again(kernel: Kernel, deterministic: None) -> None:
    needs_the_card(kernel)
    dtype = kernel.dtypes[-1]
    E, Ev = kernel.contract[0]
    inputs, options = problem(kernel, "grouped, causal", dtype, E, Ev)
    grad = normal(*inputs[0].shape[:-1], Ev, dtype=dtype, device=kernel.device)
    first = both(kernel, inputs, options, grad)
    for _ in range(3):
        again = both(kernel, inputs, options, grad)
        assert all(torch.equal(a, b) for a, b in zip((*first[:2], *first[2]), (*again[:2], *again[2]), strict=True))


@pytest.mark.parametrize("kernel", params(tuple(k for k in KERNELS if not k.takes_everything)))
def test_what_it_does_not_take_is_refused(kernel: Kernel) -> None:
    needs_the_card(kernel)
    E = kernel.head_dims[0] + 15 & ~15
    right = qkv(L=40, E=E, dtype=kernel.dtypes[0], device=kernel.device)
    wrong = [[t[..., :8] for t in right], [t.double() for t in right]]
    if kernel.aligned:
        wrong += [[t[..., : E - 1] for t in right], [torch.cat([t, t[..., :1]], -1)[..., 1:] for t in right]]
    assert kernel.takes(*right)
    for tensors in wrong:
        if not kernel.takes(*tensors):
            with pytest.raises(RuntimeError, match=r"^attention_ext: \w+: expected .*, got "):
                sdpa_forward(*tensors, None, None, 0.0, False, kernel_name=kernel.name)


def test_predicates() -> None:
    narrow = Kernel("narrow", "cpu", "reference", HALVES, (), (257, 512), True)
    assert not narrow.takes_everything and all(k.takes_everything for k in KERNELS if k.name in ("reference", "pipeline"))
    assert narrow.takes_sizes(torch.float16, 512, 8) and not narrow.takes_sizes(torch.float16, 256, 256)
    assert not narrow.takes_sizes(torch.float16, 300, 300) and not narrow.takes_sizes(torch.float32, 512, 512)
    q = normal(2, 3, 5, 520, dtype=torch.float16)
    assert not narrow.takes(q, q, q) and narrow.takes(*(q[..., :512],) * 3) and not narrow.takes(*(q[..., 1:505],) * 3)
    assert (
        rows_on_16_bytes(q.transpose(1, 2))
        and not rows_on_16_bytes(q.mT)
        and not rows_on_16_bytes(q[:, :, :1].expand(2, 3, 5, 520))
    )
    assert not rows_on_16_bytes(q[..., :1, :, 3:4][..., 5:6, :])
