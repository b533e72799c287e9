"""Static checks of the built CUDA library, without a GPU: no spills, Tensor Core instructions where meant, the glibc floor.

    python scripts/check_binary.py WHEEL

Exits with 1 and one line per finding. Needs cuobjdump, which comes with a CUDA toolkit and with the triton package.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PRODUCTS = ("qk_scores_kernel", "scores_values_kernel", "score_grad_kernel", "key_value_grad_kernel", "tiled_linear_kernel")
# Kernels that multiply by wgmma and load by TMA: code for sm_90a, and for other cards, which never launch them, a trap. One has the
# length that precedes its mangled name, as another ends like it.
WGMMA_PRODUCTS = (
    *("WgmmaScoresWork", "WgmmaValuesWork", "WgmmaLinearWork"),
    *("score_gradients_kernel", "16gradients_kernel", "backward_turns_kernel", "row_values_kernel"),
    *("row_grad_kernel", "column_grads_kernel", "mask_tiles_kernel"),
)
SPLIT_BY_TILES = "split_half_linear_kernel"  # the same by wmma
SPLIT = "SplitHalfWgmmaTile"  # the tile of these: float operands as two half terms
SPLIT_PRODUCTS = (
    *("WgmmaLinearWork", "SplitHalfScoresWork", "SplitHalfValuesWork"),
    *("SplitHalfWeightsWork", "SplitHalfWeightGradsWork", "split_half_gradients_kernel", "split_half_score_pairs_kernel"),
)
SPLIT_FUSED = tuple(f"split_half_fused_{part}_kernel" for part in ("rows", "columns", "mask"))  # their backward in registers
FUSED = ("fused_forward_kernel", "rows_forward_kernel")
WARPGROUP_ARCH = "sm_90a"
HALF = ("__half", "__nv_bfloat16")
GLIBC_FLOOR = (2, 34)


def cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    if found:
        return found
    triton = importlib.util.find_spec("triton")
    for location in (triton.submodule_search_locations or []) if triton else []:
        tool = Path(location, "backends", "nvidia", "bin", "cuobjdump")
        if tool.exists():
            return str(tool)
    for home in ("/usr/local/cuda", "/usr/local/cuda-13.0"):
        if Path(home, "bin", "cuobjdump").exists():
            return f"{home}/bin/cuobjdump"
    raise SystemExit("cuobjdump was found neither on the PATH nor in the triton package nor in /usr/local/cuda")


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions_of(sass: str) -> list[tuple[str, str, str]]:
    """(architecture, mangled name, code) of every function that cuobjdump shows."""
    found = []
    sections = re.split(r"^\s*code for (sm_\w+)\s*$", sass, flags=re.MULTILINE)[1:]
    for arch, section in zip(sections[::2], sections[1::2], strict=True):
        for function in re.split(r"^\s*Function : ", section, flags=re.MULTILINE)[1:]:
            name, code = function.split("\n", 1)
            found.append((arch, name.strip(), code))
    return found


def check_code(arch: str, name: str, code: str, instructions: tuple[str, ...], findings: list[str]) -> None:
    for instruction in instructions:
        if not re.search(rf"\b{instruction}\b", code):
            findings.append(f"{name} for {arch}: no {instruction} in its code")
    if re.search(r"\b(LDL|STL)\b", code):
        findings.append(f"{name} for {arch}: reads or writes local memory")


def check_products(functions: list[tuple[str, str, str]], findings: list[str]) -> None:
    """The products by wmma, for every architecture."""
    for product, dtype in [*((product, dtype) for product in PRODUCTS for dtype in HALF), (SPLIT_BY_TILES, "")]:
        chosen = [function for function in functions if product in function[1] and dtype in function[1]]
        if not chosen:
            findings.append(f"{product} of {dtype or 'float'} is missing")
        for arch, name, code in chosen:
            check_code(arch, name, code, ("HMMA", "LDSM", "LDGSTS"), findings)


def check_wgmma_products(functions: list[tuple[str, str, str]], findings: list[str]) -> None:
    """The products by wgmma, of both half types and float; the fused forwards in every instance that any architecture has."""
    wanted = [(product, dtype) for product in WGMMA_PRODUCTS for dtype in HALF]
    wanted += [(product, SPLIT) for product in SPLIT_PRODUCTS] + [(kernel, "") for kernel in SPLIT_FUSED]
    for kernel in FUSED:
        names = [name for _, name, _ in functions if kernel in name]
        # The class of head dims; of the row kernels the rows and what becomes of scores, of the others whether keys are split and
        # whether there is a mask.
        instances = sorted({found for name in names for found in re.findall(r"(?:L[ib]\d+E)+EEL(?:b|NS_8RowsKindE)\dE", name)})
        if not instances:
            findings.append(f"{kernel} is missing")
        wanted += [(kernel, dtype + instance) for dtype in HALF for instance in instances]
    for kernel, argument in wanted:
        chosen = [(name, code) for arch, name, code in functions if arch == WARPGROUP_ARCH and kernel in name and argument in name]
        if not chosen:
            findings.append(f"{kernel} of {argument} has no code for {WARPGROUP_ARCH}")
        for name, code in chosen:
            check_code(WARPGROUP_ARCH, name, code, ("HGMMA", "UTMALDG"), findings)
    for arch, name, code in functions:
        if arch != WARPGROUP_ARCH and any(kernel in name for kernel in (*WGMMA_PRODUCTS, *SPLIT_PRODUCTS, *SPLIT_FUSED, *FUSED)):
            check_code(arch, name, code, (r"BPT\.TRAP",), findings)


def check(library: Path, findings: list[str]) -> None:
    tool = cuobjdump()
    usage = output(tool, "--dump-resource-usage", str(library))
    kernels = re.findall(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if not kernels:
        findings.append("no kernel was found in the library")
    for name, registers, stack, _, local in kernels:
        if int(stack) or int(local):
            findings.append(f"{name}: stack {stack}, local {local} bytes: registers are spilled")
        if int(registers) > 255:
            findings.append(f"{name}: {registers} registers")

    sass = output(tool, "--dump-sass", str(library))
    functions = functions_of(sass)
    check_products(functions, findings)
    check_wgmma_products(functions, findings)
    archs = set(re.findall(r"arch = (sm_\w+)", output(tool, "--list-elf", str(library)) + sass))
    if "sm_90" in archs:
        findings.append("code for plain sm_90, which the driver may prefer to that for sm_90a: its kernels for Hopper are traps")
    ptx = output(tool, "--list-ptx", str(library))
    if "sm_80" not in ptx:
        findings.append("no PTX of compute capability 8.0, which newer cards are served by")
    print(f"{library.name}: {len(kernels)} kernels, none may spill; code for {', '.join(sorted(archs))}, PTX {ptx.split()[-1]}")


def check_glibc(library: Path, findings: list[str]) -> None:
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", output("objdump", "-T", str(library)))}
    newest = max(versions, default=(0,))
    print(f"{library.name}: asks for glibc {'.'.join(map(str, newest))}")
    if newest > GLIBC_FLOOR:
        findings.append(f"{library.name} asks for glibc {newest}, the README says {GLIBC_FLOOR}")


def main() -> int:
    findings: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(sys.argv[1]).extractall(folder)
        for name in ("_C", "_cuda"):
            check_glibc(Path(folder, "attention_ext", f"{name}.abi3.so"), findings)
        check(Path(folder, "attention_ext", "_cuda.abi3.so"), findings)
    for finding in findings:
        print(f"FINDING: {finding}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
