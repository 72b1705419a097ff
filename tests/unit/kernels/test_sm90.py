"""The Hopper kernel without a Hopper card: its machine code is compiled here and counted."""

import pytest

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.unit.kernels.backward.test_sm90_backward import innermost_loops, spills
from tests.unit.kernels.sm90_builds import chosen, compiled, products
from warpattn.kernels.sm90.prefill.choice import tiles_of
from warpattn.kernels.sm90.prefill.config import (
    ALIGNMENT,
    RECOMPUTE_BARRIERS,
    SMEM_LIMIT,
    SM90Config,
    block_columns,
    choose_config,
    pad_dim,
    split_dim,
    split_values,
    value_blocks,
    with_tile,
)
from warpattn.kernels.sm90.prefill.recompute import recomputed_blocks
from warpattn.machine_code.roles import role_faults
from warpattn.machine_code.sass import opcode_counts, resources
from warpattn.masks import Causal, Full, SlidingWindow
from warpattn.problem.element import BF16, FP16

CONFIGS = {
    "d64-short": choose_config(BF16, 64, 64, 1024, True)[0],
    "d64": choose_config(FP16, 64, 64, 8192, True)[0],
    "d128": choose_config(BF16, 128, 128, 8192, True)[0],
    "d256": choose_config(BF16, 256, 256, 8192, True)[0],
    "d192": choose_config(BF16, 192, 192, 8192, True)[0],
    "d512": choose_config(BF16, 512, 256, 8192, True)[0],
    "d192/128": choose_config(BF16, 192, 128, 8192, True)[0],
    "d80": choose_config(BF16, 80, 80, 8192, True)[0],
    "in-turn": chosen(4, 4096, 4096, 16, 16, 96, Full()).config,
    "half-tiles": chosen(1, 512, 512, 16, 16, 128, Causal()).config,
    "packed": chosen(4, 8192, 8192, 64, 8, 64, Causal() & SlidingWindow(128)).config,
    "split": chosen(1, 256, 32768, 32, 8, 128, Causal()).config,
    **{f"products-d{dim}": products(dim) for dim in (64, 128, 256)},
    "products-d64-short": products(64, 1024),
}
# One of each way to pad a head dim or to cut it in parts.
WIDTHS = (16, 48, 80, 96, 128, 144, 160, 176, 192, 208, 224, 256, 272, 288, 320, 384, 512)
# Head dims whose tiles of three warpgroups fill most of the registers.
TIGHT = {f"{a}/{b}": (a, b) for a, b in ((176, 176), (168, 168), (192, 192), (192, 128), (192, 160), (96, 192))}
# Bytes of stack the compiler spills to, measured with Triton 3.9.0. With products of 8 bits three warpgroups keep there
# what a tile of queries needs once; with two, as for short sequences, they spill nothing.
STACK = {
    "d64-short": 0, "d64": 32, "d128": 0, "d256": 56, "d512": 112, "d192": 0, "d192/128": 0, "d80": 0, "in-turn": 64,
    "half-tiles": 0, "packed": 0, "split": 0, "products-d64": 48, "products-d64-short": 0, "products-d128": 0,
    "products-d256": 112,
}  # fmt: skip


@pytest.mark.parametrize("name", drawn(CONFIGS, ["d128", "products-d128"]))
def test_machine_code_is_what_the_config_promises(name: str) -> None:
    config = CONFIGS[name]
    kernel = compiled(config)
    used = resources(kernel.asm["cubin"])
    counts = opcode_counts(kernel.asm["cubin"])
    assert config.smem_bytes <= kernel.metadata.shared <= config.smem_bytes + 512
    assert kernel.metadata.shared <= SMEM_LIMIT
    assert used.stack <= STACK[name]
    assert role_faults(kernel.asm) == []
    assert kernel.metadata.num_warps * 32 == config.topology.threads
    assert counts["UTMALDG"] > 0 and counts["UTMASTG"] > 0, "loads and stores go through TMA"
    assert counts["USETMAXREG"] >= 2, "registers move from the producer to the consumers"
    assert counts["HMMA"] == 0, "every product is a warpgroup product"
    shared = config.shares_code(masked=True)
    assert shared == ("%shared_role" in kernel.asm["ptx"])
    assert counts["QGMMA" if config.products else "HGMMA"] == wgmmas(config, shared)


@pytest.mark.parametrize("dim", [128, 176, 192, 224, 256])
def test_products_of_8_bits_read_queries_from_shared_memory(dim: int) -> None:
    """A head dim of 8 bits is one part; queries in registers are a last part of 16 bits."""
    config = products(dim)
    assert config.products and len(config.qk_parts) == 1 and config.held_parts == 0


@pytest.mark.parametrize("name", drawn(["d64", "products-d64"], ["products-d64"]))
def test_loops_over_key_tiles_spill_nothing(name: str) -> None:
    config = CONFIGS[name]
    assert config.consumers == 3
    product = "QGMMA" if config.products else "HGMMA"
    loops = innermost_loops(compiled(config).asm["cubin"], lambda body: product in body)
    assert len(loops) >= 2 and not any(map(spills, loops))


