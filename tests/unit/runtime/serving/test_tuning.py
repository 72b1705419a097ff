"""`tune` on the stand-in card with a timer that knows its times: what wins, who uses it, and what is never chosen."""

import ctypes
import sys
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.unit.runtime.card import B, D, H, S, make_card, normal  # noqa: F401 (a fixture)
from tests.unit.runtime.serving.tuned_machine import (
    CARD,
    DECODE,
    SHAPE,
    Times,
    config_of,
    make_machine,  # noqa: F401 (a fixture)
    others,
    problem_of,
    row_of,
    write,
)
from warpattn.problem.launch import BUILT_IN, PlanOptions
from warpattn.runtime import bound_launches, compilers, cuda, kernel_cache
from warpattn.runtime.plan import plan
from warpattn.serving import tuning
from warpattn.serving.call_shape import CallShape, shapes_of
from warpattn.serving.layers import LargestStep, Layer

COMPILE_ALL = tuning.compile_all  # the stand-in machine has nothing to compile
OUT_BYTES = 2 * B * S * H * D


def test_the_winner_is_used_by_the_next_call_and_by_a_plan(machine):
    q, k, v = (normal() for _ in range(3))
    wa.attention(q, k, v)
    built_in, winner = machine[-1], others(SHAPE)[2]
    timer = Times(times={winner: 8.0})
    parts = []
    (found,) = wa.tune([SHAPE], timer=timer, rounds=3, progress=parts.append)
    assert timer.timed == [BUILT_IN, *others(SHAPE)] and parts == sorted(parts) and parts[-1] == 1.0
    assert found.row.candidate == winner and "1.25 x as fast as the built-in choice" in found.words
    wa.attention(q, k, v)
    assert machine[-1] == config_of(SHAPE, winner) != built_in
    count = len(machine)
    wa.attention(q, k, v)
    assert len(machine) == count  # repeated: nothing is planned
    assert f"because tuned on {CARD}, " in str(plan(problem_of(SHAPE)))
    assert plan(problem_of(SHAPE)).choice.config == machine[-1]
    wa.attention(q[:, :19].contiguous(), k, v)
    assert machine[-1] == built_in  # another shape


def test_captured_candidates_share_the_counter_of_their_stream(card, monkeypatch):
    """Counters of captures are few: with one each, late candidates would clear theirs in every launch."""
    counters = bound_launches.tile_counters(-1)
    before = counters.of_stream(card.stream)

    class Captured(Times):
        def microseconds(self, calls, rounds, progress):
            free, card.capturing, card.launches[:] = list(counters._free), True, []
            for one in (one for each in calls.values() for one in each):
                one()
            card.capturing = False
            assert counters._free == free
            return super().microseconds(calls, rounds, progress)

    wa.tune([SHAPE], timer=Captured())
    assert len(card.launches) > len(others(SHAPE)) and {note["counter"] for note in card.launches} == {before}


@pytest.mark.parametrize(("us", "wins"), [(9.9, False), (9.86, False), (9.8, True), (10.5, False)])
def test_less_than_the_noise_wins_nothing(us, wins, machine):
    name = others(SHAPE)[1]
    (found,) = wa.tune([SHAPE], timer=Times(times={name: us} | dict.fromkeys(set(others(SHAPE)) - {name}, 11.0)))
    assert (found.row.candidate == name) == wins
    assert wins or "the built-in choice is the best of" in found.words
    wa.attention(normal(), normal(), normal())
    assert (machine[-1] == config_of(SHAPE, name)) == wins


@pytest.mark.parametrize("writes", ["other bytes", "nothing"])
def test_a_wrong_candidate_is_named_and_never_chosen(writes, card, machine, monkeypatch):
    wrong, right = others(SHAPE)[:2]

    def launch_call(function, *size, pdl):
        inner = card.launch_call(function, *size, pdl=pdl)
        spoil = machine[-1] == config_of(SHAPE, wrong)

        def launch(stream):
            code = inner(stream) if writes == "other bytes" or not spoil else 0
            if spoil and writes == "other bytes":
                ctypes.memset(card.launches[-1]["maps"][3], 0x41, OUT_BYTES)
            return code

        return launch

    monkeypatch.setattr(cuda, "launch_call", launch_call)
    timer = Times(times={wrong: 1.0, right: 8.0})
    (found,) = wa.tune([SHAPE], timer=timer)
    assert found.row.candidate == right and wrong not in timer.timed
    assert "its output differs by" in found.row.refused[wrong]


