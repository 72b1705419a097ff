"""The CDNA backward without a CDNA card: its machine code is compiled here and counted."""

from __future__ import annotations

from itertools import product

import pytest
from pytest import approx

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.backward import Case, launches_of
from tests.sim.cdna.calls import ARCHS
from tests.unit.kernels.backward.builds import long_problem
from tests.unit.machine_code.gcn_knockouts import machine_code
from warpattn.kernels.amd.kv_config import WAVE
from warpattn.kernels.cdna.backward.config import HELD, SideConfig, choose_config
from warpattn.machine_code.gcn import check_copies, check_loads, summary
from warpattn.machine_code.gcn.summary import LDS
from warpattn.masks import Causal
from warpattn.scores import SoftCap

# Vector registers of a lane by account, without a score: what is held and added, S and dP, an operand, loads ahead.
ACCOUNT = {("queries", 64): 220, ("keys", 64): 228, ("queries", 128): 245, ("keys", 128): 356}
# Workgroups that have a CU for themselves under a causal mask; of the others it holds two.
ALONE = {("gfx942", "queries", 128), ("gfx942", "keys", 128), ("gfx950", "keys", 128)}
EVERY = list(product(ARCHS, (64, 128), (None, 5.0)))


def sides(arch: str, dim: int) -> tuple[SideConfig, ...]:
    """Both kernels' configurations."""
    config, _ = choose_config(long_problem(dim), arch)
    return config.queries, config.keys


@pytest.mark.parametrize(("arch", "dim", "cap"), drawn(EVERY, [("gfx942", 128, None), ("gfx950", 64, 5.0)]))
def test_machine_code_is_what_the_configs_promise(arch: str, dim: int, cap: float | None) -> None:
    score = None if cap is None else SoftCap(cap)
    case = Case(200, 300, heads=4, heads_kv=2, dim=dim, mask=Causal(), score=score, arch=arch)
    for config, step in zip(sides(arch, dim), launches_of(case), strict=True):
        text = machine_code(step)
        found = summary(text, config.lds_bytes)
        assert step.key[0] == config and check_copies(text).proven and not check_loads(text)
        assert (found.vgpr_spills, found.sgpr_spills, found.scratch) == (0, 0, 0)
        depth = 16 if arch == "gfx950" else 8
        assert found.count("v_mfma") == found.count(f"v_mfma_f32_32x32x{depth}") == products(config) // depth
        assert found.counts["s_barrier"] == len(config.streams), "before each operand is read"
        if cap is None:
            assert found.vgprs + found.agprs == approx(ACCOUNT[config.side, dim], rel=0.2)
            assert found.occupancy == (1 if (arch, config.side, dim) in ALONE else 2)
        assert not found.count("global_atomic", "buffer_atomic")


def products(config: SideConfig) -> int:
    """32 x 32 columns of depth that a wave multiplies in a tile: S and dP, then the gradients."""
    across, sums = config.walked // 32, config.padded_qk + (config.padded_v if config.side == "keys" else 0)
    return across * (config.padded_qk + config.padded_v) + config.walked * sums // 32


@pytest.mark.parametrize("dim", range(8, 129, 8))
@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_has_configs_that_fit(arch: str, dim: int) -> None:
    for config in sides(arch, dim):
        assert config.lds_bytes <= LDS[arch] // 2 and config.padded_qk >= dim
        assert config.block_m * config.block_n == HELD * config.walked
        assert all(stream.lanes[0] * stream.lanes[1] == WAVE for stream in config.streams)
