"""sdpa_forward and sdpa_backward, kernel by kernel, against the float64 oracle: out, lse, every gradient, the dropout mask."""

from __future__ import annotations

import error_rule
import pytest
import reference
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
from kernels import KERNELS
from processes import python
from torch import Tensor

FORCED = [k.name for k in KERNELS if k.device == "cuda" and k.takes_everything]
PATHS = [("cpu", "auto"), *(pytest.param(("cuda", k), marks=pytest.mark.gpu) for k in ("auto", *FORCED))]
CASES = {
    "plain": {},
    "lengths": {"L": 5, "S": 33},
    "causal": {"causal": True, "L": 9, "S": 14},
    "causal, L > S": {"causal": True, "L": 14, "S": 9},
    "negative scale": {"causal": True, "scale": -0.7},
    "scale 0": {"scale": 0.0},
    "large scale": {"scale": 3.0},
    "large scores": {"scale": 100.0},
    "lowest finite numbers": {"mask": "lowest"},
    "odd head dims": {"E": 7, "Ev": 13},
    "large head dim": {"E": 320, "Ev": 264, "L": 40},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "same"},
    "float32 mask": {"mask": "float32"},
    "broadcast mask": {"mask": "row"},
    "stride-0 mask": {"mask": "expanded"},
    "grouped": {"heads": (6, 2, 3), "gqa": True},
    "grouped, masked": {"heads": (4, 2), "gqa": True, "mask": "head"},
    "grouped, causal": {"heads": (4, 1), "gqa": True, "causal": True},
    "rank 2": {"batch": (), "heads": ()},
    "rank 3": {"batch": (), "mask": "same"},
    "rank 5": {"batch": (2, 2), "mask": "bool"},
    "one of all": {"batch": (1,), "heads": (1,), "L": 1, "E": 1},
}


