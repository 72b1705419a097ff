"""The benchmark page says what the committed records say."""

import pytest

from docs.figures.benchmarks import DOCS, page, records


def test_the_page_is_made_from_the_records() -> None:
    assert (DOCS / "benchmarks.md").read_text() == page(records()), "run `make docs`"


@pytest.mark.parametrize(
    ("kind", "peer", "figure"),
    [("times", "cudnn", "tflops"), ("decode", "warpattn", "tb_s"), ("ragged", "dense", "tflops")],
)
def test_a_changed_record_changes_the_page(kind: str, peer: str, figure: str) -> None:
    found = records()
    before = page(found)
    found[kind]["cases"][0]["results"][peer][figure] += 100
    assert page(found) != before
