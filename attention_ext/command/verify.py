"""attention-ext verify: errors against float64 on the device at hand, next to those of PyTorch's own operator.

The rule is that of the project's tests: with a and r, the largest absolute difference and the relative Frobenius norm of the
difference to float64, a' and r' those of PyTorch's result, t the largest magnitude and u one unit in the last place of the dtype
at t, it is a <= 2 a' + u and r <= 2 r' + u / t. Of two equally good results one is past that now and then: up to twice the limit,
the majority of three draws decides.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import _measure, explain, sdpa, sdpa_with_lse
from .._libraries import BUILD
from .cases import DTYPES, Case, dtype_name
from .output import Progress, Table, say, say_json
from .timing import reason_of

__all__ = ["run", "share", "show", "spread", "verified"]

WHATS = ("out", "gradient of query", "gradient of key", "gradient of value")
DRAWS = 3
# B, Hq, Hk, L, S, E, Ev, causal, mask ("bool", "bias" or ""); lengths are a quarter of these on a CPU
SPREAD = [
    (1, 4, 4, 512, 512, 64, 64, False, ""),
    (2, 4, 4, 512, 512, 128, 128, True, ""),
    (2, 8, 2, 256, 512, 128, 128, False, ""),
    (1, 4, 4, 512, 512, 256, 256, False, ""),
    (1, 4, 4, 512, 512, 192, 128, True, ""),
    (1, 4, 4, 512, 512, 512, 512, False, ""),
    (2, 8, 2, 512, 512, 512, 512, True, ""),
    (1, 4, 4, 512, 512, 384, 384, False, "bool"),
    (1, 4, 4, 256, 512, 320, 320, False, "bias"),
    (1, 2, 2, 512, 512, 1024, 1024, False, ""),
    (1, 4, 4, 512, 512, 576, 512, True, ""),
    (4, 8, 1, 1, 1024, 512, 512, False, ""),
    (1, 3, 3, 333, 257, 80, 72, False, ""),
]
Attention = Callable[..., Tensor]


def spread(device: torch.device) -> list[tuple[Case, str]]:
    """The calls and their kinds of mask, in every dtype that the device is for."""
    names = ("float16", "bfloat16", "float32") if device.type == "cuda" else tuple(DTYPES)
    part = 1 if device.type == "cuda" else 4
    found = []
    for name in names:
        for B, Hq, Hk, L, S, E, Ev, causal, mask in SPREAD:
            case = Case("", B, Hq, Hk, max(1, L // part), S // part, E, DTYPES[name], causal, Ev)
            found.append((case, mask))
    return found


def _mask(kind: str, case: Case, device: torch.device, seed: int) -> Tensor | None:
    """(L, S); every row sees key 0."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    if kind == "bool":
        mask = torch.rand(case.L, case.S, device=device, generator=generator) < 0.7
        mask[:, 0] = True
        return mask
    return torch.randn(case.L, case.S, device=device, dtype=case.dtype, generator=generator) if kind else None


