"""The benchmark page says what the committed records say."""

import json

from docs.figures.benchmarks import COUNTERS, DOCS, RECORDS, TIMES, page


def test_the_page_is_made_from_the_records() -> None:
    times, counters = (json.loads((RECORDS / name).read_text()) for name in (TIMES, COUNTERS))
    assert (DOCS / "benchmarks.md").read_text() == page(times, counters), "run `make docs`"


def test_a_changed_record_changes_the_page() -> None:
    times, counters = (json.loads((RECORDS / name).read_text()) for name in (TIMES, COUNTERS))
    before = page(times, counters)
    times["cases"][0]["results"]["cudnn"]["tflops"] += 100
    assert page(times, counters) != before
