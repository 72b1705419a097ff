"""The host path with a driver that only takes notes: what is launched, with which parameters, and what is copied.

CPU tensors stand in for a card's. The stand-in kernel sets the bytes of a contiguous output, so that a copy is seen.
"""

from __future__ import annotations

import ctypes
import gc
import math
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import warpattn as wa
from warpattn import artifacts, cuda, launch, planned, problem, route
from warpattn.artifacts import Artifact
from warpattn.counters import SLAB, Counters

B, S, H, D = 2, 20, 4, 64
FIRST_EXTRA = 36  # parameters before lse: four maps with four sizes and four strides each
SHAPE = slice(FIRST_EXTRA + 4, FIRST_EXTRA + 11)
TILE = torch.tensor([0x4040] * 2, dtype=torch.int16).view(torch.bfloat16)[0].item()


@dataclass
class Card:
    """The driver's notebook."""

    launches: list[dict[str, Any]] = field(default_factory=list)
    encoded: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    replaced: int = 0
    keys: list[Any] = field(default_factory=list)
    examined: int = 0
    stream: int = 0
    device: int = -1
    capturing: bool = False
    errors: list[int] = field(default_factory=list)
    bound: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def launch(self, function: int, *rest: Any) -> int:
        *_, stream, table, _ = rest
        if self.errors:
            return self.errors.pop()
        maps = [ctypes.c_uint64.from_address(table[i * 9]).value for i in range(4)]
        extra = [ctypes.c_uint64.from_address(table[FIRST_EXTRA + i]).value for i in range(3)]
        captured = [ctypes.c_uint64.from_address(x).value for x in table[FIRST_EXTRA + 11 : -2]]
        note = {
            "maps": maps,
            "lse": extra[0],
            "sinks": extra[1],
            "counter": extra[2],
            "scale": ctypes.c_float.from_address(table[FIRST_EXTRA + 3]).value,
            "shape": [ctypes.c_int32.from_address(x).value for x in table[SHAPE]],
            "captured": captured,
            "stream": stream,
            "grid": rest[0],
        }
        ctypes.memset(maps[3], 0x40, self.sizes[table[27]])
        with self.lock:
            self.launches.append(note)
        return 0

    def replace(self, target: int, address: int) -> int:
        self.replaced += 1
        ctypes.c_uint64.from_address(target).value = address
        return 0

    def encode(self, layout: Any, target: int, address: int) -> None:
        self.encoded += 1
        self.sizes[target] = 2 * math.prod(layout.shape)

    def bind(self, device: int) -> None:
        self.bound += 1


@pytest.fixture(autouse=True)
def card(monkeypatch):
    card = Card()
    counters = Counters(torch.device("cpu"))

    def find(key, build):  # type: ignore[no-untyped-def]
        card.keys.append(key)
        return Artifact(b"cubin", "entry", 1000, 384)

    def examine(call, read_values=True):  # type: ignore[no-untyped-def]
        card.examined += 1
        return problem.examine(call, read_values)

    for owner, name, value in (
        (cuda, "launch_call", lambda: card.launch),
        (cuda, "replace_address_call", lambda: card.replace),
        (cuda, "load_function", lambda *_: 77),
        (cuda, "bind_context", card.bind),
        (cuda, "current_stream", lambda device: card.stream),
        (cuda, "current_device", lambda: card.device),
        (cuda, "is_capturing", lambda: card.capturing),
        (cuda.TensorMapLayout, "encode", lambda *arguments: card.encode(*arguments)),
        (artifacts, "find", find),
        (launch, "counters", lambda device: counters),
        (launch, "processors", lambda device: 100),
        (launch, "_prepared", {}),
        (launch, "_kernels", {}),
        (planned, "_known", {}),
        (problem, "_choose_backend", lambda rules, call: "sm90"),
        (route, "examine", examine),
    ):
        monkeypatch.setattr(owner, name, value)
    return card


def normal(*shape: int) -> Tensor:
    return torch.randn(shape or (B, S, H, D), dtype=torch.float32).to(torch.bfloat16)


