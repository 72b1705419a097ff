"""Which masks hide every key after the query's own, by their condition: kernels then test for no end of the keys."""

import pytest
import torch

pytest.importorskip("triton")

from warpattn.kernels.pieces.signature import hides_newer
from warpattn.masks import Causal, CustomMask, Lengths, Mask, Padding, Prefix, SlidingWindow

LENGTHS = torch.tensor([3])
NEWER = [
    Causal(),
    SlidingWindow(4),
    SlidingWindow(4) & Padding(LENGTHS),
    Padding(LENGTHS) & ~CustomMask(lambda b, h, q, k: k % 2 == 0) & Causal(),
    Causal() | SlidingWindow(2),
    CustomMask(lambda b, h, q, k: q > k),
    CustomMask(lambda b, h, q, k: (k < q) & (k > 0)),
]
OTHERS = [
    Causal(top_left=True),  # of more queries than keys the last ones see past the end
    SlidingWindow(4, 1),
    SlidingWindow(None, 3),
    Padding(LENGTHS),
    Prefix(LENGTHS) | Causal(),
    Causal() | Padding(LENGTHS),
    ~Causal(),
    CustomMask(lambda b, h, q, k: k <= h),
    CustomMask(lambda b, h, q, k: q <= k),
]


def sees_newer(mask: Mask) -> bool:
    """Whether a query at the end of 6 keys, or after some of 9 queries, sees a key after its own."""
    q, k = torch.arange(-3, 6)[:, None], torch.arange(12)[None, :]
    kept = torch.as_tensor(mask.keep(torch.tensor(0), torch.tensor(5), q, k, Lengths(9, 6)))
    return bool((kept & (k > q)).any())


@pytest.mark.parametrize("mask", NEWER, ids=range(len(NEWER)))
def test_masks_that_do(mask: Mask) -> None:
    assert hides_newer(mask.program().keep) and not sees_newer(mask)


@pytest.mark.parametrize("mask", OTHERS, ids=range(len(OTHERS)))
def test_masks_that_do_not(mask: Mask) -> None:
    assert not hides_newer(mask.program().keep) and sees_newer(mask)
