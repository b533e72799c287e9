"""The Python blocks of README.md and docs/ run; those of integrations in tests/integrations/test_snippets_of_integrations.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import snippets
import torch
from paths import ROOT


@pytest.fixture(autouse=True)
def as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Snippets set levels of loggers and write files."""
    monkeypatch.chdir(tmp_path)
    loggers = [logging.getLogger(), logging.getLogger("attention_ext")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    torch.compiler.reset()


@pytest.mark.parametrize("page", snippets.pages(""))
def test_blocks_run(page: str, device: str) -> None:
    snippets.run(page, "", snippets.names(device))


@pytest.mark.gpu
@pytest.mark.parametrize("page", snippets.pages("cuda"))
def test_blocks_run_on_a_card(page: str) -> None:
    snippets.run(page, "cuda", snippets.names("cuda"))


@pytest.mark.parametrize("page", snippets.PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_needs_and_is_python(page: Path) -> None:
    found = snippets.blocks(page)
    assert len(found) == sum(line.startswith("```python") for line in page.read_text().splitlines())
    for block in found:
        assert block.needs in snippets.NEEDS, f"{page.name}, line {block.line}: {block.needs}"
        compile(block.code, page.name, "exec")


def test_a_block_that_fails_is_found_with_its_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('text\n```python\nx = 1\n```\n\n```python run="cuda"\nx = 2\n```\n```python\nassert x == 2\n```\n')
    assert [block.needs for block in snippets.blocks(page)] == ["", "cuda", ""]
    with pytest.raises(AssertionError) as failed:
        snippets.run(str(page), "", {})
    assert failed.traceback[-1].lineno + 1 == 10 and str(failed.traceback[-1].path) == str(page)
    snippets.run(str(page), "cuda", {})


def test_pages_that_teach_have_blocks() -> None:
    taught = {
        "README.md",
        *(f"docs/{name}.md" for name in ("index", "using", "override", "training", "compile", "differences", "off")),
    }
    assert taught <= set(snippets.pages("")) and (ROOT / "docs" / "parallel.md") in snippets.PAGES
