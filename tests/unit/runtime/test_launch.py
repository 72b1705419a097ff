"""The host path with a driver that only takes notes: what is launched, with which parameters, and what is copied."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import warpattn as wa
from tests.launches import small_call
from tests.sim.backward import Case, launches_of
from tests.unit.runtime.card import B, D, H, S, make_card, misaligned, normal, written  # noqa: F401 (a fixture)
from warpattn.problem import Call, operands, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Launch
from warpattn.runtime import bound_launches, cuda, execute
from warpattn.runtime.launches import list_launches
from warpattn.runtime.tile_counters import SLAB, TileCounters
from warpattn.sequences import Dense

CAPTURE_OF = cuda.capture_of  # before the fixture replaces it
pytestmark = pytest.mark.usefixtures("card")


def test_parameters_of_a_launch(card):
    q, k, v, sinks = normal(), normal(B, 30, 2, D), normal(B, 30, 2, D), torch.randn(H)
    out, lse = wa.attention(q, k, v, sinks=sinks, scale=0.25, return_lse=True)
    (note,) = card.launches
    assert note["maps"] == [x.data_ptr() for x in (q, k, v, out)]
    assert (note["lse"], note["sinks"], note["scale"], note["stream"]) == (lse.data_ptr(), sinks.data_ptr(), 0.25, 0)
    assert note["shape"] == [S, 30, H, 2, 1, B * H, B * H]
    assert note["grid"] == B * 2, "a tile holds both query heads of a key head"
    assert lse.shape == (B, H, S) and lse.dtype == torch.float32
    assert written(out) and out.shape == q.shape and out.is_contiguous()


GRADIENTS = {
    "persistent": Case(64, 1700, dim=64, heads=8, heads_kv=8),
    "persistent, wide": Case(64, 1700, dim=192, dim_v=128, heads=8, heads_kv=8),
    "persistent, deterministic": Case(64, 1700, dim=64, heads=8, heads_kv=8, deterministic=True),
    "deterministic": Case(64, 1700, dim=192, dim_v=128, heads=8, heads_kv=8, deterministic=True),
    "wide": Case(64, 900, dim=256, heads=8, heads_kv=8),
    "ragged and wide": Case(0, 0, lengths=((8, 40),) * 30, dim=256, dim_v=128, heads=8, heads_kv=8),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_card_gets_every_program_of_a_plan(name, card, monkeypatch):
    grids = []
    monkeypatch.setattr(cuda, "launch_call", lambda function, grid, *size, pdl: grids.append(grid[0]))
    launches = launches_of(GRADIENTS[name])
    for launch in launches:
        bound_launches.BoundLaunch(launch, 0)
    assert grids == [launch.grid[0] for launch in launches]


def test_half_tiles_have_two_programs_on_an_sm(card, monkeypatch):
    grids = []
    monkeypatch.setattr(cuda, "launch_call", lambda function, grid, *size, pdl: grids.append(grid[0]))
    checked, x, sequence = small_call("sm90", (128, 128), rows=(300, 300), heads=(64, 64))
    (launch,) = list_launches(checked, x, sequence)
    bound_launches.BoundLaunch(launch, 0)
    assert launch.key[0].ctas == 2 and grids == [2 * ARCHS["sm90"].processors]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch imports decompositions
def test_a_forward_mode_tangent_is_refused_in_a_repeated_call_too(card):
    q, k, v = normal(), normal(B, 30, 2, D), normal(B, 30, 2, D)
    wa.attention(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(wa.AttentionError, match="q carries a forward-mode tangent"):
            wa.attention(dual, k, v)


def test_programs_that_wait_for_each_other_have_to_run_at_once(card, monkeypatch):
    """Deterministic gradients without a mask: each CTA begins beside its own keys, and the turns go round."""
    tiles = 14
    main = next(x for x in launches_of(GRADIENTS["persistent, deterministic"]) if x.name == "sm90.backward")
    monkeypatch.setattr(bound_launches, "processors", lambda device: tiles)
    bound_launches.BoundLaunch(main, 0)
    monkeypatch.setattr(bound_launches, "processors", lambda device: tiles - 1)
    with pytest.raises(wa.AttentionError, match="14 programs wait for each other, and this device runs 13 at once"):
        bound_launches.BoundLaunch(main, 0)


def test_only_persistent_kernels_count_tiles():
    launch = Launch("sm90.kernel", "sm90", (), lambda: None, {}, (8,), {}, tile_counter="counter")
    with pytest.raises(ValueError, match="needs a program of its own"):
        bound_launches.BoundLaunch(launch, 0)


COPIED = {
    "expanded": lambda: normal(1, S, H, D).expand(B, S, H, D),
    "odd rows": lambda: normal(B, S, H, D + 1)[..., :D],
    "odd start": lambda: normal(B, S, H, D + 8)[..., 1 : D + 1],
    "head dim not last": lambda: normal(B, S, D, H).transpose(2, 3),
    "misaligned": lambda: misaligned(normal()),
}


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_operands_that_do_not_fit_are_copied_once(name, operand, card, monkeypatch):
    copies = []
    packed = operands.packed
    monkeypatch.setattr(operands, "packed", lambda x: copies.append(packed(x)) or copies[-1])
    tensors = {"q": normal(), "k": normal(), "v": normal()} | {operand: COPIED[name]()}
    wa.attention(**tensors)
    (copy,) = copies
    assert torch.equal(copy, tensors[operand]) and operands.addressable(copy)
    assert card.launches[0]["maps"]["qkv".index(operand)] == copy.data_ptr()
    for other in set("qkv") - {operand}:
        assert card.launches[0]["maps"]["qkv".index(other)] == tensors[other].data_ptr()


@pytest.mark.parametrize("name", [name for name in COPIED if name != "expanded"])
def test_outputs_that_do_not_fit_are_computed_aside(name, card):
    q, k, v = normal(), normal(), normal()
    for _ in range(2):
        out = COPIED[name]()
        assert wa.attention(q, k, v, out=out) is out
        assert written(out) and card.launches[-1]["maps"][3] != out.data_ptr()


def test_a_call_like_one_before_has_an_output_of_the_values_head_dim(card):
    for count in (1, 2):
        out = wa.attention(normal(), normal(), normal(B, S, H, 32))
        assert out.shape == (B, S, H, 32) and written(out) and len(card.launches) == count
    assert card.examined == 1


def test_single_elements_may_have_any_stride():
    x = normal(1, 1, 1, D).as_strided((1, 1, 1, D), (0, 3, 5, 1))
    assert operands.addressable(x)
    assert not operands.addressable(normal(2, 1, 1, D).as_strided((2, 1, 1, D), (0, 3, 5, 1)))


def score_of(key):
    """What a kernel's key says of its score."""
    _, (_, score, *_), *_ = key[2]
    return score


