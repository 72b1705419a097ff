"""A hook of mkdocs: pages from outside of docs/, links to them, sections of the README, frames of pictures.

Pages link as they do on disk (`../bench/notes.md`), so that they work in an editor and on a code host; the site has
these files under repository/. Links to files that are no pages (a kernel's source) lose their target and stay as text.
A line that is nothing but a link to a section of the README becomes that section. A picture keeps a width at which its
labels can be read, and scrolls where the window is narrower.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "bench/notes.md")
FOLDER = "repository"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_SECTION = re.compile(r"^\[([^\]]*)\]\(\.\./README\.md#[\w-]+\)$", re.MULTILINE)
_PICTURE = re.compile(r'<img [^>]*src="([^"]*\.svg)"[^>]*>')
_SMALL = 300  # pixels; smaller pictures keep their size
_LEAST = 0.8  # of the size that a picture was drawn in: labels of 11 pixels are 8.8 then


def on_config(config: Any) -> Any:
    """The theme's plug-in for pages opened as files would fetch a script from elsewhere; the site has its own."""
    config.extra["polyfills"] = ["assets/worker.js"]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for name in PAGES:
        files.append(File.generated(config, f"{FOLDER}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put sections of the README in, and point links at where their files are in the site."""
    here = page.file.src_uri
    parts = _SECTION.split(markdown)  # text, title, text, ...
    parts[1::2] = [_LINK.sub(lambda link: moved(link, "README.md", here), section(title)) for title in parts[1::2]]
    parts[0::2] = [_LINK.sub(lambda link: moved(link, disk_path(here), here), text) for text in parts[0::2]]
    return "".join(parts)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Tables escape a bar in code for code hosts, and the site would show the escape; pictures get a frame."""
    html = re.sub(r"<td>.*?</td>", lambda cell: cell.group(0).replace("\\|", "|"), html)
    return _PICTURE.sub(lambda image: framed(image, page.file.src_uri), html)


def section(title: str) -> str:
    """The text below a heading of the README, up to the next one."""
    _, found, rest = (ROOT / "README.md").read_text().partition(f"\n## {title}\n")
    if not found:
        raise PluginError(f"the README has no section {title!r}")
    return rest.partition("\n## ")[0].strip()


def framed(image: re.Match[str], page: str) -> str:
    """A picture of `page`: at most as large as it was drawn, and in a frame that scrolls where it could not be read."""
    file = ROOT / disk_path(os.path.normpath(os.path.join(os.path.dirname(page), image[1])))  # noqa: PTH118, PTH120
    found = re.search(r'<svg[^>]* width="([\d.]+)(pt)?"', file.read_text())
    if not found:
        return image[0]
    width = float(found[1]) * (4 / 3 if found[2] else 1)
    style = f'style="max-width: {width:.0f}px; min-width: {width * (_LEAST if width > _SMALL else 1):.0f}px"'
    return f'<span class="figure">{image[0].replace("<img ", f"<img {style} ", 1)}</span>'


def moved(link: re.Match[str], source: str, page: str) -> str:
    """One link of the file `source`, as it is in `page`, the path of a page in the site."""
    mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    file = os.path.normpath(os.path.join(os.path.dirname(source), target))  # noqa: PTH118, PTH120 - not a file
    if not (ROOT / file).exists():
        return link[0]  # mkdocs says so
    if not file.endswith((".md", ".svg")):
        return text
    return f"{mark}[{text}]({os.path.relpath(site_path(file), os.path.dirname(page) or '.')}{anchor})"  # noqa: PTH120


def disk_path(page: str) -> str:
    """The path of a page of the site in the repository."""
    return page.removeprefix(f"{FOLDER}/") if page.startswith(f"{FOLDER}/") else f"docs/{page}"


def site_path(file: str) -> str:
    """The path of a file of the repository in the site."""
    return file.removeprefix("docs/") if file.startswith("docs/") else f"{FOLDER}/{file}"