def test_a_candidate_that_fails_is_named_and_a_built_in_choice_that_fails_is_an_error(card, machine, monkeypatch):
    one = others(SHAPE)[0]
    real = tuning._bound
    monkeypatch.setattr(tuning, "_bound", lambda inputs, name: ([], "no memory") if name == one else real(inputs, name))
    (found,) = wa.tune([SHAPE], timer=Times(times={one: 1.0}))
    assert found.row.refused == {one: "no memory"} and found.row.candidate == BUILT_IN
    monkeypatch.setattr(tuning, "_bound", lambda inputs, name: ([], "no memory"))
    with pytest.raises(wa.AttentionError, match="the built-in configuration fails: no memory"):
        wa.tune([SHAPE], timer=Times())


def test_a_difference_beyond_rounding_is_wrong():
    want = torch.randn(64, 64).bfloat16()
    assert tuning.difference(want, want) == ""
    assert tuning.difference((want.float() * 1.001).bfloat16(), want) == ""
    one = want.clone()
    one[3, 5] += 1
    assert "differs" in tuning.difference(one, want)
    assert "nan" in tuning.difference(one.fill_(torch.nan), want)
    assert "differs" in tuning.difference(want, torch.zeros_like(want))


def test_plans_made_before_keep_what_they_were_made_with(machine):
    q, kv = torch.zeros(2, 1, 8, D, dtype=torch.bfloat16), paged()
    before = wa.DecodePlan(q, kv, mask=wa.Causal())
    bound, old = before._bound, machine[-1]
    name = next(x for x in others(DECODE) if config_of(DECODE, x) != old)
    write(row_of(DECODE, name))
    assert before._bound is bound
    wa.DecodePlan(q, kv, mask=wa.Causal())
    assert machine[-1] == config_of(DECODE, name)


def paged():
    pages = torch.zeros(128, 16, 2, D, dtype=torch.bfloat16)
    table_of_pages = torch.arange(128, dtype=torch.int32).view(2, 64)
    return wa.PagedKV(pages, pages.clone(), table_of_pages, torch.full((2,), 1024, dtype=torch.int32))


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"kv_ready_before_dependency": True}], ids=str)
def test_plans_with_options_are_not_tuned(options, machine):
    q = torch.zeros(2, 1, 8, D, dtype=torch.bfloat16)
    wa.DecodePlan(q, paged(), mask=wa.Causal(), **options)
    before = machine[-1]
    for name in others(DECODE):
        write(row_of(DECODE, name))
        wa.DecodePlan(q, paged(), mask=wa.Causal(), **options)
        assert machine[-1] == before


def test_simulated_calls_are_not_tuned():
    checked = SHAPE.planned().checked
    name = others(SHAPE)[0]
    write(row_of(SHAPE, name))
    launches = [
        tuning.list_launches(replace(checked, backend=backend), SHAPE.planned().operands, wa.Dense())[0].key[0]
        for backend in ("sm90", "simulate:sm90")
    ]
    assert launches[0] == config_of(SHAPE, name) != launches[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"what": []}, "what is "), ({"what": 3}, "what is 3"),
        ({"what": [SHAPE, 3]}, "it must be a transformers config"),
        ({"what": [SHAPE], "largest": LargestStep()}, "largest is given with shapes"),
        ({"what": [SHAPE], "largest": 5}, "largest is 5"), ({"what": [SHAPE], "timer": 3}, "timer is 3"),
        ({"what": [SHAPE], "progress": 3}, "progress is 3"), ({"what": [SHAPE], "rounds": 0}, "rounds is 0"),
        ({"what": [SHAPE], "processes": 0}, "processes is 0"),
        ({"what": [replace(SHAPE, layer=Layer(H, H, D, D, torch.float32))]}, "float32"),
        ({"what": [replace(SHAPE, layer=Layer(H, H, 1024, 64))]}, "1024"),
        ({"what": [SHAPE], "timer": None}, "has no card; tune measures on CUDA capability 9.0"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, message):
    with pytest.raises(wa.AttentionError, match=message):
        wa.tune(**{"timer": Times()} | arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"layer": Layer(H, H, D, D, cache=wa.EightBitCache())}, "keys and values of 16 bits"),
     ({"keys": 0}, "keys is 0"), ({"layer": 3}, "layer is 3"), ({"page_size": 16, "keys": 20}, "multiple of that"),
     ({"mask": "causal"}, "mask is "), ({"score": 1}, "score is 1"), ({"queries": True}, "queries is True")],
)  # fmt: skip
def test_wrong_shapes(fields, message):
    with pytest.raises(wa.AttentionError, match=message):
        replace(SHAPE, **fields)