@pytest.mark.parametrize(("scale", "by_score"), [(None, False), (0.5, False), (0.0, True), (-1.0, True), (1e-40, True)])
def test_scales_that_are_not_positive_are_applied_to_the_scores(scale, by_score, card):
    q = normal()
    wa.attention(q, q, q, scale=scale)
    (key,) = card.keys
    assert (score_of(key) is not None) == by_score
    assert card.launches[0]["scale"] == pytest.approx(D**-0.5 if scale is None else scale, rel=1e-6)


def test_scores_take_their_own_path_for_every_scale(card):
    q = normal()
    for scale in (1.0, -1.0):
        wa.attention(q, q, q, scale=scale, score=wa.SoftCap(2.0))
    assert len(card.keys) == 1 and score_of(card.keys[0]) is not None


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, 2.0, 3.0, 4.0])])
def test_without_keys_nothing_is_launched(sinks, card):
    q, k = normal(), normal(B, 0, H, D)
    for _ in range(2):
        out, lse = wa.attention(q, k, k, sinks=sinks, return_lse=True, out=torch.full_like(q, torch.nan))
        assert (out == 0).all()
        expected = torch.full((B, H, S), -torch.inf) if sinks is None else sinks[None, :, None].expand(B, H, S)
        assert torch.equal(lse, expected)
    assert not card.launches


