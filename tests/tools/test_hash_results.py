"""scripts/hash_results.py: hashes that are the same for the same bits and for nothing else, and what it compares."""

from __future__ import annotations

import json

import pytest
import torch
from kernel_names import kernel_names
from loader import script

import attention_ext  # noqa: F401  registers torch.ops.attention_ext


def test_a_bit_shows() -> None:
    hashes = script("hash_results.py")
    for dtype in (*hashes.DTYPES, torch.bool):
        tensor = torch.ones(3, 4).to(dtype)
        (same,), (again,) = hashes.digest((tensor,)), hashes.digest((tensor.clone(),))
        assert same == again
        others = [tensor.clone(), tensor.t().contiguous().t(), tensor.reshape(4, 3), tensor[:2]]
        others[0][2, 3] = 0
        if dtype != torch.bool:
            others.append(-tensor)
        assert len({same, *(hashes.digest((other,))[0] for other in others)}) == 1 + len(others)
    assert hashes.digest((torch.empty(0, 2), torch.empty(2, 0))) == hashes.digest((torch.empty(0, 2), torch.empty(2, 0)))


def test_calls_of_a_card() -> None:
    hashes = script("hash_results.py")
    names = [name for name, _ in hashes.calls("cuda")]
    assert len(names) == len(set(names)) >= 300
    for part in ("auto", *kernel_names(), *map(str, hashes.DTYPES), *hashes.SIZES, *hashes.VARIANTS, "linear", "stages"):
        assert any(part in name for name in names), part


def test_some_calls_twice(device: str) -> None:
    """Every eleventh call, so that all kinds are among them; on a card those of other cards' kernels are refused."""
    hashes = script("hash_results.py")
    results = []
    for name, call in list(hashes.calls(device))[::11]:
        try:
            first, second = hashes.digest(call()), hashes.digest(call())
        except RuntimeError as error:
            assert "attention_ext: kernel_name:" in str(error), name
            continue
        assert first == second, name
        results.append(tuple(first))
    assert len(results) >= 10 and len(set(results)) == len(results)


def test_compare(tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = script("hash_results.py")
    old = {"calls": {"a": ["1", "2"], "b": "refused", "c": ["3"]}}
    for change, line in (
        ({}, "3 calls, 1 of them refused by their kernel: the same bits"),
        ({"a": ["1", "9"]}, "a: results [1] differ"),
        ({"b": ["4"]}, "b: refused by one"),
        ({"d": ["5"]}, "d: only in the second"),
    ):
        paths = [tmp_path / name for name in ("old.json", "new.json")]
        for path, record in zip(paths, (old, {"calls": old["calls"] | change}), strict=True):
            path.write_text(json.dumps(record))
        monkeypatch.setattr("sys.argv", ["hash_results.py", "--compare", *map(str, paths)])
        assert hashes.main() == (1 if change else 0)
        assert capsys.readouterr().out.strip() == line
