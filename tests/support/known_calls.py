"""For the tests of what attention_ext/_recall.py keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_ext.attention import recall, router

__all__ = ["counted_anew", "forget", "shifted"]


def forget() -> None:
    """Nothing is known of any call of sdpa."""
    for runs in recall._KNOWN._runs.values():
        runs.clear()


def counted_anew(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets an entry for each call of sdpa that is checked and routed."""
    calls: list[Any] = []
    whole = router._sdpa_anew

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments[4:])
        return whole(*arguments)

    monkeypatch.setattr(router, "_sdpa_anew", counted)
    return calls


def shifted(t: Tensor) -> Tensor:
    """The same numbers, from one element past a boundary of 16 bytes."""
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)
