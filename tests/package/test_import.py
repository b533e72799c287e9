"""Importing is free of side effects: no CUDA, no fork trouble, no other packages, little time, from any folder."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from processes import python, python_after_torch

CALL = "q = torch.randn(1, 1, 3, 4, requires_grad=True); torch.ops.attention_ext.sdpa(q, q, q).sum().backward()"


@pytest.mark.parametrize("visible", ["", None])
def test_import_leaves_cuda_alone(visible: str | None) -> None:
    code = "import torch, attention_ext; torch.ops.attention_ext.sdpa.default; " + CALL
    code += "; assert not torch.cuda.is_initialized(); print('ok')"
    assert python_after_torch(code, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})) == "ok"


@pytest.mark.parametrize("called_before", [False, True])
def test_fork(called_before: bool) -> None:
    """A child without a backward pass where its parent had one: with a card PyTorch's autograd then has threads and refuses it."""
    code = f"""
import os, torch, attention_ext
{CALL if called_before else ""}
pid = os.fork()
if pid == 0:
    {CALL.removesuffix(".sum().backward()") if called_before else CALL}
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""
    assert python_after_torch(code) == "0", "the child has failed"


def test_dataloader_workers() -> None:
    code = """
import torch, attention_ext
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        q = torch.full((1, 3, 4), float(i))
        return torch.ops.attention_ext.sdpa(q, q, q)
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
    print([int(x.mean()) for x in loader])
"""
    assert python_after_torch(code) == "[0, 1, 2, 3]"


def test_import_time() -> None:
    """What import attention_ext adds to import torch, in seconds of the CPU, median of five."""
    code = "import time, torch; t = time.process_time(); import attention_ext; print(time.process_time() - t)"
    seconds = [float(python_after_torch(code)) for _ in range(5)]
    assert statistics.median(seconds) <= 0.3, seconds


def test_import_brings_nothing_but_torch() -> None:
    """No package that import torch has not loaded already, and none of torch's slow parts."""
    code = """
import sys, torch
before = set(sys.modules)
import attention_ext
new = {m for m in set(sys.modules) - before if not m.startswith("attention_ext")}
own = sys.stdlib_module_names
print(sorted(m for m in new if m.split(".")[0] not in own and not m.startswith("torch")))
print(sorted(m for m in new if m.startswith(("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"))))
"""
    assert python_after_torch(code) == "[]\n[]"


def test_import_changes_no_global_state() -> None:
    code = """
import torch, logging, warnings
warnings.simplefilter("error")  # only now: torch itself warns where NumPy is missing
def state():
    return (torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32,
            torch.get_float32_matmul_precision(), logging.getLogger().handlers, logging.getLogger().level)
before = state()
import attention_ext
assert state() == before
print("ok")
"""
    assert python_after_torch(code) == "ok"


def test_import_prints_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import attention_ext"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("folder", [ROOT, ROOT / "tests", Path("/")], ids=["root", "tests", "elsewhere"])
def test_import_from_any_folder(folder: Path) -> None:
    code = f"import torch, attention_ext; {CALL}; print(torch.ops.attention_ext.sdpa_forward.default._schema.name)"
    assert python_after_torch(code, cwd=folder) == "attention_ext::sdpa_forward"


def test_import_twice_and_beside_torch_first() -> None:
    assert python("import attention_ext, importlib, torch; import attention_ext as a; print(a is attention_ext)") == "True"


def test_schemas() -> None:
    """sdpa is ATen's schema to the letter."""
    import torch

    import attention_ext  # noqa: F401

    ours = str(torch.ops.attention_ext.sdpa.default._schema).removeprefix("attention_ext::sdpa")
    aten = str(torch.ops.aten.scaled_dot_product_attention.default._schema).removeprefix("aten::scaled_dot_product_attention")
    assert ours == aten
    with_lse = str(torch.ops.attention_ext.sdpa_with_lse.default._schema).removeprefix("attention_ext::sdpa_with_lse")
    assert with_lse == aten.replace("-> Tensor", "-> (Tensor out, Tensor lse)")
    operands = "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? seed, float dropout_p, bool is_causal, *, "
    options = "float? scale=None, bool enable_gqa=False, "
    last = 'int workspace_bytes=134217728, str kernel_name="auto", Tensor? key_lengths=None) -> '
    forward = str(torch.ops.attention_ext.sdpa_forward.default._schema)
    assert forward == f"attention_ext::sdpa_forward{operands}{options}{last}(Tensor out, Tensor lse)"
    backward = str(torch.ops.attention_ext.sdpa_backward.default._schema)
    before = operands.replace("(Tensor query", "(Tensor grad_out, Tensor? grad_lse, Tensor query")
    before = before.replace("Tensor? seed", "Tensor out, Tensor lse, Tensor? seed")
    middle = "bool mask_grad=False, bool wide_grads=False, "
    assert backward == f"attention_ext::sdpa_backward{before}{options}{middle}{last}(Tensor, Tensor, Tensor, Tensor)"
