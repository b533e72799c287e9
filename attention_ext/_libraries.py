"""Loads the two compiled libraries and says what they are: _C (schemas, planning) and _cuda (kernels), if it can be used."""

import importlib
import importlib.util
from dataclasses import dataclass

from ._quiet_torch import torch  # the package's first import of torch
from ._version import __version__

__all__ = ["BUILD", "CUDA_PROBLEM", "Build", "check_cuda_library"]


@dataclass(frozen=True)
class Build:
    """What setup.py stamped into the library _C."""

    version: str  # with the local label: 0.1.0+cu13, 0.1.0+cpu
    csrc: str  # git's tree id of csrc/, "-dirty" appended where the last commit had another
    cuda_major: int  # of the toolkit that built _cuda, 0 without it
    built_for: str  # TORCH_CUDA_ARCH_LIST of the build, empty without _cuda

    @property
    def has_hopper_kernels(self) -> bool:
        return "9.0a" in self.built_for


def _load_schemas() -> Build:
    try:
        importlib.import_module("attention_ext._C")
    except ImportError as error:
        raise ImportError(
            f"attention_ext {__version__}: its compiled library _C cannot be loaded ({error}); run `pip install .` in the "
            "folder of its sources with the torch in use (2.10 or newer) installed."
        ) from error
    version, csrc, cuda_major, built_for = torch.ops.attention_ext.build_info()
    if version.split("+")[0] != __version__:
        raise ImportError(
            f"attention_ext: the Python files are of version {__version__}, the compiled libraries of version {version}: "
            "run `pip install .` again in the folder of the sources, or leave that folder."
        )
    return Build(version, csrc, cuda_major, built_for)


def _load_kernels(build: Build) -> str | None:
    """Loads _cuda; returns None, or the sentence that says why CUDA tensors cannot be served."""
    remedy = "run `pip install .` in the folder of its sources where nvcc and a torch with CUDA are installed"
    if build.cuda_major == 0:
        return f"attention_ext {build.version} was built without CUDA: {remedy}."
    if torch.version.cuda is None:
        return f"attention_ext {build.version} was built for CUDA {build.cuda_major}, but torch {torch.__version__} has no CUDA."
    if int(torch.version.cuda.split(".")[0]) != build.cuda_major:
        return (
            f"attention_ext {build.version} was built for CUDA {build.cuda_major}, torch {torch.__version__} is for CUDA "
            f"{torch.version.cuda}: {remedy} of one CUDA major."
        )
    try:
        importlib.import_module("attention_ext._cuda")
    except ImportError as error:
        return f"attention_ext {build.version}: its library _cuda cannot be loaded ({error}): {remedy}."
    return None


BUILD = _load_schemas()
CUDA_PROBLEM = _load_kernels(BUILD)


def check_cuda_library(device: torch.device, argument: str = "query") -> None:
    """Refuses CUDA tensors where the CUDA library is missing or is not for this torch."""
    if CUDA_PROBLEM is not None and device.type == "cuda":
        raise RuntimeError(f"attention_ext: {argument}: expected a CPU tensor, got one on {device}. {CUDA_PROBLEM}")
