"""Spans of combinations at their borders, by hand: where two parts touch, are empty, or reach an end of the keys."""

import pytest

import warpattn.masks as wm

LENS = wm.Lengths(1, 20)
NOTHING = (5, 0, 0, 5)


class Fixed(wm.Mask):
    """One span for all rows: first, full_lo, full_hi, last."""

    def __init__(self, span: tuple[int, int, int, int]) -> None:
        self.span = wm.Span(*span)

    def keep(self, b, h, q, k, lens=None):
        return (k >= self.span.first) & (k < self.span.last)

    def kv_span(self, b, h, q_lo, q_hi, lens):
        return self.span


def bounds(mask: wm.Mask) -> tuple[int, ...]:
    return tuple(int(x) for x in mask.kv_span(0, 0, 0, 1, LENS))


@pytest.mark.parametrize(
    ("one", "other", "both", "either"),
    [
        ((0, 2, 6, 8), (4, 6, 9, 12), (4, 6, 6, 8), (0, 2, 9, 12)),  # full parts touch
        ((0, 2, 6, 8), (4, 5, 9, 12), (4, 5, 6, 8), (0, 2, 9, 12)),  # overlap
        ((0, 2, 6, 8), (7, 7, 10, 12), (7, 7, 6, 8), (0, 2, 6, 12)),  # a gap: the longer one
        ((0, 2, 4, 8), (7, 7, 10, 12), (7, 7, 4, 8), (0, 7, 10, 12)),
        ((0, 2, 6, 8), (9, 6, 6, 12), (9, 6, 6, 8), (0, 2, 6, 12)),  # no full part
        ((3, 4, 6, 8), NOTHING, None, (3, 4, 6, 8)),
        ((3, 4, 6, 8), (1, 0, 0, 1), None, (3, 4, 6, 8)),
        ((3, 4, 6, 8), (15, 0, 0, 15), None, (3, 4, 6, 8)),
        ((3, 4, 6, 8), (2, 15, 1, 9), (3, 15, 1, 8), (2, 4, 6, 9)),
        ((3, 4, 12, 13), (2, 9, 7, 9), (3, 9, 7, 9), (2, 4, 12, 13)),
        ((3, 4, 40, 50), (2, 9, 9, 9), (3, 9, 9, 9), (2, 4, 20, 20)),  # keys end at 20
    ],
)
def test_intersections_and_unions(one, other, both, either) -> None:
    """A part that sees nothing adds nothing to a union; full parts that touch are one."""
    for x, y in ((one, other), (other, one)):
        union = bounds(Fixed(x) | Fixed(y))
        assert union == either
        if both is not None:
            assert bounds(Fixed(x) & Fixed(y)) == both


@pytest.mark.parametrize(
    ("span", "complement"),
    [
        ((0, 0, 5, 8), (5, 8, 20, 20)),  # begins with a full part
        ((0, 1, 5, 8), (0, 8, 20, 20)),  # does not
        ((12, 15, 20, 20), (0, 0, 12, 15)),  # ends with one
        ((12, 15, 19, 20), (0, 0, 12, 20)),
        ((0, 0, 20, 20), (20, 0, 0, 0)),  # all keys are hidden
        ((8, 9, 10, 12), (0, 0, 8, 20)),  # as many before as after: those before
        ((8, 9, 10, 11), (0, 11, 20, 20)),  # the longer part
        (NOTHING, (0, 0, 20, 20)),
    ],
)
def test_complements(span, complement) -> None:
    assert bounds(~Fixed(span)) == complement
