"""KernelBench level 2 problem 84 and its product alone, ours beside PyTorch's with and without TF32: rows of the record.

Times are on the problem's own inputs (x uniform in [0, 1), nn.Linear's and nn.BatchNorm1d's initial parameters), errors on those
and on N(0, 1), on all rows, against float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import attempt, error_rule, extra_memory, log, time_ms
from torch import Tensor

import attention_ext
from attention_ext import _measure

__all__ = ["LINEAR_CASES", "PARTS", "LinearCase", "choose", "measure", "within_rule"]

PARTS = ("train", "eval", "product")
INPUTS = ("own", "normal")


@dataclass(frozen=True)
class LinearCase:
    """input (M, K) to F features, float32."""

    name: str
    M: int
    K: int
    F: int

    @property
    def flop(self) -> float:
        return 2.0 * self.M * self.K * self.F

    def tensors(self, inputs: str) -> dict[str, Tensor]:
        """The arguments of linear_batchnorm_softmax, the same for every run."""
        generator = torch.Generator(common.DEVICE).manual_seed(0)
        normal, uniform = (partial(draw, device=common.DEVICE, generator=generator) for draw in (torch.randn, torch.rand))
        if inputs == "own":
            bound = self.K**-0.5
            weight, bias = ((2 * uniform(size) - 1) * bound for size in ((self.F, self.K), (self.F,)))
            ones, zeros = (torch.full((self.F,), value, device=common.DEVICE) for value in (1.0, 0.0))
            of_bn = {"running_mean": zeros, "running_var": ones, "bn_weight": ones.clone(), "bn_bias": zeros.clone()}
            return {"input": uniform((self.M, self.K)), "weight": weight, "bias": bias, **of_bn, "scale": ones[:1].clone()}
        out = {"input": normal((self.M, self.K)), "weight": normal((self.F, self.K))}
        out |= {name: normal((self.F,)) for name in ("bias", "running_mean", "bn_weight", "bn_bias")}
        return out | {"running_var": self.K * (uniform((self.F,)) + 0.5), "scale": normal((1,))}


LINEAR_CASES = [LinearCase("lin84", 1024, 8192, 8192)]


def choose(names: list[str]) -> tuple[list[LinearCase], list[str]]:
    """The cases of these names ("linear" is all of them), and the names that are none of theirs."""
    known = {case.name for case in LINEAR_CASES} | {"linear"}
    wanted = [case for case in LINEAR_CASES if case.name in names or "linear" in names]
    return wanted, [name for name in names if name not in known]


def _torch(part: str, t: dict[str, Tensor]) -> Tensor:
    """What PyTorch's Model computes; when training it updates the running statistics."""
    x = F.linear(t["input"], t["weight"], t["bias"])
    if part == "product":
        return x
    x = F.batch_norm(x, t["running_mean"], t["running_var"], t["bn_weight"], t["bn_bias"], part == "train")
    return torch.softmax(t["scale"] * x, 1)


def _ours(part: str, t: dict[str, Tensor]) -> Tensor:
    if part == "product":
        return attention_ext.linear_float32(t["input"], t["weight"], t["bias"])
    return attention_ext.linear_batchnorm_softmax(**t, training=part == "train")


def _float64(part: str, t: dict[str, Tensor]) -> Tensor:
    d = {name: tensor.double() for name, tensor in t.items()}
    x = d["input"] @ d["weight"].mT + d["bias"]
    if part == "product":
        return x
    mean, var = (x.mean(0), x.var(0, correction=0)) if part == "train" else (d["running_mean"], d["running_var"])
    return torch.softmax(d["scale"] * ((x - mean) / (var + 1e-5).sqrt() * d["bn_weight"] + d["bn_bias"]), 1)


ROWS: dict[str, tuple[Callable[[str, dict[str, Tensor]], Tensor], bool, bool]] = {  # operator, compiled, TF32 allowed
    "attention_ext": (_ours, False, False),
    "torch": (_torch, False, False),
    "torch_compiled": (_torch, True, False),
    "torch_tf32": (_torch, False, True),
}


def _errors(operator: Callable[[dict[str, Tensor]], Tensor], part: str, tensors: dict[str, Tensor]) -> dict[str, float]:
    """Of a call on copies of the running statistics: a later call must not see them changed."""
    want = _float64(part, tensors)
    copies = {name: tensor.clone() if name.startswith("running") else tensor for name, tensor in tensors.items()}
    frobenius, worst = _measure.row_errors(operator(copies), want)
    return {"relative_frobenius_error": frobenius, "worst_row_error": worst}


def _row(case: LinearCase, part: str, tensors: dict[str, dict[str, Tensor]], name: str) -> dict[str, Any]:
    """Time from rest and, at once, again; rate, errors, extra memory."""
    function, compiled, tf32 = ROWS[name]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        operator = partial(function, part)
        if compiled:
            torch._dynamo.reset()
            operator = torch.compile(operator, dynamic=False)
        errors = {kind: _errors(operator, part, given) for kind, given in tensors.items()}
        call = partial(operator, tensors["own"])
        ms, again = time_ms(call), time_ms(call, rested=False)
        row = {"ms": ms, "ms_second_pass": again, "tflops": case.flop / ms / 1e9, "errors": errors}
        return row | {"extra_bytes": extra_memory(call)}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def within_rule(ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]) -> bool:
    """Every error at most LINEAR times PyTorch's without TF32; False for NaN."""
    return all(ours[kind][error] <= error_rule.LINEAR * limit for kind, errors in theirs.items() for error, limit in errors.items())


def measure(case: LinearCase, part: str, quick: bool = False) -> dict[str, Any]:
    """Ours, PyTorch's without TF32, the same compiled, PyTorch's with TF32; quick: the first two."""
    tensors = {kind: case.tensors(kind) for kind in INPUTS}
    rows: dict[str, Any] = {}
    for name in ("attention_ext", "torch") if quick else ROWS:
        values = rows[name] = attempt(partial(_row, case, part, tensors, name))
        text = f"{values['ms']:9.3f} ms {values['errors']}" if "ms" in values else values["not_available"][:90]
        log(f"{case.name} {part:8} {name:15} {text}")
    ours, theirs = rows["attention_ext"], rows["torch"]
    both = "ms" in ours and "ms" in theirs
    return {
        **{size: getattr(case, size) for size in ("M", "K", "F")},
        "ratio_to_torch": theirs["ms"] / ours["ms"] if both else None,
        "within_rule": both and within_rule(ours["errors"], theirs["errors"]),
        "rows": rows,
    }
