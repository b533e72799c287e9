"""Examples in README.md and docs/ are what the command prints."""

from __future__ import annotations

import re

import pytest
import torch
from loader import script
from paths import ROOT

from attention_ext._libraries import BUILD
from attention_ext.command import verify

make_examples = script("make_examples.py")
EXAMPLES = [
    (page.relative_to(ROOT).as_posix(), *found[1:])
    for page in make_examples.pages()
    for found in ((m[0], m[2], m[3]) for m in make_examples.EXAMPLE.finditer(page.read_text()))
]


def test_there_are_examples() -> None:
    """In the README one that prints the same everywhere; on the command's page one of each subcommand."""
    assert [line.split()[0] for page, line, _ in EXAMPLES if page == "README.md"] == ["explain"]
    page = (ROOT / "docs" / "command.md").read_text()
    headings = set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    assert (
        headings
        == {line.split()[0] for name, line, _ in EXAMPLES if name == "docs/command.md"}
        == {"bench", "verify", "explain", "info"}
    )


@pytest.mark.parametrize(("page", "line", "text"), EXAMPLES, ids=lambda value: value if len(value) < 60 else "")
def test_an_example(page: str, line: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--card h" in line and not BUILD.has_hopper_kernels:
        pytest.skip("a build without the kernels for Hopper")
    if line == "info" and torch.cuda.is_available():
        pytest.skip("the example is from a machine without a card")
    monkeypatch.setattr(verify, "SPREAD", verify.SPREAD[-2:])  # numbers do not count, and test_command_verify.py has all calls
    new = make_examples.output(line)
    assert make_examples.essence(line, new) == make_examples.essence(line, text), f"{page}: run python scripts/make_examples.py"


def test_what_counts_in_an_example() -> None:
    """Numbers and versions do not in verify, words do; in info the names of lines; elsewhere everything."""
    essence = make_examples.essence
    assert essence("verify", "on 2.14.1+cu130, 13 within") == essence("verify", "on 2.13.0+cpu, 7 within")
    assert essence("verify", "13 within") != essence("verify", "13 of 13 failed")
    assert essence("info", "built for  9.0\nrich       15") == essence("info", "built for  CPU only\n           more\nrich  none")
    assert essence("info", "built for  9.0\n") != essence("info", "made for  9.0\n")
    assert essence("explain", "1") != essence("explain", "2")


def test_a_stale_page_is_found() -> None:
    page = "a\n```\n$ attention-ext explain dec128 --card h100\nsomething else\n```\nb\n```\nother\n```\n"
    new = make_examples.filled(page)
    assert "kernel     torch: cudnn" in new and "something else" not in new and new.endswith("b\n```\nother\n```\n")
    assert make_examples.filled(new) == new