def wgmmas(config: SM90Config, shared: bool) -> int:
    """Warpgroup products in the code: a warpgroup has the first Q·K and a loop with the crossing, unless the code is
    `shared`; recompute.py has its own for one of them."""
    scores = sum(config.qk_chains) // config.depth
    outputs = config.block_n // config.depth * config.value_products
    again = scores + config.block_n // config.depth * len(recomputed_blocks(config))
    copies = 1 if shared else config.consumers
    return copies * (scores + 2 * (scores + outputs)) + again


@pytest.mark.parametrize("name", ["d128", "products-d128"])
def test_no_other_product_waits_inside_a_loop(name: str) -> None:
    products_overlap(CONFIGS[name])


@pytest.mark.parametrize("dim", drawn(WIDTHS, [176]))
@pytest.mark.parametrize("masked", drawn([True, False], [True]))
def test_products_of_every_width_overlap(dim: int, masked: bool) -> None:
    products_overlap(choose_config(BF16, dim, block_columns(dim), 8192, masked)[0])


def products_overlap(config: SM90Config) -> None:
    """ptxas serialises products whose registers are touched while they run; then there is a wait for each of them."""
    counts = opcode_counts(compiled(config).asm["cubin"], modifiers=True)
    products = sum(n for name, n in counts.items() if name.startswith(("HGMMA", "QGMMA")))
    waits = sum(n for name, n in counts.items() if name.startswith("WARPGROUP.DEPBAR"))
    assert waits < products / 3


@pytest.mark.parametrize("name", drawn(TIGHT, ["192/192", "176/176"]))
def test_products_of_tiles_beside_the_usual_one_overlap(name: str) -> None:
    """A tile whose products would not is none of the planner's."""
    usual = choose_config(BF16, *TIGHT[name], 8192, True)[0]
    for tile in (tile for tile in tiles_of(max(TIGHT[name])) if tile.consumers == 3):
        config = with_tile(usual, tile)
        if config is not None:
            products_overlap(config)


@pytest.mark.parametrize("dim", range(8, 513, 8))
def test_every_head_dim_has_a_config_that_fits(dim: int) -> None:
    for dim_v in {block_columns(dim), 256, 208, 192, 128, 72, 8}:
        for seq_q, masked in ((512, True), (8192, False)):
            config, why = choose_config(BF16, dim, dim_v, seq_q, masked)
            assert config.smem_bytes + ALIGNMENT <= SMEM_LIMIT
            assert config.padded_qk >= dim and config.padded_v >= dim_v
            assert config.topology.registers <= 65_536
            stored, blocks = config.store_parts, config.v_parts
            if config.exact_values:
                assert sum(config.o_parts) == dim_v <= sum(blocks) and set(blocks) == {64} and sum(stored) <= 256
            else:
                assert stored == blocks or (len(stored) == 1 and not any(n % stored[0] for n in blocks))
            assert why


def test_dims_are_padded_to_powers_of_two() -> None:
    assert [pad_dim(d) for d in (8, 32, 40, 64, 72, 128, 136, 256)] == [32, 32, 64, 64, 128, 128, 256, 256]


PARTS = {
    8: (32,), 40: (32, 16), 48: (32, 16), 56: (64,), 64: (64,), 72: (64, 16), 80: (64, 16), 88: (64, 32),
    96: (64, 32), 104: (128,), 128: (128,), 136: (128, 16), 160: (128, 32), 176: (128, 32, 16), 192: (128, 64),
    208: (128, 64, 16), 224: (128, 64, 32), 240: (256,), 256: (256,), 264: (256, 16), 384: (256, 128),
    416: (256, 128, 32), 480: (512,), 512: (512,),
}  # fmt: skip


@pytest.mark.parametrize("dim", range(8, 513, 8))
def test_values_are_in_blocks(dim: int) -> None:
    width = block_columns(dim)
    columns = [first + column for first in value_blocks(dim) for column in range(width)]
    assert set(columns) == set(range(dim)) and width <= 256
    assert not any(first % 8 for first in value_blocks(dim)), "TMA and copies begin at multiples of 16 bytes"


@pytest.mark.parametrize("dim", range(8, 513, 8))
def test_parts_hold_a_head_dim(dim: int) -> None:
    parts = split_dim(dim)
    assert parts == PARTS.get(dim, parts)
    assert dim <= sum(parts) <= pad_dim(dim)
    assert all(pad_dim(width) == width or width == 16 for width in parts)
    assert len(parts) == 1 or sum(parts) < dim + 16


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_one_part_of_values_at_most_is_narrow(dim: int) -> None:
    parts = split_values(dim)
    assert sum(width < 64 for width in parts) <= 1
    assert dim <= sum(parts) <= pad_dim(dim) and all(pad_dim(width) == width or width == 16 for width in parts)
    assert parts == {40: (64,), 48: (64,), 168: (128, 64), 176: (128, 64)}.get(dim, split_dim(dim)), dim


def test_the_topology_counts_what_the_kernel_makes() -> None:
    config = CONFIGS["d128"]
    topology = config.topology
    assert topology.threads == 384 and topology.barriers == 12
    assert {edge.name: topology.empty_arrivals(edge.name) for edge in topology.edges} == {"Q": 8, "K": 8, "V": 8}
    code = compiled(config).asm["ttgir"]
    assert code.count("ttng.init_barrier") == topology.barriers + RECOMPUTE_BARRIERS
    assert "load ──▶ K 2 × 32,768 B ──▶ attend 0, attend 1" in topology.picture()
