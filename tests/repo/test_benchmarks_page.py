"""The benchmark page and the README say what the committed records say."""

import pytest

from docs.figures.measured import engine, frameworks, speed
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


def framework_record(**results) -> dict:
    """A record of one case of SGLang by bench.frameworks."""
    cases = {"sglang: 32/8 heads x 128, 8 layers: decode 32 x 4k": {"tokens": 32, "results": results}}
    versions = {"sglang": "0.5.23", "torch": "2.11.0"}
    head = {"command": "python -m bench.frameworks", "date": "2026-11-26T20:00:00"}
    return head | {"versions": versions, "cases": cases}


def timed(ms: float, speed: float) -> dict:
    return {"status": "timed", "error": 0.0, "calls": 1, "ms": {"median": ms}, "speed": {"median": speed}}


def test_pages_of_frameworks_are_made_from_their_records() -> None:
    for path, text in frameworks.files().items():
        assert path.read_text() == text, "run `make docs`"
        assert text.count(frameworks.START) == text.count(frameworks.END) == 1


def test_a_record_of_frameworks_is_a_row_of_the_page() -> None:
    record = framework_record(triton=timed(1.0, 2.0), warpattn=timed(0.5, 1.0))
    text = frameworks.section("sglang", {"H100": [record]})
    assert "One H100, sglang 0.5.23, torch 2.11.0:" in text
    row = "| 32/8 heads × 128, 8 layers, decode 32 × 4k | `triton` "
    row += "| 1 ms (32,000 tokens/s) | 0.5 ms (64,000 tokens/s) |"
    assert f"{row} 2.00 × |" in text and "`python -m bench.frameworks`, 2026-11-26." in text
    assert frameworks.section("diffusers", {"H100": [record]}) is None
    page = frameworks.PAGES["sglang"].read_text()
    assert frameworks.in_page(page, None) == page
    changed = frameworks.in_page(page, text)
    assert row in changed and frameworks.in_page(changed, text) == changed
    head, _, _ = page.partition(frameworks.START)
    assert changed.startswith(head)


def test_the_later_record_of_a_case_counts() -> None:
    old, new = (framework_record(triton=timed(ms, ms), warpattn=timed(1.0, 1.0)) for ms in (3.0, 2.0))
    found = frameworks.rows("sglang", [old, new])
    assert [line[-9:] for line in found[2:]] == [" 2.00 × |"]


def test_what_was_not_timed_is_a_sentence_of_the_page() -> None:
    wrong = {"status": "wrong", "reason": "its error is 1 of the largest value"}
    found = frameworks.rows("sglang", [framework_record(triton=wrong, warpattn=timed(1.0, 1.0))])
    sentence = "`triton` was not timed (wrong: its error is 1 of the largest value)."
    assert found[-1].endswith(f"decode 32 × 4k: {sentence}")
