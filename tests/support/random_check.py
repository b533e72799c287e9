"""Checks one random problem: what the operator gives, held to the error rule against float64.

In place of PyTorch's operator stands the plain formula in the call's own dtype. On a GPU an example waits for the card once: inputs
are drawn on the CPU, small oracles stay there, and all results come back together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import error_rule
import kernels
import reference
import torch
import torch.nn.functional as F
from helpers import HALVES, sdpa, sdpa_backward, sdpa_forward, sdpa_with_lse
from random_cases import Case
from random_inputs import NEG_INF, build
from torch import Tensor

ON_THE_GPU = 1 << 22  # multiply-adds of one product; from here on the oracle of a GPU's problem runs there


@dataclass
class Operands:
    """What a call is given, on one device: query, key, value and mask; grad_out; grad_lse; the weights that dropout keeps."""

    inputs: list[Tensor | None]
    grad: Tensor
    grad_lse: Tensor | None
    keep: Tensor | None


def _to(tensor: Tensor | None, device: str) -> Tensor | None:
    """From the CPU to the device, without waiting for it."""
    return None if tensor is None else tensor.to(device, non_blocking=True)


def _fetch(tensors: list[Tensor]) -> list[Tensor]:
    """On the CPU, all in one copy."""
    if all(t.device.type == "cpu" for t in tensors):
        return tensors
    device = next(t.device for t in tensors if t.device.type != "cpu")
    far = [t for t in tensors if t.device == device]
    together = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in far]).cpu()
    parts = iter(together.split([t.nbytes for t in far]))
    return [next(parts).clone().view(t.dtype).view(t.shape) if t.device == device else t for t in tensors]


def _gradients(
    out: Tensor, lse: Tensor | None, wanted: list[Tensor], grad: Tensor, grad_lse: Tensor | None, again: bool = False
) -> list[Tensor]:
    if not wanted:
        return []
    outputs, grads = [out], [grad.to(out.dtype)]
    if grad_lse is not None and lse.requires_grad:
        outputs, grads = [*outputs, lse], [*grads, grad_lse.to(lse.dtype)]
    return list(torch.autograd.grad(outputs, wanted, grads, retain_graph=again, allow_unused=True, materialize_grads=True))


def _formula(case: Case, given: Operands, dtype: torch.dtype | None):
    """The formula in one dtype: out, lse, gradients in the inputs' dtypes, and {}; for dtype None all in float64, and where the
    log-sum-exp has a gradient, the gradients through out alone."""
    exact = dtype is None
    inputs = [t if t is None or t.dtype == torch.bool else t.detach() for t in given.inputs]
    if exact:
        inputs, dtype = [t.double() if t is not None and t.is_floating_point() else t for t in inputs], torch.float64
    differentiable = dict(zip(("query", "key", "value"), inputs, strict=False)) if any(case.needs) else {}
    if case.needs[3]:
        differentiable["attn_mask"] = inputs[3]
    for tensor in differentiable.values():
        tensor.requires_grad_()
    out, lse = reference.attention(
        *inputs, case.causal, case.scale, case.gqa, keep=given.keep, dropout_p=case.dropout_p, dtype=dtype,
        device=given.grad.device, side_by_side=not exact,
    )  # fmt: skip
    wanted, alone = list(differentiable.values()), {}
    if exact and given.grad_lse is not None:
        alone = dict(zip(differentiable, _gradients(out, None, wanted, given.grad, None, again=True), strict=True))
    grads = _gradients(out, lse, wanted, given.grad, given.grad_lse)
    return out.detach(), lse.detach(), dict(zip(differentiable, grads, strict=True)), alone


def _ours(case: Case, given: Operands, seed: Tensor | None):
    """What the operator gives: out, lse or None, gradients."""
    inputs, grad, grad_lse = given.inputs, given.grad, given.grad_lse
    options = {"scale": case.scale, "enable_gqa": case.gqa}
    forced = next((k for k in kernels.KERNELS if k.name == case.op), None)
    inputs = [t.detach().requires_grad_() if n else t for t, n in zip(inputs, case.needs, strict=True)]
    wanted = [t for t, n in zip(inputs, case.needs, strict=True) if n]
    if forced is None:
        if case.op == "sdpa_forward":
            out, lse = sdpa_forward(*inputs, seed, case.dropout_p, case.causal, **options)
        elif case.op == "sdpa_with_lse":
            out, lse = sdpa_with_lse(*inputs, case.dropout_p, case.causal, **options)
        else:
            out, lse = sdpa(*inputs, case.dropout_p, case.causal, **options), None
        assert out.requires_grad == bool(wanted), "requires_grad of the output"
        grads = []
        if wanted:  # a gradient that is missing is an error
            outputs = (out,) if grad_lse is None else (out, lse)
            grads = list(torch.autograd.grad(outputs, wanted, (grad,) if grad_lse is None else (grad, grad_lse.to(lse))))
        return out.detach(), None if lse is None else lse.detach(), grads
    with torch.no_grad():
        name = forced.name if forced.takes(*inputs[:3]) else "auto"
        out, lse = sdpa_forward(*inputs, seed, case.dropout_p, case.causal, kernel_name=name, **options)
        if not wanted:
            return out, lse, []
        grads = sdpa_backward(
            grad, None if grad_lse is None else grad_lse.to(lse), *inputs, out, lse, seed, case.dropout_p, case.causal,
            mask_grad=case.needs[3], kernel_name=forced.backward, **options,
        )  # fmt: skip
    return out, lse, [g for g, n in zip(grads, case.needs, strict=True) if n]


def _single_lse(case: Case, inputs: list[Tensor | None]) -> Tensor:
    """The formula's log-sum-exp in float32, or float64 for that dtype."""
    single = torch.float64 if case.dtype == "float64" else torch.float32
    with torch.no_grad():
        return reference.attention(*inputs, case.causal, case.scale, case.gqa, dtype=single, device=inputs[0].device)[1]


