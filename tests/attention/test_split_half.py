"""sm90_split_half by name, against float64: no less exact than PyTorch's own in float32, whatever the magnitudes.

What every kernel is asked for, strides and gradients included, is in test_kernels.py and test_key_lengths.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import error_rule
import pytest
import reference
import torch
from helpers import check_lse, sdpa_forward, tf32
from kernels import KERNELS, needs_the_card
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.gpu
KERNEL = next(kernel for kernel in KERNELS if kernel.name == "sm90_split_half")
PYTORCH = torch.nn.functional.scaled_dot_product_attention
NEG_INF, NAN, LOWEST = float("-inf"), float("nan"), torch.finfo(torch.float32).min
DIMS = ((64, 64), (128, 128), (40, 100), (256, 256), (520, 264), (1040, 1100))  # both forms, and each way to split a block
MIB = 1 << 20


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    needs_the_card(KERNEL)
    with tf32(False):
        yield


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def draw(B: int, heads: tuple[int, int], L: int, S: int, dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """query (B, Hq, L, E), key (B, Hk, S, E), value (B, Hk, S, Ev)."""
    (Hq, Hk), (E, Ev) = heads, dims
    return normal(B, Hq, L, E), normal(B, Hk, S, E), normal(B, Hk, S, Ev)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, seed: Tensor | None = None, p: float = 0.0,
    kernel: str = KERNEL.name, **options: Tensor | int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse; heads of the query beyond those of the key are groups."""
    return sdpa_forward(q, k, v, mask, seed, p, causal, enable_gqa=q.size(1) != k.size(1), kernel_name=kernel, **options)


def error(got: Tensor, want: Tensor) -> float:
    """The relative Frobenius norm of the difference."""
    return float((got.double() - want).norm() / want.norm())


def bound(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, want: Tensor) -> float:
    """The larger error of PyTorch's memory-efficient kernel and its formula; where that takes no such call, the error rule's limit.

    Of up to 64 keys or 32 products, which are left to the pipeline unless asked for by name, at least 2^-21: what two terms may
    leave out of weight and value, 2^-22 each.
    """
    least = 2**-21 if min(k.size(-2), q.size(-2) if causal else k.size(-2)) <= 64 or q.size(-1) <= 32 else 0.0
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    backends = [SDPBackend.MATH]
    if q.size(-1) % 4 == v.size(-1) % 4 == 0 and mask is None:
        backends.append(SDPBackend.EFFICIENT_ATTENTION)
    found = []
    for backend in backends:
        with sdpa_kernel(backend):
            out = PYTORCH(q, k, v, attn_mask=mask, is_causal=causal)
        found.append(error(out.nan_to_num(0.0), want))
    if len(found) > 1:
        return max(*found, least)
    top = error_rule.largest(want)
    return max(error_rule.limits((0.0, found[0]), top, error_rule.ulp(torch.float32, top))[1], least)


def hold(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, **options: int) -> None:
    want, want_lse = reference.attention(q, k, v, mask, causal, None, q.size(1) != k.size(1), device="cuda")
    out, lse = forward(q, k, v, mask, causal, **options)
    ours, most = error(out, want), bound(q, k, v, mask, causal, want)
    assert ours <= most, f"{name}: {ours:.2e}, limit {most:.2e}"
    check_lse(lse, want_lse.cpu(), torch.float32)
    assert bool((out[want_lse == NEG_INF] == 0).all()), f"{name}: rows that see no key are not 0"


def powers(*shape: int, low: int, high: int) -> Tensor:
    return torch.exp2(torch.randint(low, high + 1, shape, device="cuda").float())


def column(t: Tensor, factor: float) -> Tensor:
    t = t.clone()
    t[..., 5] *= factor
    return t


def rows(t: Tensor, factor: float) -> Tensor:
    t = t.clone()
    t[..., ::64, :] *= factor
    return t


