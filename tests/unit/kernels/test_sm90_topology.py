"""Barriers, bytes, warps and registers in the compiled Hopper kernels are those of their configs' topology."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from warpattn.kernels.sm90.prefill.config import RECOMPUTE_BARRIERS, SM90Config
from warpattn.kernels.sm90.prefill.recompute import recomputed_bytes
from warpattn.kernels.sm90.select import list_launches
from warpattn.kernels.topology import Edge, Topology
from warpattn.problem import Call, validate
from warpattn.problem.arch import triton_target
from warpattn.problem.launch import Launch, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.sim.compile import to_ttgir

PAGES = 8


def tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def dense(rows: int, dim: int, heads: int = 4, keys: int = 600) -> tuple[Any, ...]:
    return tensor(1, rows, heads, dim), tensor(1, keys, 2, dim), tensor(1, keys, 2, dim), wa.Dense()


def ragged(dim: int) -> tuple[Any, ...]:
    return tensor(200, 4, dim), tensor(200, 2, dim), tensor(200, 2, dim), wa.Ragged(torch.tensor([0, 70, 200]).int())


def paged(
    rows: int, dim: int, page: int, stored: torch.dtype = torch.bfloat16, heads: int = 4
) -> tuple[Any, ...]:
    k, v = (tensor(PAGES, page, 2, dim).to(stored) for _ in range(2))
    table, lengths = torch.zeros(1, PAGES, dtype=torch.int32), torch.full((1,), PAGES * page, dtype=torch.int32)
    return tensor(1, rows, heads, dim), k, v, wa.PagedKV(k, v, table, lengths)


def latent(page: int) -> tuple[Any, ...]:
    if not page:
        k = tensor(1, 600, 1, 576)
        return tensor(1, 1, 16, 576), k, k[..., :512], wa.Dense()
    k = tensor(PAGES, page, 1, 576)
    table, lengths = torch.zeros(1, PAGES, dtype=torch.int32), torch.full((1,), PAGES * page, dtype=torch.int32)
    return tensor(1, 1, 16, 576), k, k[..., :512], wa.PagedKV(k, k[..., :512], table, lengths)


def latents_of_8_bits(page: int, heads: int = 16) -> tuple[Any, ...]:
    table, lengths = torch.zeros(1, PAGES, dtype=torch.int32), torch.full((1,), PAGES * page, dtype=torch.int32)
    kv = wa.LatentPages.of_bytes(torch.zeros(PAGES, page, 1, 656, dtype=torch.uint8), table, lengths)
    return tensor(1, 1, heads, 576), kv.k_pages, kv.v_pages, kv


CASES = {
    "prefill, two warpgroups": (dense(300, 128), False),
    "prefill, three warpgroups": (dense(3000, 64), False),
    "prefill, one query tile": (dense(300, 256), False),
    "prefill, ragged": (ragged(128), False),
    "prefill, pages": (paged(100, 64, 16), False),
    "prefill, pages copied row by row": (paged(100, 64, 3), False),
    "prefill, pages of 8 bits": (paged(100, 64, 16, torch.float8_e4m3fn), False),
    "decode, swap-AB": (dense(1, 128), False),
    "decode, 64 rows": (dense(16, 128, heads=8), False),
    "decode, keys ready before the dependency": (paged(1, 128, 16), True),
    "decode, gathered": (paged(1, 128, 3), False),
    "latent": (latent(0), False),
    "latent, pages": (latent(16), False),
    "latent, gathered": (latent(3), False),
    "latent, 8 bits": (latents_of_8_bits(16, heads=32), False),
    "latent, 8 bits, swap-AB": (latents_of_8_bits(16), False),
}


def launch_of(case: tuple[Any, ...], cache_settled: bool) -> Launch:
    """The attention launch of a case."""
    q, k, v, sequence = case
    checked = validate(Call(q, k, v, sequence, wa.Causal(), backend="reference"), read_values=False)
    x = Operands(q, k, v, q.new_empty((*q.shape[:-1], v.shape[-1])), None, None)
    launches = list_launches(checked, x, sequence, PlanOptions(kv_ready_before_dependency=cache_settled))
    return next(launch for launch in launches if launch.name not in ("sm90.order", "sm90.combine"))


def arrivals(topology: Topology, by_warps: tuple[str, ...]) -> Counter[int]:
    """How many barriers complete on how many arrivals; `by_warps`: rings whose slots each of four warps hands over, as
    roles that convert tiles alone or make probabilities do."""
    found: Counter[int] = Counter()
    for edge in topology.edges:
        found[4 if edge.producer in ("convert", "scores") or edge.name in by_warps else 1] += edge.stages
        found[topology.empty_arrivals(edge.name)] += edge.stages
    for signal in topology.signals:
        found.update(topology.arrivals(signal.name, i) for i in range(signal.number))
    return found


def by_tma(edge: Edge, config: Any) -> bool:
    """Whether TMA fills a ring; ordinary copies complete its barriers by an arrival alone."""
    copied = getattr(config, "gathers", False) or getattr(config, "box", None) == 0
    return not copied or edge.name == "Q"


# Every kernel, and kind of ring and of copying; the others are these with other sizes.
LEFT_OUT = (
    "prefill, two warpgroups", "prefill, one query tile", "prefill, ragged", "prefill, pages",
    "prefill, pages copied row by row", "prefill, pages of 8 bits", "decode, swap-AB", "decode, 64 rows",
    "decode, gathered", "latent", "latent, pages", "latent, gathered", "latent, 8 bits",
)  # fmt: skip


@pytest.mark.parametrize("name", drawn(CASES, [name for name in CASES if name not in LEFT_OUT]))
def test_the_compiled_kernel_has_what_its_topology_says(name: str) -> None:
    launch = launch_of(*CASES[name])
    config = launch.key[0]  # type: ignore[index]
    topology = config.topology
    code = to_ttgir(launch.source(), triton_target("sm90"), dict(launch.options)).asm["ttgir"]
    tiles = getattr(config, "tiles", config)
    repeats = isinstance(tiles, SM90Config)  # recompute.py's barriers are of no role
    converts = getattr(config, "latents", None) is not None and not config.swap_ab  # the role that loads, 8-bit latents
    again = Counter({1: RECOMPUTE_BARRIERS if repeats else 0})
    initialised = Counter(map(int, re.findall(r"ttng\.init_barrier %[\w.]+, (\d+)", code)))
    assert initialised == arrivals(topology, ("V",) if converts else ()) + again
    expected = {edge.slot_bytes for edge in topology.edges if by_tma(edge, config)}
    if getattr(tiles, "eight_bit", None):
        expected = {tiles.q_bytes, tiles.k_bytes // tiles.widening, tiles.v_bytes // tiles.widening}
    expected |= {recomputed_bytes(tiles)} if repeats else set()
    if converts:
        expected = {config.rope_bytes, config.half_bytes // 2}
    assert set(map(int, re.findall(r"ttng\.barrier_expect %[\w.]+, (\d+)", code))) == expected
    (registers,) = re.findall(r"requestedRegisters = array<i32: ([\d, ]+)>", code)
    assert tuple(map(int, registers.split(","))) == topology.workers.registers
    assert tuple(map(int, re.findall(r"partition\d+\(.*num_warps\((\d+)\)", code))) == topology.workers.warps
    assert f'"ttg.num-warps" = {topology.roles[0].warps}' in code
    assert topology.registers <= 65_536
