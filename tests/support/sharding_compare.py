"""Calls on DTensors beside the same calls on plain tensors: values, gradients, placements and communication.

Placements are written as one letter a mesh dim: a digit for Shard, R and P for Replicate and Partial; those of several tensors
stand side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from helpers import close, normal
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

CHECKS: dict[str, Callable[[str], None]] = {}  # what every rank runs, given the type of device


def check(function: Callable[[str], None]) -> Callable[[str], None]:
    CHECKS[function.__name__] = function
    return function


def placements(letters: str) -> list[Placement]:
    return [{"R": Replicate(), "P": Partial()}.get(letter) or Shard(int(letter)) for letter in letters]


def scatter(mesh: DeviceMesh, arguments: Sequence[object], letters: str) -> list[object]:
    """The tensors among the arguments as DTensors, leaves that require grad where the tensors do."""
    each = iter(letters.split())

    def scattered(t: object) -> object:
        if not isinstance(t, Tensor):
            return t
        return distribute_tensor(t.detach(), mesh, placements(next(each))).requires_grad_(t.requires_grad)

    return [scattered(t) for t in arguments]


def same(what: str, got: object, want: Tensor, letters: str | None = None) -> None:
    """got is a DTensor of these placements, and what all ranks hold of it is `want`."""
    assert isinstance(got, DTensor), f"{what}: {type(got)}"
    assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{what}: {got.shape}, {got.dtype}"
    assert letters is None or list(got.placements) == placements(letters), f"{what}: {got.placements} instead of {letters}"
    full = got.full_tensor()
    close(full, want) if want.is_floating_point() else torch.testing.assert_close(full, want)


def tensors(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def no_communication(counted: CommDebugMode) -> None:
    assert counted.get_total_counts() == 0, f"communication: {dict(counted.get_comm_counts())}"


def compare_gradients(mesh, outs: list[Tensor], wants: list[Tensor], leaves: list, plain: list, letters: str | None) -> None:
    pairs = [(out, want) for out, want in zip(outs, wants, strict=True) if want.requires_grad]
    cotangents = [normal(*want.shape, dtype=want.dtype, device=str(want.device)) for _, want in pairs]
    right = torch.autograd.grad([want for _, want in pairs], plain, cotangents)
    incoming = [
        distribute_tensor(c, mesh, [Replicate() if p.is_partial() else p for p in out.placements])
        for c, (out, _) in zip(cotangents, pairs, strict=True)
    ]
    with CommDebugMode() as counted:
        got = torch.autograd.grad([out for out, _ in pairs], leaves, incoming)
    if letters is not None:
        no_communication(counted)
    each = [None] * len(right) if letters is None else letters.split()
    for number, (gradient, want, of_this) in enumerate(zip(got, right, each, strict=True)):
        same(f"gradient {number}", gradient, want, of_this)


def compare(
    mesh: DeviceMesh, op, arguments: Sequence[object], given: str, made: str | None = None, grads: str | None = None, **options
) -> None:
    """op on DTensors against op on plain tensors, in inference mode too, and the gradients of the tensors that require one.

    given, made, grads: placements of arguments, outputs and gradients. Where made or grads are given, nothing may be communicated;
    where they are None, any placement will do.
    """
    want = tensors(op(*arguments, **options))
    sharded = scatter(mesh, arguments, given)
    with CommDebugMode() as counted:
        got = tensors(op(*sharded, **options))
        with torch.inference_mode():
            again = tensors(op(*sharded, **options))
    if made is not None:
        no_communication(counted)
    each = [None] * len(want) if made is None else made.split()
    for number, (first, second, right, letters) in enumerate(zip(got, again, want, each, strict=True)):
        same(f"output {number}", first, right, letters)
        same(f"output {number} in inference mode", second, right, letters)
    wanted = [number for number, t in enumerate(arguments) if isinstance(t, Tensor) and t.requires_grad]
    if wanted:
        compare_gradients(mesh, got, want, [sharded[i] for i in wanted], [arguments[i] for i in wanted], grads)
