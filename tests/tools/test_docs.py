"""README.md and docs/: links, paths, the commands that continuous integration reads."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from loader import script
from paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
KINDS = {".py", ".cpp", ".cu", ".h", ".cuh"}
SOURCES = [path for folder in ("attention_ext", "csrc", "tests", "bench", "scripts") for path in (ROOT / folder).rglob("*.*")]
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    links = re.findall(r"\]\(([^)]+)\)", CODE.sub("", page.read_text()))
    broken = []
    for link in (link for link in links if not link.startswith("http")):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [x](#a) [x](none.md) `[x](code.md)` [x](https://example.org/none)\n")
    assert broken_links(page) == ["#a", "none.md"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_page_is_in_the_index(page: Path) -> None:
    """For readers of the repository, and in the site's navigation."""
    index = ROOT / "docs" / "index.md"
    targets = {(index.parent / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)]+)\)", index.read_text())}
    assert page in targets | {index}
    if page.is_relative_to(index.parent):
        assert f": {page.relative_to(index.parent)}\n" in (ROOT / "mkdocs.yml").read_text()


def test_links_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that leave docs/ go to pages made of other files, to the repository, or are plain text."""
    for module in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files", "mkdocs.structure.pages"):
        monkeypatch.setitem(sys.modules, module, MagicMock())
    relinked = script("site_hooks.py").relinked
    text = "[a](b.md#c) [d](../../CHANGELOG.md) [e](../../examples/parallel.py) [f `g`](../../csrc/core) ![h](i.svg) [j](https://k)"
    want = "[a](b.md#c) [d](../changelog.md) [e](../examples/parallel.md) {} ![h](i.svg) [j](https://k)"
    code = "\n```python\nx = [a](../../csrc)\n```\n"
    page = ("docs/kernels/linear.md", "kernels/linear.md")
    assert relinked(text + code, *page, None) == want.format("f `g`") + code
    assert relinked(text + code, *page, "https://host/repository/") == (
        want.format("[f `g`](https://host/repository/blob/HEAD/csrc/core)") + code
    )
    assert relinked("[a](docs/parts.md#b)", "CHANGELOG.md", "changelog.md", None) == "[a](parts.md#b)"


def test_every_kernel_of_a_record_has_its_page() -> None:
    records = [json.loads(path.read_text()) for path in (ROOT / "bench" / "results").glob("*.json")]
    kernels = {case["kernel"] for record in records for case in record.get("forward", {}).values()}
    kernels = {kernel for kernel in kernels if not kernel.startswith("torch: ")}  # PyTorch's own back ends
    assert kernels and kernels <= {page.stem for page in (ROOT / "docs" / "kernels").glob("*.md")}


def test_pages_that_sources_name() -> None:
    pages = {
        (name(path), page)
        for path in SOURCES
        if path.suffix in KINDS
        for page in re.findall(r"\bdocs/[\w/]+\.(?:md|svg)\b", path.read_text())
    }
    assert pages and not [(path, page) for path, page in pages if not (ROOT / page).exists()]


def test_the_readme_has_what_continuous_integration_runs() -> None:
    found = dict(re.findall(r"^(Run|Test): `(.*)`", README, re.MULTILINE))
    assert found["Run"].startswith("pip install .") and "pytest" in found["Test"]


def test_the_readme_has_one_short_table_of_results() -> None:
    place = re.search(r"<!-- table highlights: .*?<!-- end of table -->", README, re.DOTALL)
    assert place is not None and 3 <= len([line for line in place[0].splitlines() if line.startswith("|")]) <= 2 + 8
