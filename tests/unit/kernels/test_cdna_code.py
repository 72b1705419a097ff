"""Machine code of the CDNA kernels, compiled without a card: what it occupies and the instructions it is made of."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from tests.drawn import drawn, each_once
from tests.sim.cdna.calls import ARCHS, Case, outputs, paged, prefill_choice, ready_of
from tests.sim.cdna.counts import outstanding, vm_instructions
from tests.sim.sm90.mla import Latent, tensors
from warpattn.kernels.amd.kv_config import KINDS
from warpattn.kernels.cdna.config import CDNAConfig
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.machine_code.gcn import Summary, check_copies, check_loads, read, summary
from warpattn.masks import (
    Causal,
    Chunked,
    CustomMask,
    Document,
    Full,
    Mask,
    Materialized,
    Padding,
    Prefix,
    SlidingWindow,
)
from warpattn.problem import Call
from warpattn.problem.launch import Choice
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime import compiler
from warpattn.scores import ALiBi, SoftCap
from warpattn.sequences import Ragged

both = pytest.mark.parametrize("arch", ARCHS)
CAUSAL = Causal()


@dataclass(frozen=True)
class Built:
    config: CDNAConfig
    text: str
    summary: Summary


def build(call: Call, arch: str, choice: Choice | None = None) -> Built:
    """The first kernel of a call in machine code."""
    ready = ready_of(call, arch)
    given = call.sequence.operands(call.q, call.k, call.v).values()
    step = launches_of_choice(
        ready, fitted(Operands(*given, *outputs(call, ready), call.sinks)), call.sequence, choice
    )[0]
    kernel: Any = compiler.compiled(step)
    text = kernel.asm["amdgcn"]
    return Built(step.key[0], text, summary(text, kernel.metadata.shared))


@cache
def prefill(arch: str, kind: str = "", dim: int = 128, mask: Mask = CAUSAL) -> Built:
    call = Case(200, 300, heads=4, heads_kv=2, dim=dim, mask=mask).call()
    return build(call, arch, prefill_choice(call, arch, kind))


def unmasked(arch: str, kind: str = "") -> Built:
    """The kernel without a mask: no tile is computed again, so that everything is there once."""
    return prefill(arch, kind, mask=Full())


@cache
def decode(arch: str, dim: int = 128) -> Built:
    return build(Case(1, 4000, heads=8, dim=dim).call(), arch)


def no_spills(built: Built) -> bool:
    found = built.summary
    return (found.vgpr_spills, found.sgpr_spills, found.scratch) == (0, 0, 0)


# Workgroups that a CU holds; VGPRs at most that many waves of a SIMD share 512.
OCCUPANCY = {("gfx950", 64): 3, ("gfx950", 128): 2, ("gfx950", 256): 1, ("gfx942", 64): 2, ("gfx942", 128): 2,
             ("gfx942", 256): 1}  # fmt: skip


DIMS = (64, 128, 256)


@pytest.mark.parametrize(("dim", "arch"), drawn(product(DIMS, ARCHS), each_once(DIMS[:2], ARCHS)))
def test_prefill(arch, dim):
    """Registers, LDS, occupancy, no spills."""
    built = prefill(arch, dim=dim)
    found = built.summary
    assert no_spills(built)
    assert found.occupancy == OCCUPANCY[arch, dim]
    assert found.vgprs + found.agprs <= 512 // found.occupancy
    assert found.agprs == 0 or found.occupancy == 1, "accumulators move between files only where 256 are too few"
    assert found.lds == built.config.lds_bytes, "nothing but the buffers of K and V"


@pytest.mark.parametrize(("dim", "arch"), drawn(product(DIMS, ARCHS), each_once(DIMS, ARCHS[::-1])))
def test_decode(arch, dim):
    built = decode(arch, dim)
    assert no_spills(built)
    exchange = built.summary.lds - built.config.lds_bytes
    assert 0 < exchange <= 8192, "P and the rows' sums go from wave to wave through LDS"
    assert built.summary.occupancy >= 1


@pytest.mark.parametrize(("kind", "arch"), drawn(product(KINDS, ARCHS), each_once(list(KINDS), ARCHS)))
def test_products(arch, kind):
    """Each 32 x 32 x K product once in the code; the exponentials of a tile and one of the rescaling."""
    built = unmasked(arch, kind)
    config, found = built.config, built.summary
    depth = 16 if arch == "gfx950" else 8
    flops = config.block_n * (config.padded_qk + config.padded_v)
    assert found.count("v_mfma") == found.count(f"v_mfma_f32_32x32x{depth}") == flops // (32 * depth)
    assert found.counts["v_exp_f32"] == config.block_n // 2 + 1
    assert no_spills(built) and found.lds == config.lds_bytes


@both
def test_the_ring_waits_as_predicted(arch):
    """vmcnt(n) with n of `outstanding`, before K and before V; two barriers a tile and one at the end."""
    built = unmasked(arch, "ring")
    k, v = built.config.k, built.config.v
    waits = {n: count for n, count in built.summary.waits.items() if n > 0}
    assert waits == {outstanding(v): 1, outstanding(v, k): 1}
    assert built.summary.copies == 2 * (vm_instructions(k) + vm_instructions(v)), "before the loop and in it"
    assert built.summary.count("s_barrier") == 3
    assert built.summary.count("ds_write") == 0


@both
def test_one_slot_waits_for_everything(arch):
    built = unmasked(arch, "lds")
    k, v = built.config.k, built.config.v
    loads = k.strips + v.strips
    assert set(built.summary.waits) == {0} and built.summary.waits[0] >= loads
    assert built.summary.copies == k.strips * vm_instructions(k) + v.strips * vm_instructions(v)
    assert built.summary.count("s_barrier") >= loads
    assert built.summary.count("ds_write") == 0


@both
def test_registers_write_lds_themselves(arch):
    built = unmasked(arch, "registers")
    assert built.summary.copies == 0
    assert built.summary.count("ds_write") > 0
    assert built.summary.count("s_barrier") == 2 * built.config.k.strips + 2 * (built.config.v.strips - 1)


@pytest.mark.parametrize("kind", drawn(KINDS, ["lds", "ring"]))
def test_gfx950_transposes_v_while_it_reads(kind):
    """A lane's keys of a column come eight bytes at a time, K's head dim sixteen."""
    built = prefill("gfx950", kind)
    config, found = built.config, built.summary
    assert found.count("ds_read_b64_tr_b16") == config.block_n * config.padded_v // (64 * 4)
    assert found.count("ds_read_b128") == config.block_n * config.padded_qk // (64 * 8)


@pytest.mark.full
def test_gfx942_transposes_v_in_registers():
    """Copied by DMA, V is read two bytes at a time; through registers, sixteen (two vectors of eight)."""
    ring, registers = prefill("gfx942", "ring"), prefill("gfx942", "registers")
    assert ring.summary.count("ds_read_u16") == ring.config.block_n * ring.config.padded_v // 64
    assert registers.summary.count("ds_read_u16") == 0
    vectors = registers.config.block_n * registers.config.padded_v // (64 * 4)
    assert registers.summary.count("ds_read2") * 2 + registers.summary.count("ds_read_b64") == vectors
    assert registers.summary.count("buffer_load_ushort", "buffer_load_short") == 0, "every load is a vector"


COPIES = list(product(("lds", "ring"), ARCHS))


@pytest.mark.parametrize(("kind", "arch"), drawn(COPIES, COPIES[1:]))
def test_copies_are_awaited_in_the_machine_code(arch, kind):
    """Every range of LDS that the DMA writes is read after a wait that covers it and a barrier, on every path."""
    check = check_copies(prefill(arch, kind).text)
    assert check.complete and check.copies == prefill(arch, kind).summary.copies
    assert not check.findings


def test_a_loosened_wait_is_seen_in_the_machine_code():
    built = prefill("gfx950", "ring")
    n = outstanding(built.config.v)
    loose = built.text.replace(f"vmcnt({n})", f"vmcnt({n + 1})")
    assert loose != built.text and check_copies(loose).findings


MODIFIERS = {
    "full": (Full(), None),
    "chunks": (Chunked(100) & Causal(), None),
    "soft-cap": (Causal(), SoftCap(30.0)),
    "alibi": (Causal(), ALiBi(4)),
}


@pytest.mark.parametrize(("name", "arch"), drawn(product(MODIFIERS, ARCHS), [("soft-cap", "gfx950")]))
def test_modifiers_do_not_spill(name, arch):
    mask, score = MODIFIERS[name]
    call = Case(200, 300, heads=4, heads_kv=2, dim=128, mask=mask, score=score).call()
    assert no_spills(build(call, arch))


MASKS = {
    "window": SlidingWindow(100),
    "two-sided window": SlidingWindow(100, 30),
    "chunks and causal": Chunked(100) & Causal(),
    "padding and window": Padding(torch.tensor([300], dtype=torch.int32)) & SlidingWindow(30),
    "documents and causal": Document(torch.arange(300)[None] // 40) & Causal(),
    "outside a window": ~SlidingWindow(30),
    "or": SlidingWindow(20) | Prefix(10),
    "documents or prefix": (Document(torch.arange(300)[None] // 40) & Causal()) | Prefix(40),
    "chunks or prefix": Chunked(100) | Prefix(40),
    "boolean tensor": Materialized(torch.arange(300).expand(1, 4, 200, 300) % 3 != 0),
}


# Each kind of part of the others is in one of these; the window alone is in a test below.


@pytest.mark.parametrize(("name", "arch"), drawn(product(MASKS, ARCHS), [("padding and window", "gfx942")]))
def test_masks_do_not_spill(arch, name):
    """Not to memory, and no scalars to lanes of vector registers."""
    assert no_spills(build(Case(200, 300, heads=4, heads_kv=2, dim=128, mask=MASKS[name]).call(), arch))


def striped(b, h, q, k, width):
    """A comparison for each element, and several for the remainder of each row and key."""
    return ((q + h) % width[h] == k % width[h]) | (k == b)


DIVIDED = [(page_size, score, arch) for page_size, score in ((0, None), (16, None), (16, 3.0)) for arch in ARCHS]


@pytest.mark.full
@pytest.mark.parametrize(("page_size", "score", "arch"), drawn(DIVIDED, DIVIDED[-2:-1]))
def test_loaded_divisors_do_not_spill(arch, page_size, score):
    """Beside them, what the end alone needs (output, LSE, sinks) takes no scalar registers in the loop."""
    mask = CustomMask(striped, width=torch.arange(2, 6))
    case = Case(200, 300, heads=4, heads_kv=2, dim=128, mask=mask, score=score and SoftCap(score), sinks=True)
    assert no_spills(build(paged(case, [300], page_size) if page_size else case.call(), arch))


@pytest.mark.full
@pytest.mark.parametrize(("dim", "arch"), drawn(product((64, 128), ARCHS), [(64, "gfx942")]))
def test_windows_cost_no_occupancy(arch, dim):
    built = build(Case(200, 300, heads=4, heads_kv=2, dim=dim, mask=SlidingWindow(100)).call(), arch)
    assert no_spills(built) and built.summary.occupancy == OCCUPANCY[arch, dim]


@pytest.mark.full
@pytest.mark.parametrize("page_size", drawn([3, 16], [3]))
def test_small_pages_of_padded_head_dims(page_size):
    """Loads from pages that end inside a strip are in no branches, which would also compile slowly."""
    cases = [Case(40, 1, heads=4, dim=72, mask=mask) for mask in (CAUSAL, Full())]
    masked, plain = (build(paged(case, [70, 3000], page_size), "gfx942") for case in cases)
    assert no_spills(masked) and no_spills(plain)
    assert plain.summary.waits[0] <= 6, "not one for each load; under a mask other code waits, too"


SHIPPED = list(product((1, 40), (0, 16, 64)))


@pytest.mark.parametrize(("shape", "arch"), drawn(product(SHIPPED, ARCHS), [(SHIPPED[2], "gfx950")]))
def test_shipped_configs_are_proven(shape, arch):
    """Copies, stores and reads of LDS are in order on every path, and no register is used before it is loaded."""
    queries, page_size = shape
    case = Case(queries, 4000, heads=8, dim=128, mask=Causal())
    built = build(paged(case, [70, 3000], page_size) if page_size else case.call(), arch)
    assert check_copies(built.text).proven
    assert not check_loads(built.text)


LATENT = ((16, 0), (16, 16), (128, 64), (128, 0))


@pytest.mark.parametrize(("shape", "arch"), drawn(product(LATENT, ARCHS), [(LATENT[2], "gfx950")]))
def test_latent_attention(shape, arch):
    """The queries, 32 of 576 columns at most, and a quarter of the output stay in the registers of a wave."""
    heads, page_size = shape
    case = Latent((3000, 70) if page_size else (3000, 3000), page=page_size, heads=heads, mask=Causal())
    built = build(tensors(case).call(case), arch)
    assert no_spills(built) and built.config.block_m == min(heads, 32)
    assert built.summary.lds <= 48 * 1024
    assert check_copies(built.text).proven
    assert not check_loads(built.text)


@pytest.mark.parametrize(("page_size", "arch"), drawn(product((16, 64), ARCHS), [(16, "gfx942")]))
def test_pages_do_not_spill(arch, page_size):
    assert no_spills(build(paged(Case(40, 1, heads=4, dim=128, mask=Causal()), [70, 129], page_size), arch))
    assert no_spills(build(paged(Case(1, 1, heads=4, dim=128), [70, 3000], page_size), arch))


@pytest.mark.parametrize("page_size", drawn([16, 64], [16]))
def test_copies_from_pages_overlap(page_size):
    """The table is read a tile early: nothing before the end waits for more than K does among dense keys, which leaves
    the copies of V under way."""
    built = build(paged(Case(40, 1, heads=4, dim=128), [70, 129], page_size), "gfx950")
    k, v = built.config.k, built.config.v
    waits = built.summary.waits
    assert waits[0] == 1, "at the end"
    assert waits[outstanding(v)] == 1 and min(n for n in waits if n) == outstanding(v)
    assert waits[outstanding(v, k)] > 0, "V, and pages of the next tile, leave K and V of that tile under way"
    assert built.summary.count("buffer_load") == unmasked("gfx950").summary.count("buffer_load") // 3, "those of Q"


def test_pages_of_whole_tiles_have_one_base_on_gfx942():
    """Buffer loads from the base of a page take no loop over the lanes' bases (v_readfirstlane of each)."""
    built = build(paged(Case(40, 1, heads=4, dim=128), [70, 129], 64), "gfx942")
    assert built.summary.count("v_readfirstlane") <= unmasked("gfx942").summary.count("v_readfirstlane") + 2


def test_tables_are_read_a_tile_early_on_gfx942():
    """No load of the loop waits for all that was asked for before it, as those of pages just looked up would; one page
    of a whole tile is looked up once for K and V."""
    case = Case(40, 1, heads=4, dim=128)
    rows = build(paged(case, [70, 129], 16), "gfx942").summary
    assert 0 not in rows.waits, rows.waits
    whole = read(build(paged(case, [70, 129], 64), "gfx942").text).instructions
    tables = [found for found in whole if found.name == "s_load_dword" and found.place.startswith("kv_buffer.py")]
    assert len(tables) == 2, "before the loop and in it"


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
def test_ragged_batches_and_fp16_do_not_spill(arch):
    q, k = torch.randn(30, 4, 128).half(), torch.randn(30, 2, 128).half()
    offsets = torch.tensor([0, 10, 30], dtype=torch.int32)
    assert no_spills(build(Call(q, k, k, Ragged(offsets), Causal(), return_lse=True), arch))
