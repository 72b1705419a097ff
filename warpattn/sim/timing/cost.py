"""Costs of operations: a chip's rates and latencies with their sources, and the price of each operation.

    operation ─ price ─▶ Price: cycles on engines (as if one role had the SM for itself), cycles of latency after them

An engine serves all roles of a program in the order of their requests. Numbers are per SM and clock cycle. Nothing here
depends on a kernel or shape; `python -m bench.model` measures how good the predictions are.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import SimulationError
from ..ir.module import Block, Op
from ..ir.valuetypes import Type, parse_type

WARP = 32
BANKS = "shared memory"  # the engine with concurrent users, see `bandwidth`


@dataclass(frozen=True)
class Chip:
    """Rates of the engines in units per SM and cycle, and latencies in cycles."""

    name: str
    sms: int
    quarters: int  # schedulers of an SM: a role of fewer warps reaches that part of each rate
    rates: dict[str, float]
    latencies: dict[str, float]
    sources: tuple[str, ...]
    copies: str = "TMA"  # the engine of copies between global and shared memory


SM90 = Chip(
    "sm_90",
    sms=132,
    quarters=4,
    rates={
        "issue": 128,  # lanes: a warp instruction in each quarter
        "FMA": 128,  # results of fp32 add, multiply, fused multiply-add
        "ALU": 64,  # min, max, compare, select, logic, integer add and multiply, conversions
        "MUFU": 16,  # ex2, lg2, rcp, rsqrt, sin, cos, tanh
        "shuffle": 32,
        "shared memory": 128,  # bytes
        "tensor core": 4096,  # multiply-adds' operations (two each) of 16-bit operands
        "TMA": 64,  # bytes, from and to L2
        "load/store": 64,  # bytes of ordinary loads and stores, from and to L2
        "DRAM": 19,  # bytes, an SM's share
    },
    latencies={
        "scalar": 6,  # one or two dependent instructions; many run on the uniform datapath
        "integer division": 90,
        "tensor": 4,  # dependent instructions of a tensor of one element per lane
        "shuffle": 25,
        "shared memory": 30,
        "global memory": 700,
        "atomic": 700,
        "TMA": 1000,
        "TMA issue": 20,
        "tensor core": 60,
        "tensor core issue": 30,
        "tensor core wait": 20,
        "operand in registers": 4,  # extra for each instruction whose left operand is in registers
        "mbarrier wait": 60,  # with the barrier of the role's warps that Triton puts before it
        "mbarrier arrive": 10,
        "named barrier": 25,
        "fence": 100,  # until the role's own stores have arrived
        "role start": 1000,
    },
    sources=(
        "rates of FMA, ALU, MUFU, shuffle: CUDA C++ Programming Guide, arithmetic instructions, capability 9.0",
        "tensor core: H100 data sheet, 989 TFLOP/s dense bf16 = 132 SMs at 1.83 GHz x 4096",
        "integer division: stamps of %clock on an H200 before and after four moved, bench/notes.md rows 6 and 7",
        "shared memory: 32 banks of 4 bytes; two warpgroups that multiply 64 columns reach it (bench.model.rates)",
        "operand in registers: 4 to 5 cycles an instruction on an H200 (bench.model.rates)",
        "TMA: what L2 can send to an SM; head dim 256 streams 31 bytes a cycle for its whole time",
        "DRAM: decode of 32 x 4k on an H200, 18.6 bytes a cycle (ncu, at 1.77 GHz)",
        "all other latencies: round figures, chosen with the measured cycles of the kernels in view",
    ),
)
# Models from data sheets, compared with no measurement: see `sources`.
SM100 = replace(
    SM90,
    name="sm_100",
    sms=148,
    rates=SM90.rates | {"tensor core": 8192, "tensor memory": 128},
    sources=(
        "tensor core: B200 data sheet, 2.25 PFLOP/s dense bf16 = 148 SMs at 1.85 GHz x 8192",
        "tensor memory: as fast as shared memory, a guess",
        "all else as sm_90, not measured",
    ),
)
SM103 = replace(
    SM100,
    name="sm_103",
    rates=SM100.rates | {"MUFU": 32},
    sources=("MUFU: Blackwell Ultra by its announcement, twice the exponentials of B200", *SM100.sources),
)
GFX942 = Chip(
    "gfx942",
    sms=304,
    quarters=4,
    rates={
        "issue": 64,
        "FMA": 64,
        "ALU": 64,
        "MUFU": 16,
        "shuffle": 32,
        "shared memory": 128,
        "tensor core": 2048,
        "copies to LDS": 64,
        "load/store": 64,
    },
    latencies=SM90.latencies
    | {"integer division": 300, "tensor": 8, "scalar": 4, "copies to LDS": 800, "shared memory": 64},
    copies="copies to LDS",
    sources=(
        "tensor core (matrix cores): MI300X data sheet, 1307 TFLOP/s dense bf16 = 304 CUs at 2.1 GHz x 2048",
        "FMA and ALU: 81.7 TFLOP/s of vector fp32 = 304 CUs at 2.1 GHz x 128; LDS and L1: CDNA 3 white paper",
        "all else is a round figure, not measured",
    ),
)
GFX950 = replace(
    GFX942,
    name="gfx950",
    sms=256,
    rates=GFX942.rates | {"tensor core": 4096},
    sources=("tensor core: MI355X data sheet, 2.5 PFLOP/s dense bf16 = 256 CUs at 2.4 GHz x 4096", *GFX942.sources[1:]),
)
CHIPS = {"cuda:90": SM90, "cuda:100": SM100, "cuda:103": SM103, "hip:gfx942": GFX942, "hip:gfx950": GFX950}

_MUFU = {"math.exp2", "math.exp", "math.log2", "math.log", "math.sqrt", "math.rsqrt", "math.sin", "math.cos",
         "math.tanh", "math.erf"}  # fmt: skip
_FMA = {"arith.addf", "arith.subf", "arith.mulf", "math.fma", "arith.negf"}
_FREE = {
    "arith.constant", "arith.bitcast", "tt.bitcast", "tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims",
    "tt.reshape", "tt.trans", "tt.join", "tt.split", "tt.make_range", "tt.get_program_id", "tt.get_num_programs",
    "arith.extui", "arith.extsi", "arith.trunci", "arith.index_cast", "ttg.memdesc_index", "ttg.memdesc_reshape",
    "ttg.memdesc_trans", "ttg.memdesc_subslice", "ttg.memdesc_reinterpret", "ttg.local_dealloc", "arith.extf",
    "ttng.tmem_alloc", "ttng.tmem_dealloc", "ttng.tmem_subslice", "ttng.tmem_wait",
    "ttg.warp_specialize", "tt.call", "scf.for", "scf.if", "scf.while", "ttg.async_commit_group", "ub.poison",
}  # fmt: skip
_GLOBAL = {"tt.load", "tt.store", "tt.descriptor_load", "tt.descriptor_store", "amdg.buffer_load", "amdg.buffer_store"}
_DIVISIONS = {"arith.divsi", "arith.remsi", "arith.divui", "arith.remui"}
_DIVISION, _BY_CONSTANT = 20, 4  # instructions
_PACKED = 2  # elements of an instruction
_LATENCY = {
    "ttng.wait_barrier": "mbarrier wait", "ttng.arrive_barrier": "mbarrier arrive",
    "ttng.async_copy_mbarrier_arrive": "mbarrier arrive",
    "ttng.barrier_expect": "mbarrier arrive", "ttng.init_barrier": "mbarrier arrive", "ttng.inval_barrier": "scalar",
    "ttng.fence_async_shared": "fence", "ttg.barrier": "named barrier", "gpu.barrier": "named barrier",
    "ttng.warp_group_dot": "tensor core issue", "ttng.warp_group_dot_parts": "tensor core issue",
    "ttng.warp_group_dot_wait": "tensor core wait",
    "ttng.async_tma_copy_global_to_local": "TMA issue", "ttng.async_tma_copy_local_to_global": "TMA issue",
    "ttng.async_tma_reduce": "TMA issue", "ttng.async_tma_store_wait": "mbarrier wait",
    "ttng.tc_gen5_mma": "tensor core issue",
    "ttng.tc_gen5_commit": "mbarrier arrive", "ttng.tmem_copy": "tensor core issue",
    "ttg.async_wait": "mbarrier wait", "tt.atomic_rmw": "atomic", "tt.atomic_poll": "atomic",
    "amdg.buffer_atomic_rmw": "atomic", "amdg.buffer_atomic_cas": "atomic", "amdg.buffer_load_to_local": "TMA issue",
    "ttg.async_copy_global_to_local": "TMA issue",
    "tt.atomic_cas": "atomic",
}  # fmt: skip


class Price(NamedTuple):
    """Cycles that an operation keeps engines busy, in parallel, and the latency that follows."""

    engines: tuple[tuple[str, float], ...] = ()
    latency: float = 0.0


FREE = Price()
PRODUCTS = {"wgmma", "tcgen05 mma"}  # asynchronous work of the tensor core
_READING = {"ttng.warp_group_dot": (64, 256), "ttng.tc_gen5_mma": (128, 256)}  # rows and columns of an instruction
_STEP = 256  # bits of a row of A that an instruction multiplies


def chip_of(target: str) -> Chip:
    """Return the chip of a TTGIR target; raises SimulationError if it has no cost model."""
    if target not in CHIPS:
        raise SimulationError(f"there is no cost model for {target}; timing knows {', '.join(sorted(CHIPS))}")
    return CHIPS[target]


def prices(block: Block, chip: Chip, constants: frozenset[str] = frozenset()) -> dict[int, Price]:
    """Return prices of the operations of a block and its regions by `uid`; operations without one are free."""
    found: dict[int, Price] = {}
    fused = _fused(block)
    constants |= {name for op in block.ops if op.name == "arith.constant" for name in op.results}
    for op in block.ops:
        price = FREE if op.uid in fused else price_of(op, chip, constants)
        if price is not FREE:
            found[op.uid] = price
        if not op.name.startswith(("tt.reduce", "tt.scan", "tt.map")):
            for region in op.regions:
                found |= prices(region, chip, constants)
    return found


def _fused(block: Block) -> set[int]:
    """Return multiplications of tensors whose only use is an addition: both become one fused multiply-add."""
    users: dict[str, list[Op]] = {}
    for op in block.ops:
        for name in op.operands:
            users.setdefault(name, []).append(op)
    single = (op for op in block.ops if op.name == "arith.mulf" and len(users.get(op.results[0], ())) == 1)
    return {op.uid for op in single if users[op.results[0]][0].name in ("arith.addf", "arith.subf")}


def price_of(op: Op, chip: Chip, constants: frozenset[str] = frozenset()) -> Price:
    """Return the price of an operation for the role that executes it; `constants`: names of known values."""
    name = op.name
    if name in _FREE or not (op.inputs or op.outputs or name in _LATENCY or "asm" in name):
        return FREE
    if name in _LATENCY:
        return Price((), chip.latencies[_LATENCY[name]])
    if "asm" in name:
        return _assembly(op, chip)
    if name in ("tt.reduce", "tt.scan"):
        return _reduction(op, chip)
    if name in ("ttg.local_load", "ttg.local_store", "ttg.local_alloc", "ttng.tmem_load", "ttng.tmem_store"):
        stored = _bytes(op.inputs[0]) if op.inputs else 0
        engine = "tensor memory" if name.startswith("ttng.tmem") else BANKS
        return Price(((engine, stored / chip.rates[engine]),), chip.latencies[BANKS])
    if name == "ttg.convert_layout":
        return _conversion(op, chip)
    if name in _GLOBAL:
        moved = _bytes(op.outputs[0] if op.outputs else op.inputs[-1])
        latency = chip.latencies["global memory"] if op.outputs else 0.0
        return Price((("load/store", moved / chip.rates["load/store"]),), latency)
    return _arithmetic(op, chip, constants)


def _arithmetic(op: Op, chip: Chip, constants: frozenset[str]) -> Price:
    kind = op.type
    division = op.name in _DIVISIONS
    if kind.shape is None:
        if division and op.operands[1] in constants:  # a multiplication and shifts
            return Price((), _BY_CONSTANT * chip.latencies["scalar"])
        return Price((), chip.latencies["integer division" if division else "scalar"])
    engine = "MUFU" if op.name in _MUFU or op.name.endswith("divf") else "FMA" if op.name in _FMA else "ALU"
    elements = math.prod(kind.shape)
    if division:
        elements *= _BY_CONSTANT if op.operands[1] in constants else _DIVISION
    if op.name == "tt.dot":
        return product(op, chip)
    if op.name == "ttng.packed_arith":
        engine, elements = "FMA", elements / _PACKED
    return _on(engine, elements, chip)


def _on(engine: str, lanes: float, chip: Chip, latency: float | None = None) -> Price:
    busy = [("issue", lanes / chip.rates["issue"])]
    if chip.rates[engine] < chip.rates["issue"]:
        busy.append((engine, lanes / chip.rates[engine]))
    return Price(tuple(busy), chip.latencies["tensor"] if latency is None else latency)


def _assembly(op: Op, chip: Chip) -> Price:
    """Price inline assembly by its slowest known instruction."""
    text = op.strings[0]
    if "bar.sync" in text or "bar.arrive" in text or "barrier" in text.split()[0]:
        return Price((), chip.latencies["named barrier"] if "sync" in text else chip.latencies["scalar"])
    if "mbarrier" in text:
        return Price((), chip.latencies["mbarrier arrive"])
    if op.name != "tt.elementwise_inline_asm":
        return Price((), 4 * chip.latencies["scalar"] + (chip.latencies["shuffle"] if "vote" in text else 0))
    words = [word for word in text.replace(";", " ").split() if "." in word]
    if all(word.startswith("mov.") for word in words):
        return FREE
    slow = any(word.startswith(("ex2", "lg2", "rcp", "rsqrt", "sin", "cos", "tanh", "sqrt")) for word in words)
    fast = all(word.startswith(("fma", "add", "mul", "sub")) and ".f32" in word for word in words)
    return _on("MUFU" if slow else "FMA" if fast else "ALU", math.prod(op.type.shape or (1,)), chip)


def _reduction(op: Op, chip: Chip) -> Price:
    """Price one operation per element; if fewer results than lanes remain, also shuffles between lanes."""
    elements, results = math.prod(op.inputs[0].shape or (1,)), math.prod(op.outputs[0].shape or (1,))
    if elements < WARP and results == 1:
        return Price((), chip.latencies["tensor"])
    engine = "FMA" if any(inner.name == "arith.addf" for inner in op.regions[0].ops) else "ALU"
    price = _on(engine, elements * max(1, len(op.outputs)), chip)
    if results >= 4 * WARP:
        return price
    rounds = 2 if results > 1 else 5
    shuffles = ("shuffle", rounds * 4 * WARP / chip.rates["shuffle"])
    return Price((*price.engines, shuffles), price.latency + rounds * chip.latencies["shuffle"])


def _conversion(op: Op, chip: Chip) -> Price:
    """Price a layout change: free if registers stay, else a write to and a read from shared memory."""
    kind = op.outputs[0]
    if "dot_op" in kind.text or math.prod(kind.shape or (1,)) <= 8 * WARP or "linear" in op.inputs[0].text + kind.text:
        return FREE  # declared by the kernel's author as free of movement, or too small to matter
    return Price(((BANKS, 2 * _bytes(kind) / chip.rates[BANKS]),), 2 * chip.latencies[BANKS])


def product(op: Op, chip: Chip) -> Price:
    """Price a matrix product on the tensor core; operands of n bits run at 16 / n of the 16-bit rate."""
    if op.name == "ttng.warp_group_dot_parts":
        return _product_of_parts(op, chip)
    (m, k), n = (op.inputs[0].shape or (1, 1))[-2:], (op.inputs[1].shape or (1, 1))[-1]
    rate = chip.rates["tensor core"] * 16 / op.inputs[0].bits
    engines = [("tensor core", 2 * m * n * k / rate)]
    if op.name == "ttng.warp_group_dot" and op.inputs[0].kind == "tensor":
        steps = m / _READING[op.name][0] * k * op.inputs[0].bits / _STEP
        engines = [("tensor core", engines[0][1] + steps * chip.latencies["operand in registers"])]
    if op.name in _READING:
        engines.append((BANKS, _operand_bytes(op, m, n) / chip.rates[BANKS]))
    return Price(tuple(engines), chip.latencies["tensor core"])


def _product_of_parts(op: Op, chip: Chip) -> Price:
    """Price a product of 16-bit operands, the left one in registers, whose accumulator is in parts of columns."""
    keys, columns = (op.inputs[-1].shape or (1,))[0], sum((part.shape or (0,))[-1] for part in op.outputs)
    steps = keys * 16 / _STEP
    busy = 2 * 64 * columns * keys / chip.rates["tensor core"] + steps * chip.latencies["operand in registers"]
    engines = (("tensor core", busy), (BANKS, 2 * keys * columns / chip.rates[BANKS]))
    return Price(engines, chip.latencies["tensor core"])


def _operand_bytes(op: Op, m: int, n: int) -> float:
    """Return the bytes of shared memory that a product's instructions read: each reads its rows of A, unless they are
    in registers or tensor memory, and all columns of B."""
    rows, columns = _READING[op.name]
    a, b = op.inputs[:2]
    in_shared = a.kind == "memdesc" and "tensor_memory" not in a.text
    return _bytes(a) * in_shared * math.ceil(n / columns) + _bytes(b) * math.ceil(m / rows)


def asynchronous(op: Op, engine: str, second: bool, chip: Chip) -> Price:
    """Price the work that `op` has started; `second`: the part of a store after reading."""
    if engine in PRODUCTS:
        return product(op, chip)
    if "commit" in engine:
        return Price((), chip.latencies["mbarrier arrive"])
    views = [kind for kind in (*op.inputs, *op.outputs) if kind.kind == "memdesc" and kind.elem != "i64"]
    bare = re.search(r"-> (<[^>]*>)", op.raw)  # AMD's copies print only the inside of a memdesc
    if not views and bare:
        views = [parse_type(f"!ttg.memdesc{bare[1]}")]
    moved = sum(_bytes(kind) for kind in views[:1])
    shared = (BANKS, moved / chip.rates[BANKS])
    if engine == "TMA store" and not second:
        return Price((shared,), chip.latencies[BANKS])
    copy = (chip.copies, moved / chip.rates[chip.copies])
    return Price((copy,) if second else (copy, shared), chip.latencies[chip.copies])


def _bytes(kind: Type) -> int:
    return math.prod(kind.shape or (1,)) * kind.itemsize


