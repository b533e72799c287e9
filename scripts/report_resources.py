"""Registers, stack, shared and local memory of every kernel in a built library, before and after a change.

    python scripts/report_resources.py attention_ext/_cuda.abi3.so > a.json
    python scripts/report_resources.py --compare a.json b.json

Needs cuobjdump (scripts/check_binary.py finds it). --compare names kernels that came, went or changed, and exits with 1 if one
spills in the second report and not in the first.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from check_binary import cuobjdump, output

RESOURCE = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# What the compiler calls a file's unnamed namespace: the name of the file between numbers that change from build to build.
UNNAMED = re.compile(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+?)_cu_[0-9a-f]{8}")
NAMES = ("registers", "stack", "shared", "local")  # static shared memory; what a launch asks for is not in the library

Report = dict[str, dict[str, int]]


def parse(usage: str) -> Report:
    """{"architecture mangled name": its resources} of cuobjdump --dump-resource-usage."""
    found: Report = {}
    parts = re.split(r"^arch = (sm_\w+)$", usage, flags=re.MULTILINE)
    for arch, part in zip(parts[1::2], parts[2::2], strict=True):
        for name, *numbers in RESOURCE.findall(part):
            lasting = UNNAMED.sub(r"<\1.cu>", name)
            found[f"{arch} {lasting}"] = dict(zip(NAMES, map(int, numbers), strict=True))
    return found


def spills(resources: dict[str, int]) -> bool:
    return resources["stack"] > 0 or resources["local"] > 0


def differences(old: Report, new: Report) -> list[str]:
    lines = [f"{name}: {'gone' if name in old else 'new'}" for name in sorted(old.keys() ^ new.keys())]
    for name in sorted(old.keys() & new.keys()):
        changed = [f"{kind} {old[name][kind]} -> {new[name][kind]}" for kind in NAMES if old[name][kind] != new[name][kind]]
        if changed:
            lines.append(f"{name}: {', '.join(changed)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, nargs="?")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    args = parser.parse_args()
    if args.compare:
        old, new = (json.loads(path.read_text()) for path in args.compare)
        print("\n".join(differences(old, new)) or f"{len(old)} kernels: the same resources")
        return int(any(spills(resources) and not (name in old and spills(old[name])) for name, resources in new.items()))
    if args.library is None:
        parser.error("a library, or --compare OLD NEW")
    report = parse(output(cuobjdump(), "--dump-resource-usage", str(args.library)))
    if not report:
        raise SystemExit(f"no kernel was found in {args.library}")
    json.dump(report, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
