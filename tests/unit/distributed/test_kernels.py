"""What rings ask of kernels beyond ordinary calls, in the simulator: masks and scores of a part, views that merge."""

import pytest
import torch

import warpattn as wa
from warpattn.distributed.place import Chunks, Distance, Pages, PlacedMask, PlacedScore
from warpattn.language.traced import Lengths

pytest.importorskip("triton")

CPU = torch.device("cpu")
SM90 = "simulate:sm90"
CHUNKS = Chunks.at(2, 256, 128, Lengths(512, 512), CPU)
DOCUMENTS = wa.Document(torch.arange(512, dtype=torch.int32) // 200)


def drawn(*shape: int) -> torch.Tensor:
    """A random fp16 operand."""
    return torch.randn(shape, dtype=torch.float32).half()


@pytest.mark.full
@pytest.mark.parametrize(
    ("mask", "score"),
    [
        (PlacedMask.of(wa.Causal() & wa.SlidingWindow(200) & DOCUMENTS, CHUNKS), PlacedScore.of(wa.ALiBi(4), CHUNKS)),
        (PlacedMask.of(wa.SlidingWindow(100), Distance(64)), None),
    ],
)
def test_masks_and_scores_of_a_part(mask, score):
    q, k, v = (drawn(1, 128, 2, 64) for _ in range(3))
    right = wa.attention(q, k, v, mask=mask, score=score, return_lse=True)
    found = wa.attention(q, k, v, mask=mask, score=score, return_lse=True, backend=SM90)
    torch.testing.assert_close(found, right, rtol=2e-3, atol=2e-3)
    assert (right[0] != 0).any()


@pytest.mark.full
def test_pages_that_ranks_share():
    table, lengths = torch.arange(4, dtype=torch.int32)[None], torch.tensor([200], dtype=torch.int32)
    kv, q = wa.PagedKV(drawn(8, 64, 2, 64), drawn(8, 64, 2, 64), table, lengths), drawn(1, 2, 2, 64)
    places = Pages(torch.tensor([390], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), 64, 2)
    tail = {"mask": PlacedMask.of(wa.SlidingWindow(150), places), "score": PlacedScore.of(wa.ALiBi(2), places)}
    right, found = wa.attention_paged(q, kv, **tail), wa.attention_paged(q, kv, **tail, backend=SM90)
    torch.testing.assert_close(found, right, rtol=2e-3, atol=2e-3)
    assert (right != 0).any()


@pytest.mark.full
def test_views_of_rows_merge_into_a_view():
    outs, lses = [drawn(2, 64, 2, 64) for _ in range(2)], [torch.randn(2, 2, 64) for _ in range(2)]
    pairs = [(out[:, 32:], lse[..., 32:]) for out, lse in zip(outs, lses, strict=True)]
    into = torch.full((2, 64, 2, 64), torch.nan, dtype=torch.float16)
    found = wa.merge_states(pairs, out=into[:, 32:], backend=SM90)
    torch.testing.assert_close(found, wa.merge_states(pairs), rtol=2e-3, atol=2e-3)
    assert into[:, :32].isnan().all() and not into[:, 32:].isnan().any()
