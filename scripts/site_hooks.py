"""What mkdocs.yml does to pages, which are written to be read in the repository too, for the site.

The changelog and the examples become pages. Links that lead out of docs/ go to those, to the repository where repo_url names one,
and else are plain text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")
MADE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}  # of the repository -> of the site
MADE |= {str(path.relative_to(ROOT)): f"{path.relative_to(ROOT).with_suffix('.md')}" for path in ROOT.glob("examples/**/*.py")}


def relinked(text: str, page: str, site_page: str, repo_url: str | None) -> str:
    """The text with its links for the site. page: where it stands in the repository; site_page: on the site."""

    def link(found: re.Match[str]) -> str:
        image, words, url = found.groups()
        path, _, anchor = url.partition("#")
        if not path or "://" in path or image:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        inside = MADE.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside is not None:
            made = posixpath.relpath(inside, posixpath.dirname(site_page) or ".")
            return f"[{words}]({made}{'#' * bool(anchor)}{anchor})"
        return f"[{words}]({repo_url.rstrip('/')}/blob/HEAD/{target})" if repo_url else words

    code = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in code)


def on_files(files: Files, config: Any) -> Files:
    for source, made in MADE.items():
        if source != "README.md":
            text = (ROOT / source).read_text()
            text = (
                f"# {source}\n\n```python\n{text}```\n" if source.endswith(".py") else relinked(text, source, made, config.repo_url)
            )
            files.append(File.generated(config, made, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    own = page.file.src_uri
    return markdown if own in MADE.values() and own != "index.md" else relinked(markdown, f"docs/{own}", own, config.repo_url)
