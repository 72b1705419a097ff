"""The barriers, bytes, warps and registers of every compiled Blackwell kernel are those of its topology."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("triton")

from warpattn.kernels.sm100.config import FA4Config
from warpattn.kernels.sm100.mla.config import LatentConfig
from warpattn.kernels.sm100.mla.signature import latent_source
from warpattn.kernels.sm100.signature import prefill_source
from warpattn.kernels.sm100.traits import Traits
from warpattn.kernels.sm100.wide.config import WideConfig
from warpattn.kernels.sm100.wide.signature import wide_source
from warpattn.kernels.topology import Topology
from warpattn.language.nodes import Program
from warpattn.masks import Causal
from warpattn.problem.arch import compile_options, triton_target
from warpattn.problem.element import BF16, FP8
from warpattn.problem.problem import Scales
from warpattn.problem.scales import EightBit
from warpattn.sim.compile import to_ttgir

TWO = FA4Config(BF16, 128, 128)
ONE = replace(TWO, BM=128)
STORED = EightBit(FP8, Scales("head", "tensor"))
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
    "pair": (replace(TWO, pair_cta=True), "dense"),
}
WIDE = {"wide-256": WideConfig(BF16, 256, 192, 128, 64), "wide-512": WideConfig(BF16, 512, 256, 64, 32)}


@dataclass(frozen=True)
class Built:
    """A kernel's TTGIR, and what the host says about it."""

    code: str
    topology: Topology
    expected_bytes: set[int]


def build(name: str) -> Built:
    visible = Causal().program()
    mask = Program((visible.keep, *visible.span), visible.tensors)
    source: Any
    if name == "mla":
        latent = LatentConfig(BF16, 576, 512)
        source, options = latent_source(latent, Traits("dense", 16, False, True), mask, None), compile_options()
        text = to_ttgir(source, triton_target("sm100"), options).asm["ttgir"]
        return Built(text, latent.topology, {latent.tile_bytes})
    if name in WIDE:
        wide = WIDE[name]
        source, options = wide_source(wide, Traits("ragged", 2, False, True), mask, None), compile_options()
        text = to_ttgir(source, triton_target("sm100"), options).asm["ttgir"]
        return Built(text, wide.topology, {wide.k_blocks * wide.block_bytes, wide.v_blocks * wide.block_bytes})
    c, kind = PREFILL[name]
    assert c.supported() == ()
    source, options = prefill_source(c, Traits(kind, 1, False, True), mask, None), c.options
    second = {c.q_bytes} if c.num_q == 2 else set()
    first = c.k_load_bytes + c.q_bytes // c.num_qk_stages
    tiles = {first, c.k_load_bytes, c.v_load_bytes, *second}
    return Built(to_ttgir(source, triton_target("sm100"), options).asm["ttgir"], c.topology, tiles)


def arrivals(topology: Topology) -> Iterator[int]:
    """Of every barrier."""
    for edge in topology.edges:
        yield from [1, topology.empty_arrivals(edge.name)] * edge.stages
    for signal in topology.signals:
        yield from (topology.arrivals(signal.name, i) for i in range(signal.number))


@pytest.mark.parametrize("name", [*PREFILL, "mla", *WIDE])
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
