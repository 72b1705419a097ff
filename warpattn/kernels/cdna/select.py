"""Which config a problem gets on gfx942 or gfx950, into how many partitions its keys are split, and why.

No card has run these kernels: the reasons are instruction counts, registers and sizes, not times.
"""

from __future__ import annotations

from dataclasses import replace

from warpattn.errors import many
from warpattn.problem import Problem, is_latent
from warpattn.problem.arch import Arch
from warpattn.problem.element import Element
from warpattn.problem.launch import INVARIANT, Choice
from warpattn.problem.operands import COPY_RULE
from warpattn.problem.problem import Scales
from warpattn.problem.scales import EightBit, eight_bit_of

from .config import Buffers, CDNAConfig, Traits, pad_dim

LATENT_ROWS = 32  # of latent attention: a wave holds 576 columns of all queries and 128 of 512 columns of the output
DECODE_TOKENS = 16  # with more queries per sequence a call is prefill
PARTITION_UNIT = 256  # keys; partitions are multiples of it
WIDENED = "keys and values of 8 bits become 16-bit ones in registers, on their way to LDS"
BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64)  # numbers of partitions: few, so that workspaces have few shapes


def choose(problem: Problem, target: Arch, *, batch_invariant: bool = False) -> Choice:
    """The choice for a problem.

    batch_invariant: keys are not split, since the number of parts depends on the number of sequences; and the queries
    of a step, of which more or fewer may be in the next one, do not choose between decode and prefill.
    """
    group = problem.heads_q // problem.heads_kv
    eight_bit = eight_bit_of(problem)
    if decodes(problem) and not (batch_invariant and problem.ragged_queries and not is_latent(problem)):
        config, why = decode_config(problem, target.name)
        partitions, share = (1, INVARIANT) if batch_invariant else partitions_of(problem, target)
        kernel, reasons = "decode", (why, share)
    else:
        kind = "" if eight_bit is None else "registers"
        config, why = prefill_config(problem.element, problem.dim_qk, problem.dim_v, target.name, kind)
        kernel, partitions, reasons = "prefill", 1, (why,)
    if eight_bit is not None:
        if is_latent(problem):
            eight_bit = of_latents(eight_bit, problem)
        config, reasons = with_eight_bit(config, eight_bit), (*reasons, WIDENED)
        if eight_bit.columns("k"):
            reasons = (*reasons, f"a strip of keys has {config.buffers.k_strip} columns, whose scores have one scale")
        if eight_bit.columns("v"):
            reasons = (*reasons, "values are multiplied by the scales of their columns there, and rounded once")
    m_tiles = -(-problem.longest_q // (config.block_m // config.pack))
    tiles = problem.batch * problem.heads_kv * -(-group // config.pack) * m_tiles

    def lines() -> tuple[str, ...]:
        return (
            f"tile {config.block_m} x {config.block_n}, {many(config.waves, 'wave')}, {config.instr} x {config.instr} "
            f"MFMA, {config.buffers.kind} buffers, {config.lds_bytes} bytes of LDS",
            f"{many(tiles, 'tile')}, {many(partitions, 'partition')} of the keys",
        )

    order = "tiles of one key head go to one XCD, whose L2 then holds its keys"
    return Choice(kernel, config, (tiles, partitions), lines, (*reasons, order, COPY_RULE), partitions)


def with_eight_bit(config: CDNAConfig, eight_bit: EightBit) -> CDNAConfig:
    """A config for keys and values of 8 bits: a strip of keys has one scale at most, which its product is multiplied
    by."""
    columns = eight_bit.columns("k") or config.buffers.k_strip
    buffers = replace(config.buffers, k_strip=min(columns, config.buffers.k_strip))
    return replace(config, eight_bit=eight_bit, buffers=buffers)


def of_latents(eight_bit: EightBit, problem: Problem) -> EightBit:
    """The 8-bit tensors of latent attention: one scale for each block of columns, or for all 512 (tokens that share
    one have strides of 0). Rotary columns of 8 bits have the scale of the latent, so a key has one for all 576."""
    shared = eight_bit.columns("k") or problem.dim_v
    scales = Scales(problem.dim_qk if problem.narrow_rope else shared, shared)
    return replace(eight_bit, scales=scales, rope=eight_bit.element if problem.narrow_rope else problem.element)


def decodes(problem: Problem) -> bool:
    """Whether every sequence has few queries, and the problem says so."""
    return problem.kind != "ragged" and problem.longest_q <= DECODE_TOKENS


def traits_of(problem: Problem, partial: bool) -> Traits:
    """The traits of the kernel of a problem."""
    own_rope = problem.q_rope > 0
    return Traits(problem.kind, problem.page_size, problem.has_sinks, problem.has_lse, partial, own_rope)


def prefill_config(element: Element, dim_qk: int, dim_v: int, arch: str, kind: str = "") -> tuple[CDNAConfig, str]:
    """128 rows in four waves of 32; `kind` replaces the architecture's default kind of buffers."""
    wide = pad_dim(max(dim_qk, dim_v))
    kind = kind or ("ring" if arch == "gfx950" else "registers")
    if kind == "lds":
        rows, k_strip, v_strip = 64, 32, 32
    elif kind == "registers" and arch == "gfx942":
        rows, k_strip, v_strip = 64 if wide <= 128 else 32, pad_dim(dim_qk), 64 if wide <= 64 else 32
    else:
        rows = 32 if arch == "gfx942" and wide > 64 else 64
        k_strip, v_strip = pad_dim(dim_qk), rows
    buffers = Buffers(kind, k_strip, v_strip, slots=2 if kind == "ring" else 1)
    config = CDNAConfig(arch, element, dim_qk, dim_v, 128, rows, 32, 4, 1, buffers)
    return config, _why(kind, arch)


def decode_config(problem: Problem, arch: str) -> tuple[CDNAConfig, str]:
    """As few rows as the tokens of a group need, waves along the keys."""
    group = problem.heads_q // problem.heads_kv
    most = LATENT_ROWS if is_latent(problem) else 64
    pack = 1 if "h" in problem.span_reads.symbols else min(group, most)
    tokens = problem.longest_q
    rows = max(16, min(most, 1 << (tokens * pack - 1).bit_length()))
    rows_why = f"{many(tokens, 'token')} of {many(pack, 'head')} in a tile of {rows} rows"
    qk, v = pad_dim(problem.dim_qk), pad_dim(problem.dim_v)
    wide = max(qk, v)
    sizes = (arch, problem.element, problem.dim_qk, problem.dim_v, rows)
    if is_latent(problem):
        config = CDNAConfig(*sizes, 64, 16, 1, 4, Buffers("registers", 64, 32), pack)
        why = "latents come twice, in strips of 64 columns as keys and of 32 rows as values: a whole tile is too large"
        return config, f"{rows_why}; {why}"
    if arch == "gfx950" and problem.kv_dtype is None:
        keys = 128 if wide <= 128 and rows <= 32 else 64
        config = CDNAConfig(*sizes, keys, 16, 1, 4, Buffers("ring", qk, keys, slots=2), pack)
    else:
        config = CDNAConfig(*sizes, 64, 16, 1, 4, Buffers("registers", min(qk, 64), 64), pack)
    why = _why(config.buffers.kind, arch)
    return config, f"{rows_why}; {why}"


def _why(kind: str, arch: str) -> str:
    if kind == "ring":
        return "ring: the next keys are on their way to LDS during a tile, 16 bytes a lane and instruction on gfx950"
    if kind == "registers" and arch == "gfx942":
        return (
            "registers: the DMA of gfx942 moves 4 bytes a lane, loads into registers 16, and V is transposed there "
            "instead of being read from LDS two bytes at a time"
        )
    return f"{kind}: to be compared with the others"


def partitions_of(problem: Problem, target: Arch) -> tuple[int, str]:
    """(partitions of the keys, why), from the problem alone: lengths are on the device."""
    streams, keys = problem.batch * problem.heads_kv, problem.seq_k
    if keys <= PARTITION_UNIT:
        return 1, f"{many(keys, 'key')} {'is' if keys == 1 else 'are'} one unit of {PARTITION_UNIT}"
    if streams >= target.processors:
        wanted = -(-keys // (PARTITION_UNIT * max(1, streams // 64)))
        return _bucket(wanted), f"{streams} key heads fill {target.processors} CUs, so parts stay long"
    least = -(-target.processors // streams)
    units = -(-keys // PARTITION_UNIT)
    wanted = min(max(-(-units // 5), least), 2 * least)
    cus = f"{many(streams, 'key head')} on {target.processors} CUs"
    why = f"{cus}: one or two workgroups each, of {PARTITION_UNIT} keys or more"
    return _bucket(min(wanted, units)), why


def _bucket(wanted: int) -> int:
    return next((n for n in BUCKETS if n >= wanted), BUCKETS[-1])