# What is made of normal query, key, value. The last three are beyond two terms: columns that differ by 2^32 between query and key,
# a key of each block that no score shows, values of which one in 64 is far larger.
KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "normal": lambda q, k, v: (q, k, v),
    "uniform": lambda q, k, v: (torch.rand_like(q), torch.rand_like(k), torch.rand_like(v)),
    "large scores": lambda q, k, v: (10 * q, k, v),
    "larger scores": lambda q, k, v: (100 * q, k, v),
    "tiny": lambda q, k, v: (1e-20 * q, 1e-20 * k, 1e-20 * v),
    "tiny values": lambda q, k, v: (q, k, 1e-30 * v),
    "huge values": lambda q, k, v: (q, k, 1e30 * v),
    "huge query, tiny key": lambda q, k, v: (1e30 * q, 1e-30 * k, v),
    "rows of query": lambda q, k, v: (q * powers(q.size(-2), 1, low=-60, high=3), k, v),
    "an outlier column": lambda q, k, v: (q, column(k, 1000.0), v),
    "columns": lambda q, k, v: (q * (c := powers(q.size(-1), low=-16, high=16)), k / c, v),
    "hidden keys": lambda q, k, v: (column(q, 0.0), column(rows(column(k, 2.0**-18), 2.0**18), 2.0**18), v),
    "rows of value": lambda q, k, v: (q, k, rows(v, 2.0**20)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, dims: tuple[int, int], causal: bool, poison_all: None) -> None:
    hold(kind, *KINDS[kind](*draw(1, (2, 2), 333, 512, dims)), causal=causal)


def test_the_bound_is_none_for_other_schemes() -> None:
    """TF32, one half term and zeros are far beyond it."""
    q, k, v = draw(1, (2, 2), 333, 512, (256, 256))
    want, _ = reference.attention(q, k, v, None, False, None, False, device="cuda")
    limit = bound(q, k, v, None, False, want)
    with tf32(True):
        by_tf32 = torch.softmax(q @ k.mT / 16, -1) @ v
    one_term = PYTORCH(*(t.half().float() for t in (q, k, v)))
    for other in (by_tf32, one_term, torch.zeros_like(want)):
        assert error(other, want) > 100 * limit


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 72), (192, 256), (63, 33), (1, 1)], ids=str)
def test_lengths(dims: tuple[int, int], causal: bool, poison_all: None) -> None:
    for L, S in ((1, 1), (1, 333), (100, 1), (64, 64), (65, 129), (127, 300), (300, 127), (257, 1000)):
        hold(f"{L} x {S}", *draw(2, (3, 3), L, S, dims), causal=causal)


@pytest.mark.parametrize("mebibytes", [1, 2, 4, 24])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (136, 200)], ids=str)
def test_slices(dims: tuple[int, int], heads: tuple[int, int], causal: bool, mebibytes: int, poison_all: None) -> None:
    """Matrices, rows and keys by turns; between slices of keys rows wait in out."""
    for L, S in ((700, 1500), (1500, 1500), (1500, 640)):
        hold(f"{L} x {S}", *draw(2, heads, L, S, dims), causal=causal, workspace_bytes=mebibytes * MIB)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(136, 200), (264, 136)], ids=str)
def test_bits_do_not_depend_on_slices(dims: tuple[int, int], causal: bool, poison_all: None) -> None:
    """Nor on where terms wait: in out, what is not written yet, or, as it is laid out like query, in the workspace alone."""
    q, k, v = draw(2, (3, 3), 700, 900, dims)
    want, want_lse = forward(q, k, v, causal=causal)
    BLHE = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    found = [forward(*BLHE, causal=causal)]
    found += [forward(q, k, v, causal=causal, workspace_bytes=mebibytes * MIB) for mebibytes in (1, 2, 4, 8)]
    assert all(torch.equal(out, want) and torch.equal(lse, want_lse) for out, lse in found)


def lowest(L: int, S: int) -> Tensor:
    """Segments that a row sees only at finfo.min, and a row that sees all keys there."""
    mask = torch.where(torch.rand(L, S, device="cuda") < 0.5, 0.0, LOWEST)
    mask[:, : S // 2] = LOWEST
    mask[11] = LOWEST
    return mask


def with_dead_rows(mask: Tensor) -> Tensor:
    mask[..., 7, :] = False if mask.dtype == torch.bool else NEG_INF
    return mask


MASKS: dict[str, Callable[[int, int], Tensor]] = {
    "bool": lambda L, S: with_dead_rows(torch.rand(2, 1, L, S, device="cuda") < 0.6),
    "bias": lambda L, S: with_dead_rows(normal(2, 3, L, S).masked_fill(torch.rand(L, S, device="cuda") < 0.2, NEG_INF)),
    "of keys": lambda L, S: normal(2, 1, 1, S),
    "off 16 bytes": lambda L, S: normal(L, S + 1)[:, 1:],
    "lowest": lowest,
    "far below": lambda L, S: torch.full((L, S), -(2.0**22), device="cuda") + 3 * normal(L, S),
    "far above": lambda L, S: torch.full((L, S), 2.0**22, device="cuda") + 3 * normal(L, S),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 40), (256, 136)], ids=str)