def _check_lse(lse: Tensor, want: Tensor, base: Tensor) -> None:
    single = base.dtype
    assert lse.dtype == single and lse.shape == want.shape, f"lse: {lse.dtype}, shape {tuple(lse.shape)}"
    lse, base = lse.double(), base.double()
    alive = want.isfinite()
    assert torch.equal(lse == NEG_INF, ~alive), "lse: -inf exactly for rows without a visible key"
    limit = 2 * error_rule.errors(base[alive], want[alive])[0] + 16 * torch.finfo(single).eps * max(
        1.0, error_rule.largest(want[alive])
    )
    error = error_rule.errors(lse[alive], want[alive])[0]
    assert error <= limit, f"lse: error {error:.3e}, limit {limit:.3e}"


@dataclass
class Results:
    """name -> ours, float64, the plain formula's; the largest gradient of query, key and value; the inputs and grad_out."""

    triples: dict[str, tuple[Tensor, Tensor, Tensor]]
    among: float
    inputs: list[Tensor | None]
    grad_out: Tensor


def _less_lse_part(triples: dict[str, tuple[Tensor, Tensor, Tensor]], alone: dict[str, Tensor], among: float) -> None:
    """Where the gradient through out alone vanishes by cancellation (one key, say), what came through the log-sum-exp is taken off.

    The kernels put both into one difference, so the rounding is that of the sums which cancel, as for a gradient that vanishes.
    """
    for name, through_out in alone.items():
        entry = f"gradient of {name}"
        if entry in triples and error_rule.largest(through_out) < 1e-6 * among:
            part = triples[entry][1] - through_out
            got, want, base = (t.double() - part for t in triples[entry])
            triples[entry] = got, want, base


def _cancelling(case: Case, given: Operands, out: Tensor) -> float:
    """Size of the terms of which the gradients of query and key are differences: dP - delta, times the other operand.

    The kernels take delta = sum(grad_out * out) from the output as it was stored, in half precision, as FlashAttention does (Dao et
    al. 2022, algorithm 4). Where the difference vanishes (one key), what is left is the rounding of these terms.
    """
    query, key = given.inputs[:2]
    scale = reference.default_scale(case.query[-1]) if case.scale is None else abs(case.scale)
    delta = error_rule.largest((given.grad.double() * out).abs().sum(-1))
    return delta * scale * max(error_rule.largest(query), error_rule.largest(key))


