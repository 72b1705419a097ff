"""Looks at every page of the built site in a real browser, as wide as a laptop and as narrow as a phone.

    python -m docs.site_check site /usr/bin/chromium        what `make docs-check` runs

Pages are opened as files, which is the hardest way to serve them: nothing may be loaded from elsewhere, and search has
to work without a server. A page fails for what a reader would see cut off, a picture whose labels are too small to
read, an error in the console, and a request that fails.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

LAPTOP, PHONE = 1280, 390
LEAST_LABEL = 8.5  # pixels of the smallest letters of a picture
MOST = 6  # sentences about one page
SEARCHED = "swizzle"

# What is wider than the window and in no box that scrolls; on a laptop tables and code have to fit without scrolling.
CUT_OFF = """(scrolling) => {
    const page = document.scrollingElement, wide = window.innerWidth, found = [];
    if (page.scrollWidth > wide) found.push(`the page is ${page.scrollWidth} pixels wide`);
    const inside = (e) => e.getBoundingClientRect().right <= wide + 1;
    const scrolls = (e) => inside(e) && ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
    const name = (e) => `<${e.localName}> ${e.textContent.trim().slice(0, 40) || e.getAttribute("src") || ""}`;
    for (const e of document.querySelectorAll(".md-content :is(table, pre, code, img, p, li, h1, h2, h3, td, th, a)")) {
        const box = e.getBoundingClientRect();
        if (!box.width) continue;
        let frame = e.parentElement;
        while (frame && !scrolls(frame)) frame = frame.parentElement;
        if (!inside(e) && !frame)
            found.push(`${name(e)} ends ${Math.round(box.right - wide)} pixels outside of the window`);
        if (e.scrollWidth > e.clientWidth + 1 && ["hidden", "clip"].includes(getComputedStyle(e).overflowX))
            found.push(`${name(e)} hides ${e.scrollWidth - e.clientWidth} pixels`);
        if (!scrolling && e.matches("table, pre, pre > code") && e.scrollWidth > e.clientWidth + 1)
            found.push(`${name(e)} has to be scrolled by ${e.scrollWidth - e.clientWidth} pixels`);
    }
    return found;
}"""
PICTURES = """() => [...document.querySelectorAll(".md-content img")].map(
    (e) => ({source: e.src, width: e.getBoundingClientRect().width, drawn: e.naturalWidth}))"""


def check(site: Path, browser: Browser) -> Iterator[str]:
    """One sentence for everything that is wrong."""
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")  # that one needs a server
    for width in (LAPTOP, PHONE):
        for i, path in enumerate(pages, 1):
            _progress(f"{width} pixels, page {i} of {len(pages)} ")
            page = browser.new_page(viewport={"width": width, "height": 900})
            found = list(wrong(page, path, width))
            shown = found[:MOST] + [f"and {len(found) - MOST} more"] * (len(found) > MOST)
            yield from (f"{path.relative_to(site)} at {width} pixels: {what}" for what in shown)
            page.close()
    _progress("\n")


def _progress(text: str) -> None:
    """One line of the terminal, written over again; nothing where there is no terminal."""
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)


def wrong(page: Page, path: Path, width: int) -> Iterator[str]:
    """What is wrong with one page."""
    heard: list[str] = []
    bad = ("error", "warning")
    page.on("console", lambda said: heard.append(f"console: {said.text}") if said.type in bad else None)
    page.on("pageerror", lambda error: heard.append(f"script: {error}"))
    page.on("requestfailed", lambda request: heard.append(f"not loaded: {request.url}"))
    page.on("request", lambda asked: heard.append(f"from elsewhere: {asked.url}") if _outside(asked.url) else None)
    page.goto(path.absolute().as_uri())
    page.wait_for_timeout(150)  # the theme's script frames tables
    yield from page.evaluate(CUT_OFF, width < LAPTOP)
    for picture in page.evaluate(PICTURES):
        yield from _picture(picture)
    yield from _enlarged(page)
    yield from heard


def _outside(url: str) -> bool:
    return not url.startswith(("file:", "data:", "blob:", "about:"))


def _picture(picture: dict[str, Any]) -> Iterator[str]:
    """A picture has to be there, with letters that can be read at the size it is shown in."""
    name = picture["source"].rsplit("/", 1)[-1]
    if not picture["drawn"]:
        yield f"{name} is not shown"
        return
    text = Path(picture["source"].removeprefix("file://")).read_text(encoding="utf-8")
    sizes = [float(size) for size in re.findall(r'font-size[=:]\s*"?([\d.]+)', text)]
    units = re.search(r'<svg[^>]* viewBox="0 0 ([\d.]+)', text)
    scale = picture["width"] / (float(units[1]) if units else picture["drawn"])
    shown = min(sizes, default=LEAST_LABEL) * scale
    if shown < LEAST_LABEL:
        yield f"{name} has letters of {shown:.1f} pixels"


def _enlarged(page: Page) -> Iterator[str]:
    """A click on the first picture opens it in at least its drawn size, and Escape closes it."""
    image = page.locator(".md-content img").first
    if not image.count():
        return
    image.click()
    shown = page.locator("dialog.picture object")
    if not shown.count() or shown.bounding_box()["width"] < image.evaluate("e => e.naturalWidth"):
        yield "a click on a picture does not enlarge it"
    page.keyboard.press("Escape")
    if page.locator("dialog.picture[open]").count():
        yield "Escape does not close an enlarged picture"


def searched(site: Path, browser: Browser) -> Iterator[str]:
    """The search finds a word that is on several pages."""
    page = browser.new_page(viewport={"width": LAPTOP, "height": 900})
    page.goto((site / "index.html").absolute().as_uri())
    page.wait_for_timeout(500)
    page.keyboard.press("f")
    page.keyboard.type(SEARCHED)
    try:
        page.wait_for_selector(".md-search-result__item", timeout=10_000)
    except Exception:
        yield f"the search does not find {SEARCHED!r}"
    page.close()


def main(site: Path, program: str) -> int:
    """Print what is wrong; exit status 1 if anything is."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        found = [*check(site, browser), *searched(site, browser)]
        browser.close()
    print("\n".join(found) or "every page is whole at 1280 and at 390 pixels, and no request failed")
    return bool(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("docs.site_check", description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("browser", help="path of a Chromium")
    given = parser.parse_args()
    sys.exit(main(given.site, given.browser))
