"""DTensor operands (torch.distributed.tensor): the checks of sharding_checks.py on two ranks of the CPU, and their registration."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

import ranks
import sharding_checks
from processes import python_after_torch

from attention_ext._after_import import after_import


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return ranks.outcomes("cpu", tmp_path_factory.mktemp("ranks"), "sharding_checks")


@pytest.mark.parametrize("name", sharding_checks.CHECKS)
def test_on_two_ranks(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == ["", ""], "\n".join(outcomes[name])


CALLS = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
q = dist.tensor.distribute_tensor(torch.randn(2, 3, 4), mesh, [dist.tensor.Shard(0)])
made = []
for mode in (torch.inference_mode, torch.enable_grad):
    with mode():
        made += torch.ops.attention_ext.sdpa_forward(q, q, q, None, None, 0.0, False)[0].placements
dist.destroy_process_group()
"""


@pytest.mark.parametrize("first, second", [
    ("attention_ext", "torch.distributed.tensor"), ("torch.distributed.tensor", "attention_ext"),
    ("attention_ext", "torch.distributed.fsdp"),
])  # fmt: skip
def test_registered_whichever_is_imported_first(first: str, second: str) -> None:
    code = f"""
import sys, torch, warnings
warnings.simplefilter("error")
import {first}
alone = not ("attention_ext" in sys.modules and "torch.distributed.tensor" in sys.modules)
import {second}
clean = all(getattr(finder, "name", "") != "torch.distributed.tensor" for finder in sys.meta_path)
{CALLS}
print(alone, clean, *made)
"""
    printed = python_after_torch(code)
    assert printed.splitlines()[-1] == "True True S(0) S(0)"  # 2.10's gloo prints as well


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that has not been imported; its import fails while the file `fail` stands beside it."""
    name = "late_module_of_test_dtensor"
    text = "import pathlib\nif pathlib.Path(__file__).with_name('fail').exists(): raise ImportError('not yet')\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_after_import(late: str, tmp_path: Path) -> None:
    finders, calls = list(sys.meta_path), []
    after_import(late, lambda: calls.append(late in sys.modules))
    assert importlib.util.find_spec(late) is not None  # a look is no import
    (tmp_path / "fail").touch()
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(late)
    assert not calls and len(sys.meta_path) == len(finders) + 1
    (tmp_path / "fail").unlink()
    module = importlib.import_module(late)
    assert calls == [True] and sys.meta_path == finders
    assert "import pathlib" in inspect.getsource(module) and "exec_module" not in vars(module.__loader__)
    importlib.reload(module)
    after_import(late, lambda: calls.append("at once"))
    assert calls == [True, "at once"] and sys.meta_path == finders


def test_an_interface_that_has_changed_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """register_sharding is experimental; without it the import of torch.distributed.tensor goes on."""
    from torch.distributed.tensor import experimental

    from attention_ext import _registration

    monkeypatch.delitem(sys.modules, "attention_ext._sharding")
    monkeypatch.delattr(experimental, "register_sharding")
    _registration._register_sharding()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "DTensor operands will be refused (ImportError" in caplog.text
