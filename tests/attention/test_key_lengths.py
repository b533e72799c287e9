"""key_lengths: a batch row sees its first keys only, as under a bool mask of the same meaning, whatever lies after them."""

from __future__ import annotations

from contextlib import nullcontext

import error_rule
import pytest
import torch
from helpers import (
    FLOATS,
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
from kernels import FACTS, Kernel, params, with_contract_dims
from refusals import FAKE_DEVICES, refuses
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

NEG_INF, NAN = float("-inf"), float("nan")
LENGTHS = (
    0,
    1,
    37,
    129,
    256,
    299,
    300,
    1000,
    -3,
)  # of batch rows of 300 keys: odd, whole tiles, all, more than all, less than none
CASES = {
    "plain": {"L": 70},
    "one row": {"L": 1},
    "causal": {"L": 300, "causal": True},
    "causal, L < S": {"L": 65, "causal": True},
    "causal, L > S": {"L": 333, "causal": True},
    "bool": {"L": 70, "mask": "bool"},
    "bias": {"L": 70, "mask": "bias"},
    "bias by key": {"L": 33, "mask": "key"},
    "float32 bias": {"L": 33, "mask": "float32"},
    "dropout": {"L": 70, "p": 0.3},
    "dropout, causal": {"L": 131, "p": 0.3, "causal": True},
    "dropout, bool": {"L": 70, "p": 0.3, "mask": "bool"},
    "grouped": {"L": 40, "heads": (6, 2)},
    "grouped, causal": {"L": 133, "heads": (6, 2), "causal": True},
    "grouped, bias": {"L": 40, "heads": (6, 2), "mask": "bias"},
    "negative scale": {"L": 40, "scale": -0.5},
    "slices": {"L": 200, "cap": 1 << 19},
    "slices, grouped, bias": {"L": 200, "heads": (4, 2), "mask": "bias", "cap": 1 << 19},
    "two leading dims": {"L": 33, "batch": (3, 3), "heads": (1,)},
    "columns in passes": {"L": 200, "S": 201, "heads": (3,)},  # of values, by the kernels that take them so
    "BLHE": {"L": 70, "BLHE": True},
}
MASKED = [name for name, case in CASES.items() if "mask" in case]
UNMASKED = [name for name, case in CASES.items() if "mask" not in case and "p" not in case]


class Problem:
    """One of CASES on a kernel's device, and what its arguments are by position and by name."""

    def __init__(self, kernel: Kernel, name: str, dtype: torch.dtype, E: int, Ev: int) -> None:
        if not kernel.runs_here():
            pytest.skip(f"{kernel.name} needs compute capability {kernel.capability}")
        case = CASES[name]
        self.kernel, self.causal, self.p = kernel, case.get("causal", False), case.get("p", 0.0)
        batch, heads, L, S = case.get("batch", (9,)), case.get("heads", (2,)), case["L"], case.get("S", 300)
        q, k, v = qkv(batch, heads, L, S, E, Ev, dtype, kernel.device)
        if case.get("BLHE"):
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        if not kernel.takes(q, k, v):
            pytest.skip(f"{kernel.name} does not take such operands")
        self.operands = (q, k, v)
        self.gqa, self.scale, self.cap = len(heads) > 1, case.get("scale"), case.get("cap", 1 << 27)
        keep = (torch.rand(L, S) < 0.6).to(kernel.device)
        self.mask = {
            "bool": lambda: keep,
            "bias": lambda: normal(L, S, dtype=dtype, device=kernel.device).masked_fill(~keep, NEG_INF),
            "key": lambda: normal(1, S, dtype=dtype, device=kernel.device),
            "float32": lambda: normal(L, S, device=kernel.device),
            None: lambda: None,
        }[case.get("mask")]()
        self.seed = torch.tensor([1234], device=kernel.device) if self.p else None
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=kernel.device)
        seen = torch.arange(S) < torch.tensor(LENGTHS).view(*batch, 1, 1, 1)
        self.seen = seen.to(kernel.device)  # (*batch, 1, 1, S)
        self.grad_out = normal(*q.shape[:-1], Ev, dtype=dtype, device=kernel.device)

    def options(self, **more) -> dict:
        return {"scale": self.scale, "enable_gqa": self.gqa, "workspace_bytes": self.cap, **more}

    def results(self, operands=None, mask=None, causal=None, key_lengths=None, backward=None) -> list[Tensor]:
        """out, lse, the gradients of query, key and value, and that of a mask that is added, by the backward of a name."""
        mask = self.mask if mask is None else mask
        causal = self.causal if causal is None else causal
        arguments = (*(self.operands if operands is None else operands), mask)
        rest = (self.seed, self.p, causal)
        options = self.options(key_lengths=key_lengths)
        out, lse = sdpa_forward(*arguments, *rest, kernel_name=self.kernel.name, **options)
        options |= {"mask_grad": is_float(mask), "kernel_name": backward or self.kernel.backward}
        return [out, lse, *sdpa_backward(self.grad_out, None, *arguments, out, lse, *rest, **options)]

    def as_mask(self) -> Tensor:
        """The mask and the lengths in one."""
        if is_float(self.mask):
            return self.mask.masked_fill(~self.seen, NEG_INF)
        visible = self.seen if self.mask is None else self.seen & self.mask
        L, S = self.operands[0].size(-2), self.seen.size(-1)
        return visible & torch.ones(L, S, dtype=torch.bool, device=visible.device).tril() if self.causal else visible


