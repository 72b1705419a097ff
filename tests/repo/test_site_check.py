"""`make docs-check` complains about a page that is cut off, cannot be read, or asks for what is not there."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="make docs-check installs it")

from playwright.sync_api import sync_playwright

from docs.site_check import LAPTOP, PHONE, wrong

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 90" width="900">'
PICTURE = f'{HEAD}<text y="50" font-size="12">a</text></svg>'
LONG = "x" * 300


@pytest.fixture(scope="module")
def browser():
    if PROGRAM is None:
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield browser
        browser.close()


def _said(browser, folder: Path, body: str, width: int) -> str:
    (folder / "picture.svg").write_text(PICTURE)
    (folder / "page.html").write_text(f'<!doctype html><body style="margin:0"><div class="md-content">{body}</div>')
    page = browser.new_page(viewport={"width": width, "height": 600})
    said = "\n".join(wrong(page, folder / "page.html", width))
    page.close()
    return said


@pytest.mark.parametrize(
    ("body", "width", "complaint"),
    [
        (f"<p>{LONG}</p>", LAPTOP, "the page is"),
        (f"<table><tr><td>{LONG}</td></tr></table>", PHONE, "pixels outside of the window"),
        (f'<p style="overflow: hidden">{LONG}</p>', LAPTOP, "hides"),
        (f'<pre style="overflow: auto">{LONG}</pre>', LAPTOP, "has to be scrolled"),
        ('<img src="absent.svg">', LAPTOP, "absent.svg is not shown"),
        ('<img src="absent.svg">', LAPTOP, "not loaded: file:"),
        ('<img src="picture.svg" width="300">', PHONE, "picture.svg has letters of 4.0 pixels"),
        ('<img src="picture.svg">', LAPTOP, "a click on a picture does not enlarge it"),
        ('<script src="https://example.invalid/a.js"></script>', LAPTOP, "from elsewhere: https://example.invalid/a.js"),
        ("<script>console.error('oh')</script>", LAPTOP, "console: oh"),
        ("<script>throw new Error('oh')</script>", LAPTOP, "script: oh"),
    ],
)
def test_what_is_wrong_is_said(browser, tmp_path, body, width, complaint):
    assert complaint in _said(browser, tmp_path, body, width)


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_a_whole_page_is_none(browser, tmp_path, width):
    assert not _said(browser, tmp_path, "<h1>A page</h1><p>short</p><pre>code</pre>", width)


def test_a_phone_may_scroll_what_is_wide(browser, tmp_path):
    wide = f'<pre style="overflow: auto">{LONG}</pre>'
    assert not _said(browser, tmp_path, wide, PHONE)