def test_masks(dims: tuple[int, int], kind: str, poison_all: None) -> None:
    for L, S in ((200, 300), (130, 999)):
        hold(f"{L} x {S}", *draw(2, (3, 3), L, S, dims), MASKS[kind](L, S))


@pytest.mark.parametrize("kind", ["one key", "causal", "mask", "bias"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 40), (256, 136)], ids=str)
def test_a_single_key(dims: tuple[int, int], kind: str, poison_all: None) -> None:
    """Its value, bit by bit."""
    q, k, v = draw(2, (3, 3), 77, 1 if kind == "one key" else 300, dims)
    column = torch.randint(0, k.size(-2), (2, 3, 77, 1), device="cuda")
    mask = None
    if kind in ("mask", "bias"):
        mask = torch.zeros(2, 3, 77, 300, device="cuda", dtype=torch.bool).scatter_(-1, column, True)
        if kind == "bias":
            mask = torch.full_like(mask, NEG_INF, dtype=torch.float32).masked_fill(mask, 1.5)
    out, _ = forward(q, k, v, mask, kind == "causal")
    if kind == "causal":
        assert torch.equal(out[..., 0, :], v[..., 0, :])
    else:
        assert torch.equal(out, v.gather(-2, column.expand(*column.shape[:-1], v.size(-1))))


@pytest.mark.parametrize("dims", [(64, 64), (136, 200)], ids=str)
def test_not_finite(dims: tuple[int, int]) -> None:
    """Such a matrix is what the pipeline makes of it; others are as without."""
    q, k, v = draw(2, (3, 3), 100, 200, dims)
    plain, _ = forward(q, k, v)
    k[0, 1, 3, 5], v[1, 2, 7, 7], q[1, 0, 9, 0] = NAN, float("inf"), float("inf")
    (out, lse), (want, want_lse) = forward(q, k, v), forward(q, k, v, kernel="pipeline")
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert out.isnan().any() and torch.equal(out[0, 0], plain[0, 0]) and torch.equal(out[1, 1], plain[1, 1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (136, 200)], ids=str)
def test_what_lies_behind_a_length_is_not_read(dims: tuple[int, int], causal: bool) -> None:
    q, k, v = draw(3, (2, 2), 200, 300, dims)
    lengths = torch.tensor([77, 300, 0], device="cuda", dtype=torch.int32)
    want = forward(q, k, v, causal=causal, key_lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        k[row, :, length:] = v[row, :, length:] = NAN
    assert all(torch.equal(a, b) for a, b in zip(forward(q, k, v, causal=causal, key_lengths=lengths), want, strict=True))


@pytest.mark.parametrize("E", [64, 200])
def test_dropout(E: int) -> None:
    """The same elements as every kernel, and again in a matrix that is made anew."""
    q, k, seed = normal(2, 3, 33, E), normal(2, 3, E, E), torch.tensor([99], device="cuda")
    eye = torch.eye(E, device="cuda").expand(2, 3, E, E)
    kept = reference.dropout_keep_mask(99, 0.3, 6, 33, E).view(2, 3, 33, E)
    scales = powers(E, low=-16, high=16)
    for query, key in ((q, k), (q * scales, k / scales)):
        out, lse = forward(query, key, eye, seed=seed, p=0.3)
        want, want_lse = forward(query, key, eye)
        assert torch.equal(out.cpu() != 0, kept) and torch.equal(lse, want_lse)
        torch.testing.assert_close(out, torch.where(kept.cuda(), want / 0.7, 0.0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dims", [(128, 128), (512, 512)], ids=str)
def test_repeats(dims: tuple[int, int]) -> None:
    q, k, v = draw(2, (4, 2), 700, 700, dims)
    first = forward(q, k, v, causal=True)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(forward(q, k, v, causal=True), first, strict=True))