def written(out: Tensor) -> bool:
    return bool((out == TILE).all())


def test_parameters_of_a_launch(card):
    q, k, v, sinks = normal(), normal(B, 30, 2, D), normal(B, 30, 2, D), torch.randn(H)
    out, lse = wa.attention(q, k, v, sinks=sinks, scale=0.25, return_lse=True)
    (note,) = card.launches
    assert note["maps"] == [x.data_ptr() for x in (q, k, v, out)]
    assert (note["lse"], note["sinks"], note["scale"], note["stream"]) == (lse.data_ptr(), sinks.data_ptr(), 0.25, 0)
    assert note["shape"] == [S, 30, H, 2, 1, B * H, B * H] and note["grid"] == B * H
    assert lse.shape == (B, H, S) and lse.dtype == torch.float32
    assert written(out) and out.shape == q.shape and out.is_contiguous()


def test_the_second_call_goes_the_short_way(card):
    q, k, v = normal(), normal(), normal()
    for _ in range(5):
        assert written(wa.attention(q, k, v, mask=wa.Causal()))
    assert card.examined == 1 and card.encoded == 4 and len(card.launches) == 5 and len(card.keys) == 1


def test_addresses_follow_the_tensors(card):
    for _ in range(4):
        q, k, v = normal(), normal(), normal()
        out = wa.attention(q, k, v)
        assert card.launches[-1]["maps"] == [x.data_ptr() for x in (q, k, v, out)]
    before = card.replaced
    wa.attention(q, k, v, out=out)
    replaced = card.replaced
    wa.attention(q, k, v, out=out)
    assert replaced <= before + 4 and card.replaced == replaced, "the maps hold these addresses already"


CHANGES = {
    "length": lambda a: a | {"q": normal(B, S + 1, H, D)},
    "keys": lambda a: a | {"k": normal(B, 7, H, D), "v": normal(B, 7, H, D)},
    "heads": lambda a: a | {"k": normal(B, S, 1, D), "v": normal(B, S, 1, D)},
    "head dim of v": lambda a: a | {"v": normal(B, S, H, 32)},
    "strides": lambda a: a | {"q": normal(B, H, S, D).transpose(1, 2)},
    "dtype": lambda a: a | {name: a[name].half() for name in "qkv"},
    "mask": lambda a: a | {"mask": wa.Causal()},
    "score": lambda a: a | {"score": wa.SoftCap(3.0)},
    "sinks": lambda a: a | {"sinks": torch.randn(H)},
    "scale": lambda a: a | {"scale": 0.3},
    "lse": lambda a: a | {"return_lse": True},
    "backend": lambda a: a | {"backend": "sm90"},
    "out": lambda a: a | {"out": torch.empty(B, S, H, D, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_check_has_read_is_checked_again(name, card):
    arguments = {"q": normal(), "k": normal(), "v": normal()}
    wa.attention(**arguments)
    changed = CHANGES[name](arguments)
    for examined in (2, 2):
        wa.attention(**changed)
        assert card.examined == examined
    wa.attention(**arguments)
    assert card.examined == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scale": True}, "scale is True"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "1"}, "scale is '1'"),
        ({"return_lse": 0}, "return_lse is 0"),
        ({"mask": "causal"}, "mask is a str"),
        ({"mask": wa.Causal}, "mask is the class Causal"),
        ({"score": 3}, "score is a int"),
        ({"q": torch.zeros(B, S, H, D)}, "must have the dtype of q"),
        ({"q": [[1.0]]}, "q is a list"),
        ({"out": torch.zeros(1)}, "out has shape"),
        ({"sinks": torch.zeros(H + 1)}, "sinks"),
    ],
)
def test_a_bad_call_after_a_good_one_is_refused(change, text, card):
    arguments = {"q": normal(), "k": normal(), "v": normal(), "scale": 1.0}
    for _ in range(2):
        wa.attention(**arguments)
    with pytest.raises(wa.AttentionError) as caught:
        wa.attention(**(arguments | change))
    assert text in str(caught.value)
    assert len(card.launches) == 2


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "out", "bias"])
def test_gradients_are_seen_in_every_call(name, card):
    tensors = {"q": normal(), "k": normal(), "v": normal(), "sinks": torch.randn(H), "out": normal()}
    bias = torch.zeros(S, S)
    score = wa.Bias(bias)
    for _ in range(2):
        wa.attention(**tensors, score=score)
    assert card.examined == 1
    (bias if name == "bias" else tensors[name]).requires_grad_()
    with pytest.raises(wa.AttentionError, match="requires gradients"):
        wa.attention(**tensors, score=score)
    with torch.no_grad():
        wa.attention(**tensors, score=score)
    assert len(card.launches) == 3