def problem(name: str, dtype: torch.dtype, device: str) -> tuple[list[Tensor | None], dict]:
    """[query, key, value, attn_mask], and causal, scale, gqa."""
    case = dict(CASES[name])
    sizes = {n: case[n] for n in ("batch", "heads", "L", "S", "E", "Ev") if n in case}
    q, k, v = qkv(**sizes, dtype=dtype, device=device)
    L, S, heads = q.size(-2), k.size(-2), q.size(-3) if q.dim() > 2 else 1
    keep = torch.rand(L, S) < 0.6
    keep[:, 0], keep[L // 2] = True, False  # one dead row
    mask = {
        "bool": lambda: keep,
        "same": lambda: normal(L, S, dtype=dtype).masked_fill(~keep, float("-inf")),
        "float32": lambda: normal(L, S),
        "lowest": lambda: normal(L, S).masked_fill(~keep, torch.finfo(torch.float32).min),
        "row": lambda: normal(1, S, dtype=dtype),
        "expanded": lambda: normal(1, S, dtype=dtype).expand(*q.shape[:-2], L, S),
        "head": lambda: normal(heads, 1, S, dtype=dtype),
    }.get(case.get("mask"), lambda: None)()
    mask = None if mask is None else mask.to(device)
    return [q, k, v, mask], {"causal": case.get("causal", False), "scale": case.get("scale"), "gqa": case.get("gqa", False)}


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(path: tuple[str, str], name: str, dtype: torch.dtype) -> None:
    error_rule.settle(lambda: forward_and_backward(*path, name, dtype))


def forward_and_backward(device: str, kernel: str, name: str, dtype: torch.dtype) -> None:
    inputs, options = problem(name, dtype, device)
    q, k, v, mask = inputs
    shape = reference.attention(*inputs, *options.values())[0].shape
    grad = normal(*shape, dtype=dtype, device=device)
    want, want_lse, want_grads = oracle_with_grads(inputs, grad, *options.values())
    own, own_grads = torch_own(inputs, grad, want, *options.values())

    rest = {"scale": options["scale"], "enable_gqa": options["gqa"], "kernel_name": kernel}
    out, lse = sdpa_forward(q, k, v, mask, None, 0.0, options["causal"], **rest)
    grads = sdpa_backward(grad, None, *inputs, out, lse, None, 0.0, options["causal"], mask_grad=is_float(mask), **rest)
    error_rule.check_error("out", out, want, own)
    check_lse(lse, want_lse, dtype)
    error_rule.check_gradients(grads, want_grads, own_grads, dtype)
    assert len(grads) == 4 and (is_float(mask) or grads[3].shape == (0,))
    without = sdpa_backward(grad, None, *inputs, out, lse, None, 0.0, options["causal"], **rest)
    assert without[3].shape == (0,)
    if is_float(mask) and (device, kernel) == ("cuda", "auto"):  # another kernel, where the fastest makes no gradient of a mask
        error_rule.check_gradients(without[:3], want_grads, own_grads, dtype)
    else:
        assert all(torch.equal(a, b) for a, b in zip(without[:3], grads[:3], strict=True))


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", [(3,), (4, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(0, 4, 8, 8), (3, 0, 8, 8), (3, 4, 0, 8), (3, 4, 8, 0), (0, 0, 0, 0), (3, 0, 0, 0)], ids=str)
def test_zero_sizes(path: tuple[str, str], sizes: tuple[int, ...], heads: tuple[int, ...], dtype: torch.dtype) -> None:
    device, kernel = path
    L, S, E, Ev = sizes
    for batch in (2, 0):
        inputs = qkv((batch,), heads, L=L, S=S, E=E, Ev=Ev, dtype=dtype, device=device)
        rest = {"enable_gqa": len(heads) > 1, "kernel_name": kernel}
        want, want_lse = reference.attention(*inputs, gqa=rest["enable_gqa"])
        out, lse = sdpa_forward(*inputs, None, None, 0.0, False, **rest)
        close(out, want, 4 * torch.finfo(dtype).eps)
        check_lse(lse, want_lse, dtype)
        grads = sdpa_backward(torch.ones_like(out), None, *inputs, None, out, lse, None, 0.0, False, **rest)
        assert [g.shape for g in grads[:3]] == [t.shape for t in inputs] and all(g.isfinite().all() for g in grads)
        assert S or all((g == 0).all() for g in grads)


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "bool mask", "float mask", "broadcast mask", "grouped, masked", "rank 2"])
@pytest.mark.parametrize("with_out", [False, True])
def test_gradient_of_the_log_sum_exp(path: tuple[str, str], name: str, dtype: torch.dtype, with_out: bool) -> None:
    device, kernel = path
    inputs, options = problem(name, dtype, device)
    doubles = leaves(*(t.detach().cpu().double() if t is not None and t.is_floating_point() else t for t in inputs))
    want, want_lse = reference.attention(*doubles, *options.values())
    grad = normal(*want.shape, dtype=dtype, device=device) * with_out
    grad_lse = normal(*want_lse.shape, dtype=dtype, device=device).masked_fill(want_lse.isinf().to(device), 0.0)
    wanted = [t for t in doubles if t is not None and t.requires_grad]
    total = (want * grad.cpu().double()).sum() + (want_lse.masked_fill(want_lse.isinf(), 0.0) * grad_lse.cpu().double()).sum()
    right = torch.autograd.grad(total, wanted)
    rest = {"scale": options["scale"], "enable_gqa": options["gqa"], "kernel_name": kernel}
    out, lse = sdpa_forward(*inputs, None, 0.0, options["causal"], **rest)
    got = sdpa_backward(grad, grad_lse, *inputs, out, lse, None, 0.0, options["causal"], mask_grad=is_float(inputs[3]), **rest)
    for a, b in zip(got, right, strict=False):
        close(a, b, 32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("device_and_kernel", PATHS, ids=str)
def test_autograd_of_forward(device_and_kernel: tuple[str, str]) -> None:
    """Both outputs carry a gradient, and gradcheck agrees; mask included; grouped heads; leading dims that broadcast."""
    device, kernel = device_and_kernel
    inputs = leaves(*qkv((2,), (4, 2), L=3, S=4, E=3, dtype=torch.float64, device=device))
    mask = normal(4, 1, 4, dtype=torch.float64, device=device).requires_grad_()

    def both(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        return sdpa_forward(q, k, v, m, None, 0.0, False, enable_gqa=True, kernel_name=kernel)

    assert torch.autograd.gradcheck(both, (*inputs, mask))
    k, v = leaves(*(normal(1, 2, 4, 3, dtype=torch.float64, device=device) for _ in range(2)))
    assert torch.autograd.gradcheck(both, (inputs[0], k, v, mask))


def test_double_backward_is_refused(device: str) -> None:
    (q,) = leaves(normal(1, 2, 4, 8, dtype=torch.float64, device=device))
    out, lse = sdpa_forward(q, q, q, None, None, 0.0, False)
    for value in (out, lse):
        (grad,) = torch.autograd.grad(value.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            grad.square().sum().backward()


def test_forward_mode_is_refused(device: str) -> None:
    q = normal(1, 2, 4, 8, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="forward-mode"):
            sdpa_forward(dual, q, q, None, None, 0.0, False)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda t: sdpa_forward(t, q, q, None, None, 0.0, False)[0], (q,), (q,))


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**40 + 3, -1, -(2**63), 2**63 - 1])
def test_dropout_mask(path: tuple[str, str], seed: int, p: float) -> None:
    """V = I shows the weights; a dropped one is exactly 0. Widths that are no multiple of the 4 words of a draw."""
    device, kernel = path
    for batch, heads, L, S in [((2,), (3,), 5, 7), ((), (), 3, 9), ((2, 2), (4, 2), 2, 6)]:
        q, k, _ = qkv(batch, heads, L=L, S=S, device=device)
        eye = torch.eye(S, device=device).expand(*k.shape[:-2], S, S)
        drawn = torch.tensor([seed], device=device)
        gqa = len(heads) > 1
        out, lse = sdpa_forward(q, k, eye, None, drawn, p, False, enable_gqa=gqa, kernel_name=kernel)
        n = q.shape[:-2].numel()
        keep = reference.dropout_keep_mask(seed, p, n, L, S).view(out.shape)
        assert torch.equal(out.cpu() != 0, keep)
        check_lse(lse, reference.attention(q, k, eye, gqa=gqa)[1], torch.float32)


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "bool mask", "float mask", "grouped, masked", "rank 2"])
def test_dropout_against_the_oracle(path: tuple[str, str], name: str, dtype: torch.dtype) -> None:
    device, kernel = path
    inputs, options = problem(name, dtype, device)
    p, seed = 0.3, 123456789012345
    doubles = leaves(*(t.detach().cpu().double() if t is not None and t.is_floating_point() else t for t in inputs))
    n, L, S = inputs[0].shape[:-2].numel(), inputs[0].size(-2), inputs[1].size(-2)
    keep = reference.dropout_keep_mask(seed, p, n, L, S).view(*inputs[0].shape[:-1], S)
    want, _ = reference.attention(*doubles, *options.values(), keep=keep, dropout_p=p)
    grad = normal(*want.shape, dtype=dtype, device=device)
    wanted = [t for t in doubles if t is not None and t.requires_grad]
    right = torch.autograd.grad(want, wanted, grad.cpu().double())
    rest = {"scale": options["scale"], "enable_gqa": options["gqa"], "kernel_name": kernel}
    drawn = torch.tensor([seed], device=device)
    out, lse = sdpa_forward(*inputs, drawn, p, options["causal"], **rest)
    got = sdpa_backward(grad, None, *inputs, out, lse, drawn, p, options["causal"], mask_grad=is_float(inputs[3]), **rest)
    for a, b in zip((out, *got), (want, *right), strict=False):
        close(a, b, 32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("workspace", [1, 1000, 1 << 20])
@pytest.mark.parametrize("name", ["causal", "float mask", "broadcast mask", "grouped, masked"])
def test_slices_of_rows_change_nothing(device: str, name: str, workspace: int) -> None:
    inputs, options = problem(name, torch.float64, device)
    rest = {"scale": options["scale"], "enable_gqa": options["gqa"]}
    results = []
    for bytes_ in (workspace, 134217728):
        out, lse = sdpa_forward(*inputs, None, 0.0, options["causal"], workspace_bytes=bytes_, **rest)
        args = (torch.ones_like(out), None, *inputs, out, lse, None, 0.0, options["causal"])
        results.append((out, lse, *sdpa_backward(*args, mask_grad=is_float(inputs[3]), workspace_bytes=bytes_, **rest)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_memory_is_linear_in_length() -> None:
    """Peak resident memory of a process of its own: one score matrix would be 256 MiB, the workspace is 8 MiB."""
    code = """
import resource, sys, torch, attention_ext
ops = torch.ops.attention_ext
def both(L):
    q = torch.randn(1, 1, L, 8)
    out, lse = ops.sdpa_forward(q, q, q, None, None, 0.0, False, workspace_bytes=8 << 20)
    ops.sdpa_backward(q, None, q, q, q, None, out, lse, None, 0.0, False, workspace_bytes=8 << 20)
both(512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
both(8192)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(grown := python(code)) < 100 * 1024, f"{int(grown) >> 10} MiB"