def test_without_queries_nothing_is_launched(card):
    out, lse = wa.attention(normal(B, 0, H, D), normal(), normal(), return_lse=True)
    assert out.shape == (B, 0, H, D) and lse.shape == (B, H, 0) and not card.launches


def test_sinks_are_given_as_fp32(card, monkeypatch):
    kept = []
    logits = operands.logits
    monkeypatch.setattr(operands, "logits", lambda x: kept.append(logits(x)) or kept[-1])
    sinks = torch.randn(2 * H).to(torch.bfloat16)[::2]
    wa.attention(normal(), normal(), normal(), sinks=sinks)
    assert kept[0].dtype == torch.float32 and kept[0].is_contiguous() and torch.equal(kept[0], sinks.float())
    assert card.launches[0]["sinks"] == kept[0].data_ptr()


def test_calls_with_sinks_of_16_bits_are_validated_once(card, monkeypatch):
    validated, values = [], []
    monkeypatch.setattr(execute, "validate", lambda call: validated.append(call) or validate(call))
    monkeypatch.setattr(execute, "logits", lambda x: values.append(operands.logits(x)) or values[-1])
    q = normal()
    for sinks in torch.randn(3, H).to(torch.bfloat16):
        wa.attention(q, q, q, sinks=sinks)
        assert not values or torch.equal(values[-1], sinks.float())
    assert len(validated) == 1 and [note["sinks"] for note in card.launches[1:]] == [x.data_ptr() for x in values]


def test_streams_have_counters_of_their_own(card):
    q = normal()
    for stream in (0, 5, 0, 6, 5):
        card.stream = stream
        wa.attention(q, q, q)
    zero, five, again, six, five_again = (note["counter"] for note in card.launches)
    assert zero == again and five == five_again and len({zero, five, six}) == 3
    assert [note["stream"] for note in card.launches] == [0, 5, 0, 6, 5]


def captured(card, launches):
    """Addresses of the counters of so many captured launches."""
    q, before = normal(), len(card.launches)
    for _ in range(launches):
        wa.attention(q, q, q)
    return [note["counter"] for note in card.launches[before:]]


def test_captured_launches_have_a_counter_for_each_stream_of_a_capture(card):
    """Launches that follow each other in a graph share one; a graph may be replayed beside all others."""
    (eager,) = captured(card, 1)
    card.capturing = True
    found = {}
    for card.capture, card.stream in ((1, 7), (2, 7), (1, 8), (2, 0)):
        (found[card.capture, card.stream],) = set(captured(card, 5))
    assert len({eager, *found.values()}) == 5 and all(found.values())
    card.capture, card.stream = 1, 7
    assert set(captured(card, 3)) == {found[1, 7]}


@pytest.mark.parametrize("known", [True, False])
def test_captures_after_all_counters_are_taken(known, card):
    """More captures than cells, and more launches than cells in captures that the driver gives no number: the launches
    that get none have one in the graph's memory, which is 0."""
    captured(card, 1)
    card.capturing = True
    addresses = []
    for number in range(SLAB + 20):
        card.capture = number + 1 if known else 0
        addresses += captured(card, 1)
    mine = addresses[: SLAB - 1]
    assert len(set(mine)) == len(mine) and not set(mine) & set(addresses[SLAB - 1 :]) and all(addresses)


def test_many_launches_of_few_captures_leave_counters(card):
    """A model of 80 layers in 67 graphs has 5,360 launches."""
    captured(card, 1)
    card.capturing = True
    counters = bound_launches.tile_counters(0)
    before = len(counters._free)
    for card.capture in range(1, 68):
        captured(card, 80)
    assert before - len(counters._free) == 67