def misaligned(x: Tensor) -> Tensor:
    return torch.empty(x.numel() + 8, dtype=x.dtype)[1 : 1 + x.numel()].view(x.shape).copy_(x)


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
    packed = launch._packed
    monkeypatch.setattr(launch, "_packed", lambda x: copies.append(packed(x)) or copies[-1])
    tensors = {"q": normal(), "k": normal(), "v": normal()} | {operand: COPIED[name]()}
    wa.attention(**tensors)
    (copy,) = copies
    assert torch.equal(copy, tensors[operand]) and launch.addressable(copy)
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


def test_a_misaligned_tensor_after_aligned_ones(card):
    q = normal()
    for _ in range(2):
        wa.attention(q, q, q)
    bad = misaligned(q)
    assert bad.stride() == q.stride()
    wa.attention(bad, q, q)
    out = misaligned(q)
    wa.attention(q, q, q, out=out)
    assert written(out)
    assert all(address % 16 == 0 for note in card.launches for address in note["maps"])


def test_single_elements_may_have_any_stride():
    x = normal(1, 1, 1, D).as_strided((1, 1, 1, D), (0, 3, 5, 1))
    assert launch.addressable(x)
    assert not launch.addressable(normal(2, 1, 1, D).as_strided((2, 1, 1, D), (0, 3, 5, 1)))


@pytest.mark.parametrize(("scale", "by_score"), [(None, False), (0.5, False), (0.0, True), (-1.0, True), (1e-40, True)])
def test_scales_that_are_not_positive_are_applied_to_the_scores(scale, by_score, card):
    q = normal()
    wa.attention(q, q, q, scale=scale)
    (key,) = card.keys
    assert (key[2] is not None) == by_score
    assert card.launches[0]["scale"] == pytest.approx(D**-0.5 if scale is None else scale, rel=1e-6)


def test_scores_take_their_own_path_for_every_scale(card):
    q = normal()
    for scale in (1.0, -1.0):
        wa.attention(q, q, q, scale=scale, score=wa.SoftCap(2.0))
    assert len(card.keys) == 1 and card.keys[0][2] is not None


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
    logits = launch._logits
    monkeypatch.setattr(launch, "_logits", lambda x: kept.append(logits(x)) or kept[-1])
    sinks = torch.randn(2 * H).to(torch.bfloat16)[::2]
    wa.attention(normal(), normal(), normal(), sinks=sinks)
    assert kept[0].dtype == torch.float32 and kept[0].is_contiguous() and torch.equal(kept[0], sinks.float())
    assert card.launches[0]["sinks"] == kept[0].data_ptr()


def test_captured_tensors_are_read_at_every_launch(card):
    q, lengths, bias = normal(), torch.tensor([3, 4]), torch.randn(S, S, 2).permute(2, 0, 1)[:1]
    mask, score = wa.Padding(lengths), wa.Bias(bias)
    for _ in range(2):
        wa.attention(q, q, q, mask=mask, score=score)
        expected = [lengths.data_ptr(), 2, 1, bias.data_ptr(), *bias.shape, *bias.stride()]
        found = card.launches[-1]["captured"]
        assert [x & 0xFFFFFFFF if 1 <= i <= 1 or 4 <= i <= 6 else x for i, x in enumerate(found)] == expected
    assert card.examined == 1


