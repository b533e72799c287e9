"""Checks random problems: `python tests/randomised.py --device cuda --examples 2000 --json`, or `--case "Case(seed=7, ...)"`.

Results are held to the error rule of reference.py against float64, with the plain formula in the call's own dtype in place of
PyTorch's operator.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass

import kernels
import reference
import torch
import torch.nn.functional as F
from helpers import sdpa, sdpa_backward, sdpa_forward, sdpa_with_lse
from kernels import Kernel
from random_cases import NAN, Case, Layout, build, draw_case
from torch import Tensor

NEG_INF = float("-inf")
ON_THE_GPU = 1 << 22  # multiply-adds of one product; from here on the oracle of a GPU's problem runs there


def _gradients(out: Tensor, lse: Tensor | None, wanted: list[Tensor], grad: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    if not wanted:
        return []
    outputs, grads = [out], [grad.to(out.device, out.dtype)]
    if grad_lse is not None and lse.requires_grad:
        outputs, grads = [*outputs, lse], [*grads, grad_lse.to(lse.device, lse.dtype)]
    return list(torch.autograd.grad(outputs, wanted, grads, allow_unused=True, materialize_grads=True))


def _formula(case: Case, inputs: list[Tensor | None], grad: Tensor, grad_lse: Tensor | None, keep: Tensor | None, dtype, device):
    """The formula in one dtype on one device: out, lse, gradients in the inputs' dtypes, or in float64 for dtype None."""
    exact = dtype is None
    given = [t if t is None or t.dtype == torch.bool else t.detach() for t in inputs]
    if exact:
        given, dtype = [t.double().to(device) if t is not None and t.is_floating_point() else t for t in given], torch.float64
    differentiable = dict(zip(("query", "key", "value"), given, strict=False)) if any(case.needs) else {}
    if case.needs[3]:
        differentiable["attn_mask"] = given[3]
    for tensor in differentiable.values():
        tensor.requires_grad_()
    out, lse = reference.attention(
        *given, case.causal, case.scale, case.gqa, keep=keep, dropout_p=case.dropout_p, dtype=dtype, device=device,
        side_by_side=not exact,
    )  # fmt: skip
    grads = _gradients(out, lse, list(differentiable.values()), grad, grad_lse)
    return out.detach(), lse.detach(), dict(zip(differentiable, grads, strict=True))


def _ours(case: Case, inputs: list[Tensor | None], grad: Tensor, grad_lse: Tensor | None, seed: Tensor | None):
    """What the operator gives: out, lse or None, gradients."""
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


def _check_lse(case: Case, lse: Tensor, want: Tensor, inputs: list[Tensor | None]) -> None:
    single = torch.float64 if case.dtype == "float64" else torch.float32
    with torch.no_grad():
        base = reference.attention(*inputs, case.causal, case.scale, case.gqa, dtype=single, device=lse.device)[1]
    assert lse.dtype == single and lse.shape == want.shape, f"lse: {lse.dtype}, shape {tuple(lse.shape)}"
    lse, want, base = lse.cpu().double(), want.cpu(), base.cpu().double()
    alive = want.isfinite()
    assert torch.equal(lse == NEG_INF, ~alive), "lse: -inf exactly for rows without a visible key"
    limit = 2 * reference.errors(base[alive], want[alive])[0] + 16 * torch.finfo(single).eps * max(
        1.0, reference.largest(want[alive])
    )
    error = reference.errors(lse[alive], want[alive])[0]
    assert error <= limit, f"lse: error {error:.3e}, limit {limit:.3e}"


@dataclass
class Results:
    """name -> ours, float64, the plain formula's; the largest gradient of query, key and value; the inputs and grad_out."""

    triples: dict[str, tuple[Tensor, Tensor, Tensor]]
    among: float
    inputs: list[Tensor | None]
    grad_out: Tensor


def _less_lse_part(
    case: Case, triples: dict, inputs: list[Tensor | None], grad_out: Tensor, keep: Tensor | None, among: float
) -> None:
    """Where the gradient through out alone vanishes by cancellation (one key, say), what came through the log-sum-exp is taken off.

    The kernels put both into one difference, so the rounding is that of the sums which cancel, as for a gradient that vanishes.
    """
    alone = _formula(case, inputs, grad_out, None, keep, None, "cpu")[2]
    for name, through_out in alone.items():
        entry = f"gradient of {name}"
        if entry in triples and reference.largest(through_out) < 1e-6 * among:
            part = triples[entry][1].cpu() - through_out
            triples[entry] = tuple(t.double().cpu() - part for t in triples[entry])