def with_backwards() -> list:
    """(kernel, dtype, E, Ev, backward) for the head dims of a kernel's contract and each backward for Hopper that takes them.

    By name, as "auto" may choose two kernels for two calls, with bits of their own: its estimate of a mask's gradient counts the
    mask's matrices, and a mask with the lengths in it has one for each batch row.
    """
    rows = []
    for row in with_contract_dims():
        kernel, _, E, Ev = row.values
        fits = max(E, Ev) <= FACTS["sm90_256"]["head_dims"][1]
        names = ["sm90_256"] * fits + ["sm90_pipeline"] if kernel.aligned else [kernel.backward]
        rows += [pytest.param(*row.values, name, id=f"{row.id}-{name}", marks=row.marks) for name in names]
    return rows


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev", "backward"), with_backwards())
def test_same_bits_as_a_mask(
    kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, backward: str, name: str, poison_all: None
) -> None:
    """Next to a mask the kernels do the same with either, but for what they leave out."""
    problem = Problem(kernel, name, dtype, E, Ev)
    *got, mask_grad = problem.results(key_lengths=problem.lengths, backward=backward)
    *want, own_mask_grad = problem.results(mask=problem.as_mask(), backward=backward)
    for number, (left, right) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(left, right), f"result {number}"
    if is_float(problem.mask):  # that of the mask with the lengths in it is as large as they make it
        close(mask_grad, own_mask_grad.double().sum_to_size(mask_grad.shape), 64 * torch.finfo(mask_grad.dtype).eps)


@pytest.mark.parametrize("name", UNMASKED)
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), with_contract_dims())
def test_as_right_as_pytorch(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, name: str, poison_all: None) -> None:
    def trial() -> None:
        problem = Problem(kernel, name, dtype, E, Ev)
        inputs = [*problem.operands, problem.as_mask()]
        want, want_lse, want_grads = oracle_with_grads(
            [t.cpu() for t in inputs], problem.grad_out, False, problem.scale, problem.gqa
        )
        own, own_grads = torch_own(inputs, problem.grad_out, want, False, problem.scale, problem.gqa)
        out, lse, *grads, _ = problem.results(key_lengths=problem.lengths)
        error_rule.check_error("out", out, want, own)
        check_lse(lse, want_lse, dtype)
        dead = (want_lse == NEG_INF).to(kernel.device)
        assert dead.any() and (out[dead] == 0).all() and (grads[0][dead] == 0).all()
        unseen = ~problem.seen.mT
        assert all((grad.masked_select(unseen) == 0).all() for grad in grads[1:])
        among = error_rule.largest(*want_grads)
        for argument, got, right, base in zip(("query", "key", "value"), grads, want_grads, own_grads, strict=True):
            error_rule.check_error(f"gradient of {argument}", got, right, base, among, dtype)

    error_rule.settle(trial)


@pytest.mark.each_value
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev", "backward"), with_backwards())
def test_nothing_after_the_length_shows(
    kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, backward: str, name: str, poison_all: None
) -> None:
    problem = Problem(kernel, name, dtype, E, Ev)
    query, *keys = problem.operands
    clean = problem.results(key_lengths=problem.lengths, backward=backward)
    poisoned = [t.masked_fill(~problem.seen.mT, NAN) for t in keys]
    mask = problem.mask.masked_fill(~problem.seen, NAN) if is_float(problem.mask) else None
    got = problem.results(operands=(query, *poisoned), mask=mask, key_lengths=problem.lengths, backward=backward)
    for number, (left, right) in enumerate(zip(got[:5], clean, strict=False)):
        assert torch.equal(left, right), f"result {number}"
    assert all(t.isfinite().all() for t in (got[0], *got[2:]))


@pytest.mark.parametrize("name", ["dropout", "dropout, causal"])
@pytest.mark.parametrize(("kernel", "dtype", "E", "Ev"), with_contract_dims(at_most=1))
def test_dropout_drops_what_it_drops_without_lengths(kernel: Kernel, dtype: torch.dtype, E: int, Ev: int, name: str) -> None:
    """The weights that are kept have the indices that they have in the whole: out is that of a mask, but for rounding."""
    problem = Problem(kernel, name, dtype, E, Ev)
    got = problem.results(key_lengths=problem.lengths)
    want = problem.results(mask=problem.as_mask(), causal=False)
    for left, right in zip(got[:5], want, strict=False):
        alive = right.isfinite()
        assert torch.equal(left.isfinite(), alive)
        limit = 8 * torch.finfo(dtype).eps * error_rule.largest(right[alive])
        torch.testing.assert_close(left[alive], right[alive], rtol=0.0, atol=limit)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [p for p in params() if "pipeline" in p.id or p.id == "reference"])