def test_calls_of_a_model():
    layer = Layer(8, 2, 64, 64)
    prompt, step = shapes_of([layer, layer], LargestStep(4, 300, 1000, 16))
    assert (prompt, step) == (CallShape(layer, 1, 300, 300), CallShape(layer, 4, 1, 1008, 16))
    latent = [Layer(128, 128, 192, 128), Layer(128, 1, 576, 512, latent=512)]
    assert [shape.layer for shape in shapes_of(latent, None)] == latent
    assert [bool(others(shape)) for shape in shapes_of(latent, None)] == [True, False]


def test_a_kernel_with_one_configuration_is_said_so():
    (found,) = wa.tune([CallShape(Layer(128, 1, 576, 512, latent=512), 2, 1, 1024, 16)], timer=Times())
    assert found.row is None and found.words == "sm90.mla has one configuration for this call: nothing was tried"


def test_masks_of_the_callers_script_are_compiled_here(monkeypatch):
    """Other processes do not run it; lambdas cannot be sent either."""

    def of_the_script(b, h, q, k):
        return k <= q

    of_the_script.__module__, of_the_script.__qualname__ = "__main__", "of_the_script"
    monkeypatch.setattr(sys.modules["__main__"], "of_the_script", of_the_script, raising=False)
    for function in (of_the_script, lambda b, h, q, k: k <= q):
        kernel = tuning.Kernel(replace(SHAPE, mask=wa.CustomMask(function)), BUILT_IN, 0)
        assert not compilers.can_be_sent(kernel)
    assert compilers.can_be_sent(tuning.Kernel(SHAPE, BUILT_IN, 0))


def test_a_name_is_one_configuration():
    """The built-in choice is requested by its own name, others by theirs."""
    planned = SHAPE.planned()
    for name in others(SHAPE):
        (launch,) = tuning._launches(planned, PlanOptions(candidate=name))
        assert launch.key[0] == config_of(SHAPE, name)


class Here:
    """A pool whose work is done at once, in this process."""

    def __init__(self, workers, **_):
        self.workers = workers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, work, *arguments):
        future = Future()
        try:
            future.set_result(work(*arguments))
        except wa.AttentionError as error:
            future.set_exception(error)
        return future


def test_each_kernel_is_compiled_once_and_one_that_fails_is_named(monkeypatch):
    compiled, parts, one = [], [], others(SHAPE)[0]

    def compile_it(kernel):
        compiled.append(kernel)
        if kernel.candidate == one:
            raise wa.AttentionError("too many registers\nwhere")

    monkeypatch.setattr(tuning, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(tuning.compilers, "start", lambda module: None)
    monkeypatch.setattr(tuning, "_compile", compile_it)
    longer = replace(SHAPE, requests=B + 1)  # the same kernels
    failed = COMPILE_ALL([SHAPE, longer], 3, parts.append)
    assert len(compiled) == len({kernel.candidate for kernel in compiled}) == 1 + len(others(SHAPE))
    assert failed == {(shape, one): "too many registers" for shape in (SHAPE, longer)}
    assert parts == sorted(parts) and parts[-1] == 1.0
    monkeypatch.setattr(tuning, "compile_all", lambda *_: failed)
    (found,) = wa.tune([SHAPE], timer=Times({one: 1.0}))
    assert found.row.refused == {one: "too many registers"} and found.row.candidate == BUILT_IN


@pytest.mark.full
def test_kernels_compile_in_other_processes():
    assert COMPILE_ALL([DECODE], 2, lambda part: None) == {}
    for name in tuning.candidate_names(DECODE):
        for launch in tuning._launches(DECODE.planned(), PlanOptions(candidate=name)):
            assert kernel_cache.load(kernel_cache.path_of(tuning._key(launch))) is not None
