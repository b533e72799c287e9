"""The kernels that kernel_name can force, and what each takes.

A kernel of the table (kernel_names) with a row of FACTS goes through every forced-kernel test and, on a card, the sanitizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from helpers import FLOATS, HALVES
from kernel_names import kernel_names
from torch import Tensor


def rows_on_16_bytes(tensor: Tensor) -> bool:
    """Columns adjacent, and every row of every matrix begins on a 16-byte boundary of its own."""
    size = tensor.element_size()
    if tensor.size(-2) > 1 and tensor.stride(-2) == 0:
        return False
    strides = [s * size for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    adjacent = tensor.size(-1) > 1 and tensor.stride(-1) == 1
    return adjacent and all(s % 16 == 0 for s in (*strides, tensor.data_ptr()))


@dataclass(frozen=True)
class Kernel:
    """name: for kernel_name. device: its device type. backward: the kernel_name of its gradient.

    capability: the compute capabilities it runs on, 10 * major + minor, empty for all. head_dims: what max(E, Ev) may be, both
    ends included. aligned: query, key and value need their rows on 16-byte boundaries. value_heads: key and value may have
    different head counts; where not, group is how many query heads may share a key head. rank: the largest that it takes.
    empty: whether a dim may be 0. contract: (E, Ev) of the tests of all that it takes, the widest first. sanitized: those of
    scripts/sanitizer_subset.py.
    """

    name: str
    device: str
    backward: str
    dtypes: tuple[torch.dtype, ...] = FLOATS
    capability: tuple[int, ...] = ()
    head_dims: tuple[int, int] = (0, 1 << 30)
    aligned: bool = False
    value_heads: bool = True
    group: int = 64
    rank: int = 10
    empty: bool = True
    contract: tuple[tuple[int, int], ...] = ((16, 16),)
    sanitized: tuple[tuple[int, int], ...] = ((64, 40),)

    def takes_sizes(self, dtype: torch.dtype, E: int, Ev: int) -> bool:
        """Whether contiguous operands of these head dims are taken."""
        multiple = 16 // dtype.itemsize if self.aligned else 1
        inside = self.head_dims[0] <= max(E, Ev) <= self.head_dims[1]
        return dtype in self.dtypes and inside and E % multiple == 0 and Ev % multiple == 0

    def takes(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether it takes just these operands; masks, flags and lengths are no matter."""
        fits = self.head_dims[0] <= max(query.size(-1), value.size(-1)) <= self.head_dims[1]
        aligned = not self.aligned or all(rows_on_16_bytes(t) for t in (query, key, value))
        heads = self.value_heads or min(key.dim(), value.dim()) < 3 or key.size(-3) == value.size(-3)
        if (
            not self.value_heads and min(query.dim(), key.dim()) >= 3 and 1 < key.size(-3) < query.size(-3)
        ):  # groups are a dim of the tensor map
            heads = heads and query.size(-3) // key.size(-3) <= self.group and query.stride(-3) > 0 and query.dim() <= 4
        fits = (
            fits
            and heads
            and (self.empty or all(t.numel() for t in (query, key, value)))
            and max(t.dim() for t in (query, key, value)) <= self.rank
        )
        return query.device.type == self.device and query.dtype in self.dtypes and fits and aligned and self.runs_here()

    def runs_here(self) -> bool:
        if self.device != "cuda" or not self.capability:
            return True
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor in self.capability

    @property
    def takes_everything(self) -> bool:
        return self == Kernel(self.name, self.device, self.backward)


# Of the contracts: the widest, and a pair for every other head-dim class of the fused kernels.
DIMS_256 = ((200, 256), (136, 192), (192, 128), (72, 96), (16, 16))
DIMS_512 = ((512, 512), (320, 264), (16, 16))
DIMS_1024 = ((1024, 1024), (576, 640), (768, 768))
HOPPER = {"dtypes": HALVES, "capability": (90,), "aligned": True, "rank": 5, "empty": False}
FACTS = {
    "pipeline": {},
    "sm90_256": HOPPER
    | {"head_dims": (1, 256), "value_heads": False, "group": 128, "contract": DIMS_256, "sanitized": ((256, 200), (64, 40))},
    "sm90_512": HOPPER | {"head_dims": (1, 512), "value_heads": False, "contract": DIMS_512, "sanitized": ((320, 320), (512, 264))},
    "sm90_1024": HOPPER | {"head_dims": (1, 1024), "value_heads": False, "contract": DIMS_1024, "sanitized": ((600, 1024),)},
    "sm90_pipeline": HOPPER | {"head_dims": (1, 1 << 30), "contract": (*DIMS_1024, (640, 576)), "sanitized": ((600, 264),)},
    "sm90_split_half": {
        "dtypes": (torch.float32,),
        "capability": (90,),
        "head_dims": (1, 1 << 30),
        "empty": False,
        "contract": ((512, 512), (200, 72), (16, 16)),
        "sanitized": ((136, 72), (64, 40)),
    },
}
KERNELS = (
    Kernel("reference", "cpu", "reference"),
    *(Kernel(name, "cuda", "auto" if FACTS[name] else name, **FACTS[name]) for name in kernel_names()),
)

HEAD_DIMS = ((16, 16), (7, 13), (64, 128), (128, 40), (320, 264), (264, 512), (512, 512), (512, 8), (40, 384), (1024, 1024))


def needs_the_card(kernel: Kernel) -> None:
    if not kernel.runs_here():
        pytest.skip(f"{kernel.name} needs compute capability {kernel.capability}")


def params(kernels: tuple[Kernel, ...] = KERNELS) -> list:
    """For pytest.mark.parametrize: kernels of the GPU carry its mark."""
    return [pytest.param(k, id=k.name, marks=pytest.mark.gpu if k.device == "cuda" else ()) for k in kernels]


def _rows(dtypes: tuple[torch.dtype, ...], dims_of: Callable[[Kernel], Iterable[tuple[int, int]]]) -> list:
    rows = []
    for kernel in KERNELS:
        marks = pytest.mark.gpu if kernel.device == "cuda" else ()
        for dtype in dtypes:
            for E, Ev in dims_of(kernel):
                if kernel.takes_sizes(dtype, E, Ev):
                    rows.append(pytest.param(kernel, dtype, E, Ev, id=f"{kernel.name}-{dtype}-{E}-{Ev}", marks=marks))
    return rows


def with_head_dims(dtypes: tuple[torch.dtype, ...] = FLOATS) -> list:
    """(kernel, dtype, E, Ev) for every combination of HEAD_DIMS that a kernel takes."""
    return _rows(dtypes, lambda kernel: HEAD_DIMS)


def with_contract_dims(dtypes: tuple[torch.dtype, ...] = FLOATS, at_most: int = 1 << 30) -> list:
    """(kernel, dtype, E, Ev) for the head dims of a kernel's contract, at most so many, the widest first."""
    return _rows(dtypes, lambda kernel: kernel.contract[:at_most])
