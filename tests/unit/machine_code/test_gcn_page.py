"""The tables and timelines of docs/kernels/cdna.md are those of the kernels of today."""

import pytest

pytest.importorskip("triton")

from docs.figures.timelines import cdna


def test_the_page_has_the_figures_of_today():
    for path, text in cdna.files().items():
        assert path.read_text() == text, f"{path.name}: run `make docs`"
    page = cdna.PAGE.read_text()
    assert all(cdna.table(arch) in page for arch in cdna.ARCHS)


@pytest.mark.parametrize("arch", cdna.ARCHS)
def test_slots_beat_one_slot_in_the_model(arch):
    one, _, slots = (cdna.measured(kind, arch) for kind in cdna.KINDS)
    assert slots.cycles < one.cycles / 1.5 and slots.waits < one.waits / 10
    assert all(cdna.simulated(kind, arch).clean for kind in cdna.KINDS)