def solve(case: Case, device: str, draw: int = 0) -> Results:
    """Builds the problem and runs it. Asserts what has no rounding: shapes, dtypes, dead rows, memory left alone."""
    dtype = getattr(torch, case.dtype)
    placed, grad_out, grad_lse = build(case, device, draw)
    inputs = [None if p is None else p.view for p in placed]
    grad_lse = grad_lse if case.grad_lse and any(case.needs) else None
    seed = keep = None
    if case.dropout_p > 0.0:
        seed = torch.tensor([case.seed * 0x9E3779B97F4A7C15 % (1 << 63)], device=device)
        *lead, L, S = case.scores
        keep = reference.dropout_keep_mask(int(seed), case.dropout_p, math.prod(lead), L, S).view(case.scores)
    out, lse, grads = _ours(case, inputs, grad_out.view, grad_lse, seed)
    work = math.prod(case.scores) * max(case.query[-1], case.value[-1])
    where = device if work >= ON_THE_GPU else "cpu"
    want, want_lse, want_grads = _formula(case, inputs, grad_out.view, grad_lse, keep, None, where)
    base, _, base_grads = _formula(case, inputs, grad_out.view, grad_lse, keep, dtype, device)
    dead = (want_lse == NEG_INF).to(device)
    assert out.shape == want.shape, f"out: shape {tuple(out.shape)}, expected {tuple(want.shape)}"
    assert not out.masked_fill(~dead.unsqueeze(-1), 0.0).any(), "out: a row without a visible key is 0"
    if lse is not None:
        _check_lse(case, lse, want_lse, inputs)
    triples, among = {"out": (out, want, base)}, reference.largest(*want_grads.values())
    names = [n for n, needed in zip(("query", "key", "value", "attn_mask"), case.needs, strict=True) if needed]
    for name, got in zip(names, grads, strict=True):
        assert got.dtype == base_grads[name].dtype, f"gradient of {name}: dtype {got.dtype}"
        triples[f"gradient of {name}"] = (got, want_grads[name], base_grads[name])
    if grad_lse is not None:
        _less_lse_part(case, triples, inputs, grad_out.view, keep, among)
    if device == "cpu" or case.seed % 8 == 0:
        assert all(p.unchanged() for p in (*placed, grad_out) if p is not None), "an input, or memory around it, was written to"
    return Results(triples, among, inputs, grad_out.view)


def judge(case: Case, draws: list[Results]) -> None:
    """The error rule over the numbers of all draws together."""
    among = max(draw.among for draw in draws)
    for name, first in draws[0].triples.items():
        triple = first if len(draws) == 1 else (torch.cat([d.triples[name][i].flatten() for d in draws]) for i in range(3))
        reference.check_error(name, *triple, 0.0 if name == "out" else among, getattr(torch, case.dtype))


def judge_beside_pytorch(case: Case, result: Results) -> None:
    """On the CPU sdpa is PyTorch's own operator, whose fused kernels are at times less exact than the formula: the rule with its
    error as the measure, and a bound that no wrong key or value stays within."""
    inputs = [t.detach().requires_grad_() if n else t for t, n in zip(result.inputs, case.needs, strict=True)]
    out = F.scaled_dot_product_attention(*inputs, 0.0, case.causal, scale=case.scale, enable_gqa=case.gqa)
    grads = _gradients(out, None, [t for t, n in zip(inputs, case.needs, strict=True) if n], result.grad_out, None)
    for (name, (got, want, _)), own in zip(result.triples.items(), (out.detach(), *grads), strict=True):
        among = 0.0 if name == "out" else result.among
        reference.check_error(name, got, want, own, among, getattr(torch, case.dtype))
        error, bound = reference.errors(got, want)[0], 256 * torch.finfo(got.dtype).eps * max(reference.largest(want), among)
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


def _poison(device: str) -> None:
    """Memory that the next results are made in holds NaN."""
    if device == "cuda":
        held = [torch.full((1 << bits,), NAN, device="cuda") for bits in (*range(7, 22), 24) for _ in range(3)]
        del held


def kernels_of(device: str) -> list[Kernel]:
    return [k for k in kernels.KERNELS if k.device == device and k.runs_here()]


def run_examples(device: str, count: int, first_seed: int = 0) -> dict:
    """Checks the cases of the seeds first_seed to first_seed + count - 1: count that ran, failures, seconds.

    A failure is {"seed", "case", "error"}. An error of the card ends the run, since no later call of the process survives it.
    """
    forced, failures, began, done = kernels_of(device), [], time.perf_counter(), 0
    for seed in range(first_seed, first_seed + count):
        if done % 64 == 0:
            _poison(device)
        case = draw_case(random.Random(seed), forced)
        done += 1
        try:
            check(case, device)
        except Exception as error:  # whatever it is, it belongs to this case
            failures.append({"seed": seed, "case": repr(case), "error": f"{type(error).__name__}: {error}"[:500]})
            if "CUDA error" in str(error):
                break
    if device == "cuda":
        torch.cuda.synchronize()
    names = [kernel.name for kernel in forced]
    seconds = round(time.perf_counter() - began, 1)
    return {"device": device, "count": done, "first_seed": first_seed, "kernels": names, "failures": failures, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--case", help="check this one, given as its repr")
    args = parser.parse_args()
    if args.case:
        check(eval(args.case, {"Case": Case, "Layout": Layout}), args.device)
        print("passed")
        return 0
    outcome = run_examples(args.device, args.examples, args.first_seed)
    if args.json:
        print(json.dumps(outcome, indent=1))
    else:
        for failure in outcome["failures"]:
            print(f"seed {failure['seed']}: {failure['error']}\n  {failure['case']}")
        passed = outcome["count"] - len(outcome["failures"])
        print(f"{passed} of {outcome['count']} examples passed on {args.device} in {outcome['seconds']} s")
    return 1 if outcome["failures"] or outcome["count"] < args.examples else 0


if __name__ == "__main__":
    raise SystemExit(main())