def solve(case: Case, device: str, draw: int = 0) -> Results:
    """Builds the problem and runs it. Asserts what has no rounding: shapes, dtypes, dead rows, memory left alone."""
    dtype = getattr(torch, case.dtype)
    placed, grad_out, grad_lse = build(case, device, draw)
    grad_lse = grad_lse if case.grad_lse and any(case.needs) else None
    *lead, L, S = case.scores
    large = math.prod(case.scores) * max(case.query[-1], case.value[-1]) >= ON_THE_GPU
    where = device if large else "cpu"
    seed = keep = None
    if case.dropout_p > 0.0:
        number = case.seed * 0x9E3779B97F4A7C15 % (1 << 63)
        seed = _to(torch.tensor([number]), device)
        keep = reference.dropout_keep_mask(number, case.dropout_p, math.prod(lead), L, S, device=where).view(case.scores)
    near = Operands([None if p is None else p.view for p in placed], grad_out.view, _to(grad_lse, device), _to(keep, device))
    host = Operands([None if p is None else p.host for p in placed], grad_out.host, grad_lse, keep)
    out, lse, grads = _ours(case, near, seed)  # the card's work, queued, and the CPU's beside it
    base, _, base_grads, _ = _formula(case, near, dtype)
    lses = [] if lse is None else [lse, _single_lse(case, near.inputs)]
    want, want_lse, want_grads, alone = _formula(case, near if large else host, None)
    several = [out, base, want, want_lse, *lses, *grads, *base_grads.values(), *want_grads.values(), *alone.values()]
    fetched = iter(_fetch(several))
    out, base, want, want_lse = (next(fetched) for _ in range(4))
    lses, grads = [next(fetched) for _ in lses], [next(fetched) for _ in grads]
    base_grads, want_grads, alone = ({name: next(fetched) for name in d} for d in (base_grads, want_grads, alone))
    assert out.shape == want.shape, f"out: shape {tuple(out.shape)}, expected {tuple(want.shape)}"
    dead = (want_lse == NEG_INF).unsqueeze(-1)
    assert not out.masked_fill(~dead, 0.0).any(), "out: a row without a visible key is 0"
    if lses:
        _check_lse(lses[0], want_lse, lses[1])
    triples, among = {"out": (out, want, base)}, error_rule.largest(*want_grads.values())
    if device == "cuda" and dtype in HALVES and any(case.needs):
        among = max(among, _cancelling(case, host, want))
    names = [n for n, needed in zip(("query", "key", "value", "attn_mask"), case.needs, strict=True) if needed]
    for name, got in zip(names, grads, strict=True):
        assert got.dtype == base_grads[name].dtype, f"gradient of {name}: dtype {got.dtype}"
        triples[f"gradient of {name}"] = (got, want_grads[name], base_grads[name])
    _less_lse_part(triples, alone, among)
    if device == "cpu" or case.seed % 8 == 0:
        assert all(p.unchanged() for p in (*placed, grad_out) if p is not None), "an input, or memory around it, was written to"
    return Results(triples, among, host.inputs, host.grad)


def judge(case: Case, draws: list[Results]) -> None:
    """The error rule over the numbers of all draws together."""
    among = max(draw.among for draw in draws)
    for name, first in draws[0].triples.items():
        triple = first if len(draws) == 1 else (torch.cat([d.triples[name][i].flatten() for d in draws]) for i in range(3))
        error_rule.check_error(name, *triple, 0.0 if name == "out" else among, getattr(torch, case.dtype))


def judge_beside_pytorch(case: Case, result: Results) -> None:
    """On the CPU sdpa is PyTorch's own operator, whose fused kernels are at times less exact than the formula: the rule with its
    error as the measure, and a bound that no wrong key or value stays within."""
    inputs = [t.detach().requires_grad_() if n else t for t, n in zip(result.inputs, case.needs, strict=True)]
    out = F.scaled_dot_product_attention(*inputs, 0.0, case.causal, scale=case.scale, enable_gqa=case.gqa)
    grads = _gradients(out, None, [t for t, n in zip(inputs, case.needs, strict=True) if n], result.grad_out, None)
    for (name, (got, want, _)), own in zip(result.triples.items(), (out.detach(), *grads), strict=True):
        among = 0.0 if name == "out" else result.among
        error_rule.check_error(name, got, want, own, among, getattr(torch, case.dtype))
        error, bound = error_rule.errors(got, want)[0], 256 * torch.finfo(got.dtype).eps * max(error_rule.largest(want), among)
        assert error <= bound, f"{name}: error {error:.3e}, limit {bound:.3e}"


def check(case: Case, device: str) -> None:
    """Raises AssertionError where a result is wrong.

    The rule compares the largest of a few rounding errors with the largest of a few others. Where one draw fails it, it is put to
    the numbers of eight draws together, and then of 32: of chance that leaves little, of an error all.
    """
    draws = [solve(case, device)]
    try:
        for count in (1, 8, 32):
            draws += [solve(case, device, draw) for draw in range(len(draws), count)]
            try:
                return judge(case, draws)
            except AssertionError:
                if count == 32:
                    raise
    except AssertionError:
        if device == "cuda" or case.op != "sdpa":
            raise
        judge_beside_pytorch(case, draws[0])
