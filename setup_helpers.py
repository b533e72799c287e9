"""What setup.py asks the machine: the CUDA toolkit, the architectures to compile for, the id of the sources."""

import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

SOURCES = {".h", ".cuh", ".cpp", ".cu"}  # MANIFEST.in has the same


def output(*command, stream="stdout", cwd=None):
    """What a command printed; empty where it is missing or fails."""
    try:
        return getattr(subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd), stream).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_cuda_home():
    """The toolkit's folder: CUDA_HOME, or what nvcc itself reports (nvcc on PATH may be a wrapper outside the toolkit)."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as empty:
        here = re.search(r"_HERE_=(.+)", output("nvcc", "--dryrun", "-c", empty.name, stream="stderr"))
    return os.environ.get("CUDA_HOME") or (str(Path(here.group(1).strip()).parent) if here else "")


def cuda_architectures():
    """What TORCH_CUDA_ARCH_LIST makes nvcc generate: sm_80, compute_80 (PTX), sm_90a, ..."""
    import torch
    from torch.utils.cpp_extension import _get_cuda_arch_flags  # the reading that BuildExtension goes by

    listed = os.environ["TORCH_CUDA_ARCH_LIST"]
    try:
        codes = set(re.findall(r",code=(\w+)", " ".join(_get_cuda_arch_flags())))
    except (ValueError, IndexError):  # IndexError: "native" without a card
        raise SystemExit(
            f"TORCH_CUDA_ARCH_LIST: expected architectures that torch {torch.__version__} knows, separated by ';' or ' ' (native "
            f"where there is a card), got '{listed}'."
        ) from None
    if "sm_90a" in codes and codes & {"sm_90", "compute_90"}:
        raise SystemExit(
            "TORCH_CUDA_ARCH_LIST: expected 9.0a without plain 9.0 (which Hopper stands for too), as the driver may load the image "
            f"for 9.0, where the kernels for Hopper are empty; got '{listed}'."
        )
    return codes


def tree_id(folder):
    """The id git gives to a folder of these sources, from the files alone; None where there are none."""
    listing = b""
    for path in sorted(folder.iterdir(), key=lambda path: path.name + "/" * path.is_dir()):  # git's order
        if path.is_dir():
            mode, content = b"40000", tree_id(path)
        else:
            mode, content = b"100644", git_hash(b"blob", path.read_bytes()) if path.suffix in SOURCES else None
        if content:
            listing += mode + b" " + path.name.encode() + b"\0" + content
    return git_hash(b"tree", listing) if listing else None


def git_hash(kind, content):
    return hashlib.sha1(b"%s %d\0%s" % (kind, len(content), content), usedforsecurity=False).digest()


def csrc_tree(root):
    """git's tree id of csrc/, marked where the last commit has another: what a benchmark record refers to."""
    tree = tree_id(root / "csrc").hex()
    return tree + "-dirty" * (output("git", "rev-parse", "HEAD:./csrc", cwd=root) not in {"", tree})
