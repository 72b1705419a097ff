"""The benchmark page and the README say what the committed records say."""

import pytest

from docs.figures.measured import engine, speed
from docs.figures.measured.benchmarks import DOCS, page, records


def test_the_page_is_made_from_the_records() -> None:
    assert (DOCS / "benchmarks.md").read_text() == page(records()), "run `make docs`"


def test_the_chart_of_engines_and_the_page_of_vllm_are_made_from_the_record() -> None:
    for path, text in engine.files().items():
        assert path.read_text() == text, "run `make docs`"


@pytest.mark.parametrize(
    ("kind", "peer", "figure"),
    [("times", "cudnn", "tflops"), ("decode", "warpattn", "tb_s"), ("ragged", "dense", "tflops")],
)
def test_a_changed_record_changes_the_page(kind: str, peer: str, figure: str) -> None:
    found = records()
    before = page(found)
    found[kind]["cases"][0]["results"][peer][figure] += 100
    assert page(found) != before


def test_the_readme_has_the_rows_of_the_records() -> None:
    text, found = speed.README.read_text(), records()
    assert speed.table(found) in text, "run `make docs`"
    assert speed.in_readme(text, found) == text
    assert len(speed.rows(found)) == 8


def test_a_row_says_which_of_two_kernels_of_a_peer_is_faster() -> None:
    found = records()
    case = next(entry for entry in found["decode"]["cases"] if entry["case"]["name"] == "page16-32x4k-32/8")
    slow, fast = case["results"]["flashinfer"], case["results"]["flashinfer-tc"]
    assert slow["ms"]["median"] > fast["ms"]["median"]
    row = next(row for row in speed.rows(found) if row.title == speed.DECODE["page16-32x4k-32/8"])
    assert row.speeds["flashinfer"] == fast["speed"]["median"]
    slow["ms"]["median"] = fast["ms"]["median"] / 2
    row = next(row for row in speed.rows(found) if row.title == speed.DECODE["page16-32x4k-32/8"])
    assert row.speeds["flashinfer"] == slow["speed"]["median"]