def test_lengths_of_all_keys_change_no_bit(kernel: Kernel, causal: bool) -> None:
    problem = Problem(kernel, "causal" if causal else "plain", torch.float16, 64, 64)
    got = problem.results(key_lengths=torch.full_like(problem.lengths, 300))
    for left, right in zip(got, problem.results(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kernel", params())
def test_gradient(kernel: Kernel) -> None:
    """sdpa_forward hands the lengths on to sdpa_backward."""
    problem = Problem(kernel, "bias", torch.float16, 64, 64)
    inputs = leaves(*problem.operands, problem.mask)
    options = problem.options(key_lengths=problem.lengths, kernel_name=kernel.name)
    out, lse = sdpa_forward(*inputs, None, 0.0, False, **options)
    grads = torch.autograd.grad(out, inputs, problem.grad_out)
    for left, right in zip((out, lse, *grads), problem.results(key_lengths=problem.lengths), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("shape", [(), (4,), (2, 4), (3, 2, 4)], ids=str)
def test_batch_rows_are_the_dims_before_the_heads(device: str, shape: tuple[int, ...]) -> None:
    q, k, v = (normal(*shape, 9, 8, device=device) for _ in range(3))
    rows = torch.arange(3, 3 + q.shape[:-3].numel(), dtype=torch.int32, device=device)
    out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, key_lengths=rows)
    seen = torch.arange(9, device=device) < rows.view(*shape[:-1], *(1,) * len(shape[-1:]), 1, 1)
    want, want_lse = sdpa_forward(q, k, v, seen, None, 0.0, False)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


REFUSED = {
    "int64": (lambda device: torch.ones(2, dtype=torch.int64, device=device), "torch.int64"),
    "float": (lambda device: torch.ones(2, device=device), "torch.float32"),
    "too many": (lambda device: torch.ones(3, dtype=torch.int32, device=device), "shape (3,)"),
    "one for all": (lambda device: torch.ones(1, dtype=torch.int32, device=device), "shape (1,)"),
    "rank 0": (lambda device: torch.ones((), dtype=torch.int32, device=device), "shape ()"),
    "rank 2": (lambda device: torch.ones(2, 1, dtype=torch.int32, device=device), "shape (2, 1)"),
    "strided": (lambda device: torch.ones(4, dtype=torch.int32, device=device)[::2], "stride 2"),
    "device": (lambda device: torch.ones(2, dtype=torch.int32, device="meta"), "meta"),
}


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("device", FAKE_DEVICES)
@pytest.mark.parametrize("case", REFUSED)
def test_refused(device: str, case: str, fake: bool) -> None:
    if device == "cuda" and not fake and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    make, came = REFUSED[case]
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        q, k, v = (torch.ones(2, 3, 5, 8, device=device) for _ in range(3))
        lengths, lse = make(device), torch.ones(2, 3, 5, device=device)
        for call in (
            lambda: sdpa_forward(q, k, v, None, None, 0.0, False, key_lengths=lengths),
            lambda: sdpa_backward(q, None, q, k, v, None, q, lse, None, 0.0, False, key_lengths=lengths),
        ):
            with pytest.raises(RuntimeError, match=r"key_lengths: expected ") as caught:
                call()
            assert came in str(caught.value)


@pytest.mark.parametrize("device", FAKE_DEVICES)
def test_fake_results(device: str) -> None:
    with FakeTensorMode():
        q, k, v = (torch.ones(2, 3, 5, 8, device=device) for _ in range(3))
        lengths = torch.ones(2, dtype=torch.int32, device=device)
        out, lse = sdpa_forward(q, k, v, None, None, 0.0, False, key_lengths=lengths)
        grads = sdpa_backward(q, None, q, k, v, None, out, lse, None, 0.0, False, key_lengths=lengths)
    assert [tuple(t.shape) for t in (out, lse, *grads[:3])] == [(2, 3, 5, 8), (2, 3, 5), *[(2, 3, 5, 8)] * 3]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_refused_by_the_kernel(dtype: torch.dtype) -> None:
    """In inference mode the kernels check for themselves."""
    q = torch.ones(2, 3, 5, 8, dtype=dtype, device="cuda")
    with torch.inference_mode():
        for case, (make, _) in REFUSED.items():
            lengths = make("cuda") if case != "device" else torch.ones(2, dtype=torch.int32)
            refuses("key_lengths", lambda given=lengths: sdpa_forward(q, q, q, None, None, 0.0, False, key_lengths=given))