def _in_float64(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, case: Case) -> Tensor:
    group = case.Hq // case.Hk
    x = (q * case.E**-0.5) @ k.repeat_interleave(group, 1).mT
    if case.causal:
        x = x.masked_fill(torch.ones(case.L, case.S, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    if mask is not None:
        x = x.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else x + mask.double()
    return torch.softmax(x, -1) @ v.repeat_interleave(group, 1)


def _results(attention: Attention, operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and the gradients of query, key and value, on the CPU in float64."""
    out = attention(*operands)
    return [t.detach().cpu().double() for t in (out, *torch.autograd.grad(out, operands, grad))]


def share(ours: tuple[float, float], theirs: tuple[float, float], largest: float, dtype: torch.dtype) -> float:
    """How much of what the rule allows the two errors take: above 1 they break it."""
    info = torch.finfo(dtype)
    unit = info.eps * max(2.0 ** math.floor(math.log2(largest)) if largest else 0.0, info.tiny)
    unit = 1e-13 * largest if dtype == torch.float64 else unit  # where float64 itself rounds as well
    limits = 2 * theirs[0] + unit, 2 * theirs[1] + (unit / largest if largest else math.inf)
    if not all(map(math.isfinite, (*ours, *theirs))):
        return math.inf
    return max((error / limit if limit else math.inf) if error else 0.0 for error, limit in zip(ours, limits, strict=True))


def _draw(case: Case, kind: str, device: torch.device, attention: Attention, seed: int) -> tuple[list[list[float]], float]:
    """([ours, PyTorch's] relative errors of each of WHATS, the largest share) of one draw of the operands."""
    operands = [t.requires_grad_() for t in case.inputs(device, seed)]
    mask = _mask(kind, case, device, seed)
    shape = (*case.shapes[0][:-1], case.Ev)
    grad = torch.randn(shape, device=device, dtype=case.dtype, generator=torch.Generator(device).manual_seed(seed + 2))

    def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **case.options)

    doubles = [t.detach().double().requires_grad_() for t in operands]
    want = _results(lambda q, k, v: _in_float64(q, k, v, mask, case), doubles, grad.double())
    ours = _results(lambda q, k, v: attention(q, k, v, mask, **case.options), operands, grad)
    theirs = _results(by_torch, operands, grad)
    if not all(bool(t.isfinite().all()) for t in theirs):  # which some of its back ends have for some lengths
        with sdpa_kernel(SDPBackend.MATH):
            theirs = _results(by_torch, operands, grad)
    found, largest_share = [], 0.0
    among = max(float(t.abs().max()) for t in want[1:])
    for index, (own, base, right) in enumerate(zip(ours, theirs, want, strict=True)):
        top = max(float(right.abs().max()), among * 1e-6 if index else 0.0)
        errors, others = _measure.errors(own, right), _measure.errors(base, right)
        found.append([errors[1], others[1]])
        largest_share = max(largest_share, share(errors, others, top, case.dtype))
    return found, largest_share


def _with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    return sdpa_with_lse(q, k, v, mask, **options)[0]


def _row(case: Case, kind: str, device: torch.device, operator: str) -> dict[str, Any]:
    attention: Attention = sdpa if operator == "sdpa" else _with_lse
    row: dict[str, Any] = case.record | {"mask": kind, "operator": operator}
    try:
        errors, used = _draw(case, kind, device, attention, 0)
        if 1.0 < used <= 2.0:
            draws = [used, *(_draw(case, kind, device, attention, 10 * i)[1] for i in range(1, DRAWS))]
            used = sorted(draws)[DRAWS // 2]
    except RuntimeError as error:
        return row | {"within": False, "reason": reason_of(error, [])}
    return row | {"within": used <= 1.0, "share": used, "errors": dict(zip(WHATS, errors, strict=True))}


def verified(device: torch.device) -> dict[str, Any]:
    """The record: sdpa in every call, and sdpa_with_lse, which runs this package's own code, where sdpa runs PyTorch's."""
    calls = spread(device)
    rows = []
    with Progress(len(calls)) as progress:
        for case, kind in calls:
            q, k, v = (t.requires_grad_() for t in case.inputs(device))
            kernel = explain(q, k, v, _mask(kind, case, device, 0), **case.options).kernel
            rows.append(_row(case, kind, device, "sdpa") | {"kernel": kernel})
            if kernel.startswith("torch"):
                own = "own kernels" if device.type == "cuda" else "reference"
                rows.append(_row(case, kind, device, "sdpa_with_lse") | {"kernel": own})
            progress.step(f"{dtype_name(case.dtype)}, head dim {case.E}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {"attention_ext": BUILD.version, "csrc": BUILD.csrc, "torch": torch.__version__, "device": name}
    return about | {"passed": all(row["within"] for row in rows), "rows": rows}


def _worst(rows: list[dict[str, Any]], gradients: bool) -> str:
    """The largest relative error of the outputs or the gradients, ours and PyTorch's."""
    whats = WHATS[1:] if gradients else WHATS[:1]
    pairs = [row["errors"][what] for row in rows if "errors" in row for what in whats]
    return "{:.1e} ({:.1e})".format(*(max(own) for own in zip(*pairs, strict=True))) if pairs else "-"


def _table(groups: dict[tuple[str, ...], list[dict[str, Any]]], names: tuple[str, ...]) -> Table:
    table = Table(*names, "output", "gradients", "limit", "", texts=len(names))
    for names, rows in groups.items():
        failed = [row for row in rows if not row["within"]]
        shares = [row["share"] for row in rows if "share" in row]
        verdict = f"{len(failed)} of {len(rows)} failed" if failed else f"{len(rows)} within" if len(rows) > 1 else "within"
        cells = _worst(rows, False), _worst(rows, True), f"{100 * max(shares):.0f} %" if shares else "-"
        reasons = "; ".join({row["reason"] for row in failed if "reason" in row})
        table.add(*names, *cells, f"{verdict}{': ' if reasons else ''}{reasons}", style="bad" if failed else "")
    return table


def show(record: dict[str, Any], every: bool) -> None:
    """The record for a person. every: a row for each call."""
    say(f"attention_ext {record['attention_ext']}, torch {record['torch']}, on {record['device']}")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        key = (row["dtype"], row["operator"]) if not every else (_text(row), row["operator"])
        groups.setdefault(key, []).append(row)
    say()
    _table(groups, ("dtype" if not every else "call", "operator")).print()
    failed = [row for row in record["rows"] if not row["within"]]
    for row in failed if not every else []:
        say(f"failed: {row['operator']} ({row['kernel']}), {_text(row)}: {row.get('reason') or _errors(row)}")
    say()
    say("Largest relative errors against float64, PyTorch's own in brackets.")
    say("limit: how much of it an error takes at most. It is twice the error of PyTorch's result, and one rounding.")
    if record["device"] == "cpu":
        say("On the CPU sdpa is PyTorch's own operator; sdpa_with_lse is this package's reference. The kernels need a GPU.")
    say(f"{len(record['rows']) - len(failed)} passed, {len(failed)} failed")


def _text(row: dict[str, Any]) -> str:
    sizes = ",".join(str(row[name]) for name in ("B", "Hq", "Hk", "L", "S", "E", "Ev"))
    mask = {"bool": ", bool mask", "bias": ", float mask", "": ""}[row["mask"]]
    return f"{sizes} {row['dtype']}{', causal' * row['causal']}{mask}"


def _errors(row: dict[str, Any]) -> str:
    return ", ".join(f"{what} {ours:.1e} (PyTorch {theirs:.1e})" for what, (ours, theirs) in row["errors"].items())


def run(args: argparse.Namespace) -> int:
    record = verified(args.device)
    if args.json:
        say_json(record)
    else:
        show(record, args.all)
    return 0 if record["passed"] else 1
