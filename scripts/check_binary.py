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

PRODUCTS = ("qk_scores_kernel", "scores_values_kernel", "score_grad_kernel", "key_value_grad_kernel")
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
    bodies = re.split(r"\n\s*Function : ", sass)[1:]
    for product in PRODUCTS:
        for dtype in HALF:
            chosen = [body for body in bodies if product in body.split("\n", 1)[0] and dtype in body.split("\n", 1)[0]]
            if not chosen:
                findings.append(f"{product} of {dtype} is missing")
            for body in chosen:
                name = body.split("\n", 1)[0]
                for instruction in ("HMMA", "LDSM", "LDGSTS"):
                    if not re.search(rf"\b{instruction}\b", body):
                        findings.append(f"{name}: no {instruction} in its code")
                if re.search(r"\b(LDL|STL)\b", body):
                    findings.append(f"{name}: reads or writes local memory")
    archs = set(re.findall(r"arch = (sm_\w+)", output(tool, "--list-elf", str(library)) + sass))
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
