"""A hook of mkdocs: pages of the repository that lie outside of docs/, and links to them.

Pages link as they do on disk (`../bench/notes.md`), so that they work in an editor and on a code host; the site has
these files under repository/. Links to files that are no pages (a kernel's source) lose their target and stay as text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "bench/notes.md")
FOLDER = "repository"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for name in PAGES:
        files.append(File.generated(config, f"{FOLDER}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at where their files are in the site."""
    return _LINK.sub(lambda link: moved(link, page.file.src_uri), markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """In tables a code host wants a bar in code escaped, and the site's Markdown shows the escape."""
    return re.sub(r"<td>.*?</td>", lambda cell: cell.group(0).replace("\\|", "|"), html)


def moved(link: re.Match[str], page: str) -> str:
    """One link of `page`, the path of a page in the site."""
    text, target, anchor = link.group(1), link.group(2), link.group(3) or ""
    if "://" in target or target.startswith("mailto:"):
        return link.group(0)
    file = os.path.normpath(os.path.join(os.path.dirname(disk_path(page)), target))  # noqa: PTH118, PTH120 - not a file
    if not (ROOT / file).exists():
        return link.group(0)  # mkdocs says so
    if not file.endswith((".md", ".svg")):
        return text
    return f"[{text}]({os.path.relpath(site_path(file), os.path.dirname(page) or '.')}{anchor})"  # noqa: PTH120


def disk_path(page: str) -> str:
    """Where a page of the site lies in the repository."""
    return page.removeprefix(f"{FOLDER}/") if page.startswith(f"{FOLDER}/") else f"docs/{page}"


def site_path(file: str) -> str:
    """Where a file of the repository lies in the site."""
    return file.removeprefix("docs/") if file.startswith("docs/") else f"{FOLDER}/{file}"
