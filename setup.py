"""Builds the two libraries of attention_ext: _C (schemas and planning) and, where there is a CUDA toolkit, _cuda (kernels).

Environment: ATTENTION_EXT_CUDA=0 leaves _cuda out, =1 insists on it; TORCH_CUDA_ARCH_LIST and MAX_JOBS as in PyTorch.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build

ROOT = Path(__file__).parent
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0+PTX;9.0a")


def output(*command, stream="stdout"):
    """What a command printed; empty where it is missing or fails."""
    try:
        return getattr(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT), stream).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_cuda_home():
    """The toolkit's folder: CUDA_HOME, or what nvcc itself reports (nvcc on PATH may be a wrapper outside the toolkit)."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as empty:
        here = re.search(r"_HERE_=(.+)", output("nvcc", "--dryrun", "-c", empty.name, stream="stderr"))
    return os.environ.get("CUDA_HOME") or (str(Path(here.group(1).strip()).parent) if here else "")


def csrc_tree():
    """git's tree id of csrc/, marked where the working tree differs from it: what a benchmark record refers to."""
    dirty = "-dirty" if output("git", "status", "--porcelain", "--", "csrc") else ""
    return (output("git", "rev-parse", "HEAD:csrc") or "unknown") + dirty


CUDA_HOME = find_cuda_home()
if CUDA_HOME:
    os.environ["CUDA_HOME"] = CUDA_HOME  # before torch guesses it
import torch  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

WANTED = os.environ.get("ATTENTION_EXT_CUDA")
TORCH_MAJOR = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
RELEASE = re.search(r"release (\d+)\.", output(f"{CUDA_HOME}/bin/nvcc", "--version"))
TOOLKIT_MAJOR = int(RELEASE.group(1)) if RELEASE and TORCH_MAJOR and WANTED != "0" else None
if WANTED == "1" and not (TORCH_MAJOR and TOOLKIT_MAJOR):
    raise SystemExit(f"ATTENTION_EXT_CUDA=1 needs an nvcc (set CUDA_HOME) and a torch with CUDA, not {torch.__version__}.")
if TOOLKIT_MAJOR and TOOLKIT_MAJOR != TORCH_MAJOR:
    raise SystemExit(
        f"The toolkit in {CUDA_HOME} is CUDA {TOOLKIT_MAJOR}, torch {torch.__version__} was built for CUDA {TORCH_MAJOR}: set "
        f"CUDA_HOME to a CUDA {TORCH_MAJOR} toolkit, or leave the kernels out by ATTENTION_EXT_CUDA=0 pip install ."
    )

VERSION = re.search(r'"(.+)"', (ROOT / "attention_ext" / "_version.py").read_text()).group(1)
VERSION += f"+cu{TOOLKIT_MAJOR}" if TOOLKIT_MAJOR else "+cpu"  # pip prints the version, so it says what was built
ARCHS = os.environ["TORCH_CUDA_ARCH_LIST"]
MACROS = {
    "TORCH_TARGET_VERSION": "0x020a000000000000",  # PyTorch 2.10, the oldest release the libraries load beside
    "ATTENTION_EXT_VERSION": f'"{VERSION}"',
    "ATTENTION_EXT_CUDA_MAJOR": TOOLKIT_MAJOR or 0,
    "ATTENTION_EXT_BUILT_FOR": f'"{ARCHS if TOOLKIT_MAJOR else ""}"',
    "ATTENTION_EXT_HAS_SM90A": int("9.0a" in ARCHS),
}
STRICT = os.environ.get("ATTENTION_EXT_WERROR") == "1"
HOST = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", *["-Werror"] * STRICT]
DEVICE = ["-O3", "-lineinfo", "-Xcompiler=-fvisibility=hidden", "-Xptxas=-warn-spills"]
DEVICE += ["--Werror=all-warnings"] * STRICT


def extension(kind, name, patterns, macros, **flags):
    sources = [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    common = {"include_dirs": [str(ROOT / "csrc")], "extra_link_args": ["-s"], "py_limited_api": True}
    defined = [(key, str(text)) for key, text in macros.items()]
    return kind(f"attention_ext.{name}", sources, define_macros=defined, extra_compile_args=flags, **common)


class CleanBuild(build):
    """Removes what an earlier build left in build_lib, so that a stale _cuda never gets into a wheel without CUDA."""

    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


stamp = {"ATTENTION_EXT_CSRC": f'"{csrc_tree()}"'}
extensions = [extension(CppExtension, "_C", ["csrc/binding/schema.cpp", "csrc/plan.cpp"], MACROS | stamp, cxx=HOST)]
if TOOLKIT_MAJOR:
    patterns = ["csrc/binding/cuda*.cpp", "csrc/plan.cpp", "csrc/[!b]*/*.cpp", "csrc/*/*.cu"]
    extensions += [extension(CUDAExtension, "_cuda", patterns, MACROS, cxx=[*HOST, "-DUSE_CUDA"], nvcc=DEVICE)]
setup(
    version=VERSION,
    ext_modules=extensions,
    cmdclass={"build": CleanBuild, "build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
