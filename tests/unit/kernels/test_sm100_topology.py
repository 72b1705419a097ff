"""The barriers, bytes, warps and registers of every compiled Blackwell kernel are those of its topology."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.launches import ROWS, choice_of, small_call
from tests.sim.sm90.mla import Latent
from tests.sim.sm100.test_mla_eight_bit import prepared as latents
from warpattn.kernels.sm100.config import FA4Config
from warpattn.kernels.sm100.launch import prefill_launch
from warpattn.kernels.sm100.mla.config import LatentConfig
from warpattn.kernels.sm100.mla.launch import latent_launches
from warpattn.kernels.sm100.traits import Traits
from warpattn.kernels.sm100.wide.config import WideConfig
from warpattn.kernels.sm100.wide.launch import wide_launches
from warpattn.kernels.topology import Topology
from warpattn.problem.arch import triton_target
from warpattn.problem.element import BF16, FP8
from warpattn.problem.launch import Launch
from warpattn.problem.problem import Scales
from warpattn.problem.scales import EightBit
from warpattn.sim.compile import to_ttgir

TWO = FA4Config(BF16, 128, 128)
ONE = replace(TWO, BM=128)
STORED = EightBit(FP8, Scales("head", "tensor"))
BYTES = EightBit(FP8, Scales("head", "tensor", "head"), queries=True)
TWO_OF_BYTES = FA4Config(FP8, 128, 128, eight_bit=BYTES, out_element=BF16)
PREFILL = {
    "2q-one-ring": (replace(TWO, max_qk_stages=1), "dense"),
    "2q-two-rings": (FA4Config(BF16, 64, 64).gluon()[0], "dense"),
    "2q-head-dims-differ": (replace(FA4Config(BF16, 64, 128).gluon()[0], max_qk_stages=1), "dense"),
    "2q-ragged": (replace(TWO, max_qk_stages=1), "ragged"),
    "2q-paged": (replace(TWO, max_qk_stages=1, page_size=64), "paged"),
    "1q-chunks": (ONE, "dense"),
    "1q-one-ring": (FA4Config(BF16, 64, 64, BM=128).gluon()[0], "dense"),
    "1q-split": (replace(ONE, splitk_partitions=4), "dense"),
    "1q-paged": (replace(ONE, page_size=16), "paged"),
    "2q-8-bits": (replace(TWO, max_qk_stages=1, eight_bit=STORED), "dense"),
    "1q-8-bits": (replace(ONE, max_qk_stages=1, page_size=16, eight_bit=STORED), "paged"),
    "2q-products": (TWO_OF_BYTES, "dense"),
    "2q-products-64": (replace(TWO_OF_BYTES, qk_depth=64, ov_depth=64, group=4).gluon()[0], "ragged"),
    "1q-products": (replace(TWO_OF_BYTES, BM=128, page_size=64), "paged"),
    "1q-products-split": (replace(TWO_OF_BYTES, BM=128, qk_depth=64, splitk_partitions=4), "dense"),
    "pair": (replace(TWO, pair_cta=True), "dense"),
}
# With these, the kernels have every kind of ring, sequence and format once, and keys in parts.
DRAWN = ("2q-products-64", "pair", "mla", "wide-8-bits")
WIDE_256 = WideConfig(BF16, 256, 192, 128, 64)
WIDE = {
    "wide-256": WIDE_256,
    "wide-512": WideConfig(BF16, 512, 256, 64, 32),
    "wide-8-bits": replace(WIDE_256, stages=3, eight_bit=STORED),
}


@dataclass(frozen=True)
class Built:
    """A kernel's TTGIR, and what the host says about it."""

    code: str
    topology: Topology
    expected_bytes: set[int]


def build(name: str) -> Built:
    if name == "mla-8-bits":
        (launch,) = latents(Latent((200,), page=64)).steps
        config = launch.key[0]
        return Built(ttgir(launch), config.topology, {config.staged_bytes + config.rope_bytes})
    if name == "mla":
        latent = LatentConfig(BF16, 576, 512)
        checked, x, sequence = small_call("sm100", (576, 512), rows=(1, ROWS), heads=(16, 1))
        (launch,) = latent_launches(checked, x, sequence, choice_of(latent))
        return Built(ttgir(launch), latent.topology, {latent.tile_bytes})
    if name in WIDE:
        wide = WIDE[name]
        call = small_call("sm100", (wide.dim_qk, wide.dim_v), kind="ragged", heads=(4, 2))
        (launch,) = wide_launches(*call, choice_of(wide))
        return Built(ttgir(launch), wide.topology, {wide.k_blocks * wide.block_bytes, wide.v_blocks * wide.block_bytes})
    c, kind = PREFILL[name]
    assert c.supported() == ()
    call = small_call("sm100", (c.qk_depth, c.ov_depth), c.element, kind=kind, page=c.page_size)
    launch = prefill_launch(*call, choice_of(c, c.splitk_partitions), Traits(kind, 1, False, True))
    second = {c.q_bytes} if c.num_q == 2 else set()
    first = c.k_load_bytes + c.q_bytes // c.num_qk_stages
    return Built(ttgir(launch), c.topology, {first, c.k_load_bytes, c.v_load_bytes, *second})


def ttgir(launch: Launch) -> str:
    return to_ttgir(launch.source(), triton_target("sm100"), dict(launch.options)).asm["ttgir"]


def arrivals(topology: Topology) -> Iterator[int]:
    """Of every barrier."""
    for edge in topology.edges:
        yield from [1, topology.empty_arrivals(edge.name)] * edge.stages
    for signal in topology.signals:
        yield from (topology.arrivals(signal.name, i) for i in range(signal.number))


@pytest.mark.parametrize("name", drawn([*PREFILL, "mla", "mla-8-bits", *WIDE], DRAWN))
def test_the_kernel_makes_what_the_topology_says(name: str) -> None:
    built = build(name)
    inits = re.findall(r"ttng\.init_barrier \S+, (\d+) :", built.code)
    assert Counter(map(int, inits)) == Counter(arrivals(built.topology))
    assert len(inits) == built.topology.barriers
    assert {
        int(nbytes) for nbytes in re.findall(r"ttng\.barrier_expect \S+, (\d+),", built.code)
    } == built.expected_bytes
    (requested,) = re.findall(r"requestedRegisters = array<i32: ([\d, ]+)>", built.code)
    later = built.topology.roles[1:]
    assert [int(number) for number in requested.split(",")] == [role.registers for role in later]
    warps = re.findall(r"partition\d+\([^\n]*num_warps\((\d+)\)", built.code)
    assert [int(number) for number in warps] == [role.warps for role in later]
    assert f'"ttg.num-warps" = {built.topology.roles[0].warps} : i32' in built.code
