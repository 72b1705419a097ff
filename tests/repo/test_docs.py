"""The documentation: the site builds without a warning, and what it shows is what the code and the records say."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.figures import __main__ as drawn
from docs.figures import concepts
from docs.figures.measured import ladder

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site(site):
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    assert not list(site.rglob("*.py"))


def test_links_out_of_docs_lead_to_pages_of_the_site(site):
    text = (site / "kernels" / "sm90.html").read_text()
    assert 'href="../repository/bench/notes.html"' in text
    assert (site / "repository" / "bench" / "notes.html").is_file()


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'(?:<script|<link rel="stylesheet"|<img)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        assert not fetched, page


def test_listings_stand_in_the_file():
    source = (DOCS / "figures" / "timelines" / "extend.py").read_text()
    listings = re.findall(r"^```py\n(.*?)^```", (DOCS / "extend.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(listings) == 3
    for listing in listings:
        assert listing.strip("\n") in source


def test_the_ladder_says_what_was_recorded():
    notes = (ROOT / "bench" / "notes.md").read_text()
    parts = re.split(r"^#### (\d+)\. ", notes, flags=re.MULTILINE)
    experiments = dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))
    assert list(experiments) == list(range(1, len(experiments) + 1))
    for steps in ladder.CASES.values():
        for step in steps:
            assert re.search(rf"\b{step.kilocycles}\b", experiments[step.experiment]), step


def test_the_ladder_begins_with_the_rungs_once_they_are_measured():
    case = {"dim": 128, "batch": 4, "seq_q": 4096, "heads_q": 16, "causal": False}
    floor = ladder.rung_case(case).floor
    slow = {"what": "slow one", "status": "timed", "ms": {"median": 4.0}, "tflops": 137.4}
    slow["metrics"] = {"cycles": 4 * floor, "tensor_percent": 26.4}
    rungs = {
        "naive": slow,
        "tma": {**slow, "what": "no counter", "metrics": None},
        "bad": {"what": "bad one", "status": "wrong"},
    }
    machine = {"gpu": "H200", "power_limit": "700 W"}
    record = {"command": "c", "date": "2026-11-21T00", "machine": machine, "cases": [{"case": case, "rungs": rungs}]}
    page = ladder.page(record)
    assert f"| D 128, 4 × 4k, full | slow one | 4.00 | 137 | {4 * floor / 1000:.0f} | 25% | 26% |" in page
    assert "|  | no counter | 4.00 | 137 | – | – | – |" in page
    assert "|  | bad one | wrong | – | – | – | – |" in page
    assert ladder.table() in page
    assert "no card has timed" in ladder.page(None)
    assert "no card has timed" not in page
    assert "slow one" in ladder.chart(record)
    assert "no counter" not in ladder.chart(record)


def test_the_floor_of_a_case():
    """128 × 128 tiles of one head of 16 k keys: 16384; causal, with whole tiles on the diagonal: 8256."""
    full = ladder.Case("", 1, 16384, 1, 128, False)
    assert full.floor == 16384 * 2048 / 132
    assert full._replace(causal=True).floor == 8256 * 2048 / 132
    assert full._replace(causal=True, keys=64).floor == 2 * 8256 * 2048 / 132


@pytest.mark.parametrize("name", [name for name in drawn.DRAWN if name != "timelines.cdna"])
def test_figures_are_current(name):
    """Those of cdna: tests/unit/machine_code/test_gcn_page.py, which compiles and simulates the same for its tables."""
    if name == "measured.benchmarks":
        version = pytest.importorskip("matplotlib").__version__
        if f"Matplotlib v{version}," not in (DOCS / "figures" / "measured" / "benchmarks.svg").read_text():
            pytest.skip(f"drawn by another matplotlib than {version}")
    if name.startswith("timelines."):
        pytest.importorskip("triton")
    for path, text in drawn.files(name).items():
        assert path.read_text() == text, f"{path.name}: run `make docs`"


def test_every_figure_is_drawn_by_a_script():
    scripts = "".join(path.read_text() for path in (DOCS / "figures").rglob("*.py"))
    masks = importlib.import_module("docs.figures.masks.masks").FIGURES
    for path in (DOCS / "figures").rglob("*.svg"):
        by_name = f'"{path.name}"' in scripts or f'"{path.stem}"' in scripts or path.stem in masks
        assert by_name or path.stem.startswith("cdna-"), f"no script draws {path.name}"


def test_cycles_in_a_page_are_those_of_its_picture():
    pages = "".join(path.read_text() for path in (DOCS / "kernels").glob("*.md"))
    titles = "".join(path.read_text() for path in (DOCS / "figures").rglob("*.svg"))
    named = [number.replace(",", "") for number in re.findall(r"of\s+the\s+([\d,]+)\s+cycles\s+of", pages)]
    assert named
    for cycles in named:
        assert f" of {cycles}, by a model" in titles, f"no picture is of {cycles} cycles"


def test_a_tile_of_rows_takes_each_of_its_key_tiles_once():
    for span in concepts.spans():
        masked, full = concepts.order(span)
        tiles = range(span[0] // concepts.TILE, -(-span[3] // concepts.TILE))
        assert sorted(masked + full) == list(tiles)
        assert all(span[1] <= t * concepts.TILE and (t + 1) * concepts.TILE <= span[2] for t in full)
        assert masked
        assert full