def test_the_number_of_a_capture_is_what_the_driver_says(monkeypatch):
    class Driver:
        def cuStreamGetCaptureInfo_v2(self, stream, status, number, *others):
            assert stream.value == 11 and others == (None, None, None)
            status._obj.value, number._obj.value = self.status, 2**40
            return self.code

    driver = Driver()
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "capture_of", CAPTURE_OF)
    for driver.status, driver.code, number in ((1, 0, 2**40), (0, 0, 0), (2, 0, 0), (1, 911, 0)):
        assert cuda.capture_of(11) == number


def test_a_counter_of_the_graph_itself():
    counters = TileCounters(torch.device("cpu"))
    address, kept = counters.of_capture(1, 0)
    assert kept is not None and kept.data_ptr() == address and kept.dtype == torch.int32 and int(kept) == 0
    counters.of_stream(0)
    address, kept = counters.of_capture(1, 0)
    assert kept is None and address != counters.of_stream(0)


def test_eager_launches_leave_counters_for_captures():
    counters = TileCounters(torch.device("cpu"))
    addresses = [counters.of_stream(stream) for stream in range(3 * SLAB)]
    assert len(set(addresses)) == len(addresses) and len(counters._free) > SLAB // 4
    assert all(bool((slab == 0).all()) for slab in counters._slabs)


def test_a_thread_without_a_context_gets_one(card):
    q = normal()
    wa.attention(q, q, q)
    before = card.bound
    card.errors = [cuda.INVALID_CONTEXT]
    assert written(wa.attention(q, q, q))
    assert card.bound == before + 1 and len(card.launches) == 2


def test_driver_errors_are_raised(card, monkeypatch):
    def check(code: int, call: str) -> None:
        raise RuntimeError(f"{call} failed with {code}")

    monkeypatch.setattr(cuda, "check", check)
    q = normal()
    card.errors = [700]
    with pytest.raises(RuntimeError, match=r"launch of sm90\.prefill failed with 700"):
        wa.attention(q, q, q)


def test_threads_get_their_own_addresses(card):
    """The parameter block is shared; a launch must not see another thread's addresses."""
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(200):
                q, k, v = normal(1, 3, 1, 64), normal(1, 3, 1, 64), normal(1, 3, 1, 64)
                out = torch.empty_like(q)
                wa.attention(q, k, v, out=out)
                mine = [note for note in list(card.launches) if note["maps"][3] == out.data_ptr()]
                if [x.data_ptr() for x in (q, k, v)] != mine[-1]["maps"][:3] or not written(out):
                    wrong.append(mine)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_that_several_parameters_lead_to_counts_once():
    """Such as copies of keys, which one launch writes and the next reads by a tensor map for each part."""
    bound, x, other = object.__new__(bound_launches.BoundLaunches), torch.zeros(4, 8), torch.zeros(3)
    bound.workspace = [x, x.transpose(0, 1), x[:, 4:], other]
    assert bound.workspace_bytes == 4 * 8 * 4 + 3 * 4


def test_remembered_calls_keep_no_more_memory_than_a_bound(card, monkeypatch):
    """Such as copies of 8-bit keys, of every length that a caller has: all are planned anew beyond it."""
    monkeypatch.setattr(execute, "MOST_BYTES", 1000)
    monkeypatch.setattr(execute, "_held", 0)
    kept = []
    for length, size in ((8, 600), (16, 300), (24, 200), (32, 900)):
        q = normal(1, length, H, D)
        call = Call(q, q.clone(), q.clone(), Dense())
        bound = SimpleNamespace(workspace=[object()], workspace_bytes=size, follow_call=lambda *_: None)
        operands_of_call = operands.Operands(q, call.k, call.v, torch.empty_like(q), None, None)
        execute.remember(call, validate(call), operands_of_call, bound)
        kept.append(len(execute._known))
    assert kept == [1, 2, 1, 1]
    execute.forget()
    assert not execute._known and execute._held == 0
