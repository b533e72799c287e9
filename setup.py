"""Builds the two libraries of attention_ext: _C (schemas and planning) and, where there is a CUDA toolkit, _cuda (kernels).

Environment: ATTENTION_EXT_CUDA=0 leaves _cuda out, =1 insists on it; TORCH_CUDA_ARCH_LIST and MAX_JOBS as in PyTorch.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
sys.path.append(str(ROOT))  # pip runs this file without its folder on the path
from setup_helpers import csrc_tree, cuda_architectures, find_cuda_home, output  # noqa: E402

ARCHS = os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0+PTX;9.0a"
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
BUILT = VERSION + (f"+cu{TOOLKIT_MAJOR}" if TOOLKIT_MAJOR else "+cpu")  # pip prints the version, so it says what was built
FROM_SDIST = (ROOT / "PKG-INFO").exists()  # then pip insists on the sdist's own version
CODES = cuda_architectures() if TOOLKIT_MAJOR else set()
if "sm_90" in CODES:
    print(f"TORCH_CUDA_ARCH_LIST='{ARCHS}' leaves the kernels for Hopper out: they need 9.0a in place of 9.0.", file=sys.stderr)
MACROS = {
    "TORCH_TARGET_VERSION": "0x020a000000000000",  # PyTorch 2.10, the oldest release the libraries load beside
    "ATTENTION_EXT_VERSION": f'"{BUILT}"',
    "ATTENTION_EXT_CUDA_MAJOR": TOOLKIT_MAJOR or 0,
    "ATTENTION_EXT_BUILT_FOR": f'"{ARCHS if TOOLKIT_MAJOR else ""}"',
    "ATTENTION_EXT_HAS_SM90A": int("sm_90a" in CODES),
}
STRICT = os.environ.get("ATTENTION_EXT_WERROR") == "1"
HOST = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", *["-Werror"] * STRICT]
DEVICE = ["-O3", "-lineinfo", "-Xcompiler=-fvisibility=hidden", "-Xptxas=-warn-spills"]
DEVICE += ["--Werror=all-warnings"] * STRICT
OF_C = ("schema.cpp", "cpu.cpp")  # of csrc/binding, in _C alone


def extension(kind, name, patterns, macros, **flags):
    found = (path.relative_to(ROOT) for pattern in patterns for path in sorted(ROOT.glob(pattern)))
    sources = [str(path) for path in found if name == "_C" or path.name not in OF_C]
    common = {"include_dirs": [str(ROOT / "csrc")], "extra_link_args": ["-s"], "py_limited_api": True}
    defined = [(key, str(text)) for key, text in macros.items()]
    return kind(f"attention_ext.{name}", sources, define_macros=defined, extra_compile_args=flags, **common)


class CleanBuild(build):
    """Removes what an earlier build left in build_lib, so that a stale _cuda never gets into a wheel without CUDA."""

    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Sdist(sdist):
    """Leaves the label out of the version: an sdist is the same whatever machine made it, and an index takes no label."""

    def run(self):
        self.distribution.metadata.version = VERSION
        super().run()


stamp = {"ATTENTION_EXT_CSRC": f'"{csrc_tree(ROOT)}"'}
patterns = [*(f"csrc/binding/{name}" for name in OF_C), "csrc/plan/*.cpp"]
extensions = [extension(CppExtension, "_C", patterns, MACROS | stamp, cxx=HOST)]
if TOOLKIT_MAJOR:
    patterns = ["csrc/**/*.cu", "csrc/**/*.cpp"]
    extensions += [extension(CUDAExtension, "_cuda", patterns, MACROS, cxx=[*HOST, "-DUSE_CUDA"], nvcc=DEVICE)]
setup(
    version=VERSION if FROM_SDIST else BUILT,
    ext_modules=extensions,
    cmdclass={"build": CleanBuild, "build_ext": BuildExtension, "sdist": Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
