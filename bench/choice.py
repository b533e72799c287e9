"""How good the choice of a kernel is: what csrc/plan is told of a shape, and how far the chosen kernel is from the fastest one."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from cases import BOOL_MASKS, Case

__all__ = ["CAP", "WITHIN", "Plan", "choice_summary", "facts", "planned"]

WITHIN = 1.05  # times the best of the kernels that take the shape, for a choice to count as right
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}  # DataType of csrc/core/tensors.h
BOOL, SAME_AS_QUERY = 1, 2  # MaskType
CAP = 128 << 20  # bytes of workspace, the operators' default


class Plan(NamedTuple):
    """refusals, costs: of every kernel of the table, in its order; a refusal is empty where there is none, a cost is in ns."""

    kernel: str
    reason: str
    workspace: int
    preferred: bool
    refusals: list[str]
    costs: list[int]


def facts(case: Case) -> dict[str, int]:
    """The problem of csrc/plan/problem.h, with contiguous tensors as Case makes them."""
    # One key head for all is a broadcast, but in half types where rows are so few that keys are split (plan/key_pieces.h).
    few = case.L * case.Hq <= (64 if max(case.E, case.Ev) <= 256 else 32) and case.dtype.itemsize == 2
    few = few and case.S > 512 and not case.causal  # few causal rows see few keys
    group = 1 if case.Hk == 1 and not few else case.Hq // case.Hk
    found = {"N": case.B * case.Hq, "L": case.L, "S": case.S, "E": case.E, "Ev": case.Ev, "key_group": group, "value_group": group}
    found |= {"batch_dims": 2 if case.mask or case.Hk == 1 < min(case.B, case.Hq) else 1, "type": TYPES[case.dtype]}
    if case.mask:
        found |= {"mask": BOOL if case.mask in BOOL_MASKS else SAME_AS_QUERY}
        found |= {"mask_rows": case.mask not in ("pad", "keybias") and case.L > 1}  # of a dim of 1 the stride is 0
    for operand, width, heads in (("query", case.E, case.Hq), ("key", case.E, case.Hk), ("value", case.Ev, case.Hk)):
        row = width * case.dtype.itemsize
        found |= {f"{operand}.row_alignment": min(row & -row, 128), f"{operand}.matrices": case.B * heads}
    return found | {"causal": case.causal}


def planned(
    case: Case, capability: int = 90, sms: int = 132, cap: int = CAP, table: str = "forward", mask_grad: bool = False
) -> Plan:
    """What the plan says on a card that need not be there; table: "forward" or "backward"; mask_grad: it makes the mask's too."""
    given = facts(case) | {"mask_grad": mask_grad}
    values = [int(value) for value in given.values()]
    return Plan(*torch.ops.attention_ext.plan(table, list(given), values, capability, sms, cap))


def choice_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of rows with "kernel", the chosen one, and "kernels", the ms of each that takes the shape."""
    compared = [row for row in rows if row.get("kernel") in row.get("kernels", ())]
    ratios = {row["name"]: row["kernels"][row["kernel"]] / min(row["kernels"].values()) for row in compared}
    beyond = [row for row in compared if ratios[row["name"]] > WITHIN]
    return {
        "compared": len(compared),
        "within_5_percent": len(compared) - len(beyond),
        "worst": max(ratios.values(), default=None),
        "geometric_mean": statistics.geometric_mean(ratios.values()) if ratios else None,
        "beyond": [
            {"name": row["name"], "chosen": row["kernel"], "best": min(row["kernels"], key=row["kernels"].get)}
            | {"ratio": ratios[row["name"]]}
            for row in sorted(beyond, key=lambda row: -ratios[row["name"]])
        ],
    }
