"""What scripts/sanitizers.py counts of compute-sanitizer's reports, without a GPU."""

from __future__ import annotations

import pytest
import sanitizers

INITCHECK = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::reduce_kernel<(int)512>(T3)+0x1230
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f00 is inside an allocation
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: attention_ext::launch() in _cuda.abi3.so
========= Host API memory access error at host access to 0x7f00 of size 1 bytes
=========     Uninitialized access at 0x7f00 on access by cudaMemcpy source
{more}========= ERROR SUMMARY: 2 errors
subset done
"""

SHORT_COPY = """========= Uninitialized __global__ memory read of size 16 bytes
=========     at attention_ext::cp_async_16_zero_filled(unsigned int, const void *, int)+0xbff0 in cp_async.cuh:40
=========         Device Frame: attention_ext::k()+0x10
"""


@pytest.mark.parametrize(
    ("more", "clean"),
    [
        ("", True),
        ("========= Uninitialized __global__ memory read of size 4 bytes\n=========     at attention_ext::k()+0x10\n", False),
        ("========= Uninitialized __global__ memory read of size 4 bytes\n=========     in some other form\n", False),
        (SHORT_COPY, True),
    ],
)
def test_initcheck_counts_this_packages_kernels(monkeypatch: pytest.MonkeyPatch, more: str, clean: bool) -> None:
    commands: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(sanitizers, "run", lambda *given: commands.append(given) or (0, INITCHECK.format(more=more), ""))
    result = sanitizers.run_sanitizer("initcheck", ["subset.py"], "subset done", {})
    short = int(more == SHORT_COPY)
    counts = f"{int(not clean)} in kernels of this package, {short} at copies of less than 16 bytes"
    assert result["clean"] == clean and result["summary"] == f"ERROR SUMMARY: 2 errors, {counts}"
    assert not sanitizers.run_sanitizer("initcheck", ["subset.py"], "never printed", {})["clean"]
    assert "--kernel-name" not in commands[0][0], "what a kernel that is left out wrote would count as unwritten"
    assert commands[0][1]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