def test_masks_with_tensors_are_not_kept_alive(card):
    q = normal()
    for _ in range(10):
        mask = wa.Padding(torch.tensor([3, 4]))
        for _ in range(2):
            wa.attention(q, q, q, mask=mask)
    assert card.examined == 10 and len(planned._known) == 1
    del mask
    gc.collect()
    assert not planned._known
    assert len(card.keys) == 1, "one kernel serves them all"


def test_additive_masks_work_without_the_short_way(card):
    q, mask = normal(), wa.Materialized(torch.zeros(B, S, S))
    for _ in range(3):
        wa.attention(q, q, q, mask=mask)
    assert len(card.launches) == 3 and len(card.keys) == 1 and not planned._known


def test_memories_are_bounded(card, monkeypatch):
    monkeypatch.setattr(planned, "AT_MOST", 8)
    monkeypatch.setattr(launch, "PREPARED_AT_MOST", 8)
    for length in range(1, 40):
        wa.attention(normal(1, length, 1, 8), normal(1, 3, 1, 8), normal(1, 3, 1, 8))
        assert len(planned._known) <= 8 and len(launch._prepared) <= 8


def test_streams_have_counters_of_their_own(card):
    q = normal()
    for stream in (0, 5, 0, 6, 5):
        card.stream = stream
        wa.attention(q, q, q)
    zero, five, again, six, five_again = (note["counter"] for note in card.launches)
    assert zero == again and five == five_again and len({zero, five, six}) == 3
    assert [note["stream"] for note in card.launches] == [0, 5, 0, 6, 5]


def test_captured_launches_share_no_counter(card):
    q = normal()
    wa.attention(q, q, q)
    card.capturing = True
    for _ in range(3 * SLAB):
        wa.attention(q, q, q)
    addresses = [note["counter"] for note in card.launches]
    mine = addresses[: SLAB - 1]
    assert len(set(mine)) == len(mine) and all(mine)


def test_a_counter_of_the_graph_itself():
    counters = Counters(torch.device("cpu"))
    address, kept = counters.of_capture()
    assert kept is not None and kept.data_ptr() == address and kept.dtype == torch.int32 and int(kept) == 0
    counters.of_stream(0)
    address, kept = counters.of_capture()
    assert kept is None and address != counters.of_stream(0)


def test_eager_launches_leave_counters_for_captures():
    counters = Counters(torch.device("cpu"))
    addresses = [counters.of_stream(stream) for stream in range(3 * SLAB)]
    assert len(set(addresses)) == len(addresses) and len(counters._free) > SLAB // 4
    assert all(bool((slab == 0).all()) for slab in counters._slabs)


def test_a_thread_without_a_context_gets_one(card):
    q = normal()
    wa.attention(q, q, q)
    card.errors = [cuda.INVALID_CONTEXT]
    assert written(wa.attention(q, q, q))
    assert card.bound == 1 and len(card.launches) == 2


def test_driver_errors_are_raised(card, monkeypatch):
    def check(code: int, call: str) -> None:
        raise RuntimeError(f"{call} failed with {code}")

    monkeypatch.setattr(cuda, "check", check)
    q = normal()
    card.errors = [700]
    with pytest.raises(RuntimeError, match="prefill kernel failed with 700"):
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


def test_compile_plan_gives_what_the_launch_would_use(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(launch, "_compiled", lambda *arguments: asked.append(arguments))
    q = normal()
    ready = problem.examine(problem.Call(q, q, q, route.DENSE, wa.Causal(), wa.SoftCap(3.0)))
    chosen = launch.planned(ready.problem)
    launch.compile_plan(chosen, ready.mask, ready.score)
    config, mask, score, asked_problem = asked[0]
    assert config == chosen.config and mask.key == ready.mask.key and asked_problem == ready.problem
    assert ready.score is not None and score.key == ready.score.key
    launch.compile_plan(chosen)
    assert asked[1][1].outputs[0] == ("const", "bool", True) and asked[1][2] is None
