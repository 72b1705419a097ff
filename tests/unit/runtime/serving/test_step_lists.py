"""Layers of a step share a plan's lists; whatever may have changed the step's lengths makes them anew."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.unit.runtime.serving.test_step_plan import a_workspace, eight_bit, on_card, pages_of, step  # noqa: F401
from tests.unit.runtime.test_dispatch import driver  # noqa: F401  a fixture
from warpattn.runtime import cuda

WHOLE, LAYER = ["order", "prefill_varlen", "decode"], ["prefill_varlen", "decode"]
COPYING = ["places", "copy_places", "order", "prefill_varlen", *WHOLE]
COPYING_LAYER = ["copy_places", "prefill_varlen", *LAYER]


class Layers:
    """Layers of a model with a plan in common, on a card that only notes launches."""

    def __init__(self, queries=(30, 1), keys=(40, 64), **options) -> None:
        pages = [x.contiguous() for x in pages_of(torch.bfloat16)]
        self.q, self.kv, self.seq = step(queries, keys, pages, torch.bfloat16)
        self.kv = eight_bit(self.kv) if "workspace" in options else self.kv
        self.pages = [(self.kv.k_pages.clone(), self.kv.v_pages.clone()) for _ in range(3)]
        self.plan = wa.StepPlan(self.q, self.kv, self.seq, mask=wa.Causal(), **options)
        self.names = {launch.call: launch.name.removeprefix("sm90.") for launch in self.plan._bound.each}

    def attend(self, layer: int, of: object, **changed) -> list[str]:
        """Names of what a layer launches in step `of`."""
        seq, fields = changed.pop("seq", self.seq), dict(zip(("k_pages", "v_pages"), self.pages[layer], strict=True))
        self.plan(self.q, self.kv.with_fields(**fields, **changed), seq, step=of)
        return [self.names[call] for call in self.plan._bound.calls]


@pytest.fixture
def layers(on_card) -> Layers:  # noqa: F811
    return Layers()


def test_the_first_layer_of_a_step_makes_its_lists(layers):
    for of in (object(), object(), 7.5):
        assert [layers.attend(i, of) for i in range(3)] == [WHOLE, LAYER, LAYER]


def test_without_a_step_every_layer_makes_lists(layers):
    assert [layers.attend(i, None) for i in range(3)] == [WHOLE] * 3


def test_a_layer_that_attends_again_begins_a_step(layers):
    """Lengths may have changed in place."""
    of = object()
    assert [layers.attend(i, of) for i in (0, 1, 0, 1, 2, 1)] == [WHOLE, LAYER, WHOLE, LAYER, LAYER, WHOLE]


def test_steps_that_alternate_share_nothing(layers):
    one, other = object(), object()
    assert [layers.attend(i, of) for i in range(3) for of in (one, other)] == [WHOLE] * 6


def test_other_offsets_lengths_or_sequences(layers):
    of = object()
    assert layers.attend(0, of) == WHOLE
    assert layers.attend(1, of, lengths=layers.kv.lengths.clone()) == WHOLE
    assert layers.attend(2, of, seq=wa.Ragged(layers.seq.cu_q.clone())) == WHOLE
    fewer = {"lengths": layers.kv.lengths[:1], "block_table": layers.kv.block_table[:1]}
    assert layers.attend(0, of, **fewer, seq=wa.Ragged(layers.seq.cu_q[:2])) == WHOLE
    assert layers.attend(1, of, **fewer, seq=wa.Ragged(layers.seq.cu_q[:2])) == LAYER
    assert layers.attend(2, of) == WHOLE


def test_other_tables_read_the_same_lists(layers):
    of = object()
    assert layers.attend(0, of) == WHOLE
    assert layers.attend(1, of, block_table=layers.kv.block_table.clone()) == LAYER


def test_streams_and_captures_make_lists_of_their_own(layers, monkeypatch):
    of = object()
    assert [layers.attend(i, of) for i in range(2)] == [WHOLE, LAYER]
    monkeypatch.setattr(cuda, "current_stream", lambda device: 6)
    assert [layers.attend(i, of) for i in range(2)] == [WHOLE, LAYER]
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    for capture in (3, 4):
        monkeypatch.setattr(cuda, "capture_of", lambda stream, capture=capture: capture)
        assert layers.attend(2, of) == WHOLE
        assert layers.attend(1, of) == LAYER
    monkeypatch.setattr(cuda, "capture_of", lambda stream: 0)  # unknown
    assert [layers.attend(i, of) for i in (0, 2)] == [WHOLE, WHOLE]
    monkeypatch.setattr(cuda, "is_capturing", lambda: False)
    assert layers.attend(1, of) == WHOLE


def test_a_failed_call_and_new_indices_make_lists_anew(layers):
    of = object()
    assert [layers.attend(i, of) for i in range(2)] == [WHOLE, LAYER]
    with pytest.raises(wa.AttentionError):
        layers.plan(layers.q.float(), layers.kv, layers.seq, step=of)
    assert layers.attend(2, of) == WHOLE
    layers.plan.update(layers.seq.cu_q, layers.kv.lengths, layers.kv.block_table)
    assert layers.attend(1, of) == WHOLE


def test_lists_of_copied_keys(on_card):  # noqa: F811
    """Lists that leave copied sequences out do not serve a step without copies, nor the other way around."""
    layers, of = Layers((1100, 1), workspace=a_workspace(2**20)), object()
    short = wa.Ragged(layers.seq.cu_q, max_q=511)
    assert [layers.attend(i, of) for i in range(2)] == [COPYING, COPYING_LAYER]
    assert [layers.attend(i, of, seq=short) for i in (2, 1)] == [WHOLE, LAYER]
    assert layers.attend(0, of) == COPYING


def test_a_plan_of_decode_has_no_lists(on_card):  # noqa: F811
    layers = Layers((1, 1))
    assert [layers.attend(i, object()) for i in (0, 1)] == [["decode"]] * 2


def test_on_the_cpu_a_step_changes_nothing():
    q, kv, seq = step((30, 1), (40, 64), pages_of())
    plan, of = wa.StepPlan(q, kv, seq), object()
    assert torch.equal(plan(q, kv, seq, step=of), plan(q, kv, seq))


@pytest.mark.parametrize("of", [None, object()])
@pytest.mark.parametrize("name", ["k_pages", "lengths", "block_table", "cu_q"])
def test_what_is_no_tensor_is_named(name, of, layers):
    seq, kv = layers.seq, layers.kv
    if name == "cu_q":
        seq = wa.Ragged(seq.cu_q.tolist())
    else:
        kv = kv.with_fields(**{name: getattr(kv, name).tolist()})
    with pytest.raises(wa.AttentionError, match=name):
        layers.plan(layers.q, kv, seq, step=of)
