"""The decode kernel of a call on Hopper: which configuration, which workspace, which arguments.

The workspace of a launch is two slots a CTA (or, batch-invariant, one a unit), a ticket for every key head, and a cell
for the number of CTAs. Its size follows from the shapes, not from the lengths, so a captured graph serves every step.
Tickets are 0 between launches and two launches that may run at once must not share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.language.nodes import Reads
from warpattn.problem import CheckedCall, Problem, is_latent
from warpattn.problem.arch import ARCHS, Arch, compile_options
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, Launch, PlanOptions
from warpattn.problem.operands import Operands, modifier_args, programs, run_strides
from warpattn.sequences import PagedKV, Sequence

from ...pieces.combine_config import CombineTile, allocate_parts
from ..mla.config import MlaConfig, choose_mla
from .config import DecodeConfig, choose_decode, early, even_cut, invariant, near_parts, shorter, spreads

MAX_TOKENS = 16
MANY_KEYS = 512  # with fewer, dense keys are left to the prefill kernel
APART = 4  # blocks of 32 parts by 4 rows from which one CTA would take longer over a head than a second launch
COMBINE_ARGUMENTS = ("out", "keys", "workspace", "lse_ptr", "sinks_ptr", "shape", "mask_args")
OPTIONS = compile_options()
PRICE = 1  # units that a head costs beside its keys where sequences may differ
LONG = 8 << 20  # bytes of keys and values of a CTA from which it better has its SM for itself to the end
SHORT = 1 << 20  # the same up to which asking for many keys in L2 is in the way of the launch in front
ASKED = (16 * 1024, 64 * 1024)  # bytes of keys asked for on an SM before they may be read: short runs, others
ASKED_EARLY = 48 * 1024  # beside a ring that is filled before that, in runs of more than twice `SHORT`
ALL = 1 << 30  # units of a run: any
WIDE_PLAN = 1024  # entries added up at once where there are more than 128


@dataclass(frozen=True)
class Workspace:
    """Sizes of what a launch needs beside its tensors."""

    slots: int
    rows: int  # of a slot
    cols: int
    tickets: int

    def allocate(self, device: torch.device) -> tuple[Tensor, Tensor, int, Tensor]:
        """The kernels' `workspace` argument; only the tickets have to be 0."""
        parts = allocate_parts((self.slots, self.rows), self.cols, device)
        return parts.o, parts.lse, self.rows, torch.zeros(self.tickets + 1, dtype=torch.int32, device=device)


def takes(problem: Problem) -> bool:
    """Whether the decode kernel can do a problem: few query tokens, dense or paged keys."""
    return problem.kind in ("dense", "paged") and 1 <= problem.seq_q <= MAX_TOKENS and problem.seq_k > 0


def serves(problem: Problem) -> bool:
    """Whether it is meant for a problem: of those it takes, the ones with many dense or any paged keys, and latent
    attention."""
    return takes(problem) and (problem.kind == "paged" or problem.seq_k >= MANY_KEYS or is_latent(problem))


def choose(
    problem: Problem, target: Arch, *, ctas: int | None = None, options: PlanOptions = DEFAULT_OPTIONS
) -> Choice:
    """The choice for a problem that it `takes`."""
    if not takes(problem):
        rule = f"the decode kernel takes dense or paged keys and 1 to {MAX_TOKENS} query tokens"
        raise AttentionError(f"the problem is {problem.kind} with {problem.seq_q} query tokens; {rule}")
    element, latent = problem.element, is_latent(problem)
    if latent:
        config: DecodeConfig = choose_mla(element, problem.page_size)
        config = invariant(config) if options.batch_invariant else config
    else:
        rows = problem.seq_q * problem.heads_q // problem.heads_kv
        config = choose_decode(element, problem.dim_qk, problem.dim_v, problem.page_size, ctas, rows)
        config = early(config) if options.cache_settled and not config.gathers else config
        if options.batch_invariant:
            config = invariant(config)
        elif not config.settled:
            config = fitting_tiles(config, problem, target)
    tiles = row_tiles(problem)
    entries = problem.batch * tiles
    config = replace(
        config,
        has_lengths=problem.kind == "paged",
        uniform=problem.kind == "dense" and tiles == 1 and _same_span(problem.span_reads),
        plan_width=WIDE_PLAN if entries > config.plan_width else config.plan_width,
        plan_once=entries <= WIDE_PLAN,
        one_tile=tiles == 1,
    )
    if not config.uniform:
        narrow = config.plan_width < WIDE_PLAN
        config = replace(
            config, plan_lane=config.plan_width // 32 if narrow else 1, price=0 if config.invariant else PRICE
        )
    grid = readers(config, target)
    if config.few_rows and config.uniform:
        config = replace(config, combine_few=near_parts(even_cut(entries * problem.heads_kv, grid)[0], config))
    apart = latent or _blocks(problem, config, grid) > APART
    spread = config.uniform and not apart and spreads(entries * problem.heads_kv, grid)
    config = replace(config, combine_apart=apart, spread=spread)
    config = config if latent else ahead(config, problem, grid)
    lines = (
        f"{config.words}, {config.smem_bytes} bytes of shared memory",
        f"{problem.batch * problem.heads_kv} heads of {tiles} row tiles over {grid} CTAs",
    )
    kernel, reasons = "mla" if latent else "decode", _reasons(config, target)
    return Choice(kernel, config, (grid,), lines, reasons, partitions=_partitions(problem, config, grid))


def readers(config: DecodeConfig, target: Arch) -> int:
    """CTAs of a launch. With one on an SM, a multiple of 16: with shares on all SMs, those in the fullest clusters of
    SMs finish last (GPCs; bench/notes.md has the times of three cards)."""
    return target.processors // 16 * 16 if config.ctas == 1 else target.processors * config.ctas


def fitting_tiles(config: DecodeConfig, problem: Problem, target: Arch) -> DecodeConfig:
    """The same with shorter tiles where heads are split, because there is not one for each CTA, or in one piece and not
    long."""
    grid = readers(config, target)
    whole = problem.batch * row_tiles(problem) * problem.heads_kv >= grid
    short_runs = problem.kind == "dense" and share_bytes(config, problem, grid) <= LONG
    return shorter(config) if short_runs or not whole else config


def share_bytes(config: DecodeConfig, problem: Problem, grid: int) -> int:
    """Bytes of keys and values that each of `grid` CTAs has if all sequences are as long as they may be."""
    keys = problem.batch * row_tiles(problem) * problem.heads_kv * problem.seq_k
    tiles = keys // (config.block_n * grid)
    return tiles * (config.k_bytes + config.v_bytes)


def ahead(config: DecodeConfig, problem: Problem, grid: int) -> DecodeConfig:
    """The same, launched ahead of the end of the launch in front of it, which it waits for by itself, with some of its
    keys asked for before that. The next launch may come likewise if a CTA's run is not long, which it decides itself;
    in any case if its CTAs keep pace and read pages, where that pays for long runs, too (bench/notes.md).
    """
    tile, share = config.k_bytes + config.v_bytes, share_bytes(config, problem, grid)
    most = ALL if config.under_way and problem.kind == "paged" else LONG // (config.unit * tile)
    if config.settled:
        asked = ASKED_EARLY if share > 2 * SHORT and problem.kind == "dense" else 0
    else:
        asked = 0 if config.gathers or problem.span_reads.tensors else ASKED[share > SHORT]
    tiles = min(asked // (config.ctas * config.k_bytes), 128 // config.boxes)
    return replace(config, ahead=True, hands_over=most, prefetched=tiles)


def _reasons(config: DecodeConfig, target: Arch) -> tuple[str, ...]:
    """Why the keys are shared out as they are."""
    unit = f"{config.unit} key tiles" if config.unit > 1 else "one key tile"
    where = f"{readers(config, target)} of the {target.processors} SMs, so that no cluster of SMs is full"
    where = where if config.ctas == 1 else f"{config.ctas} CTAs on each of {target.processors} SMs"
    shared = f"keys are shared out to within {unit} over {where}"
    even = f"equally long heads are not split, or equally, if no share grows by more than {config.growth} units for it"
    last = "the last CTA to finish a head combines its parts in a fixed order"
    last = "a second kernel combines the parts of a head, a few rows a program" if config.combine_apart else last
    same = "every partial has the same keys whatever else is in the batch"
    reasons = (shared, same, last) if config.invariant else (shared, even, last)
    if config.few_rows:
        reasons += (f"keys and values are on the left of the products, with {config.few_rows} columns for queries",)
    if config.ahead:
        pace = f", {config.under_way} tiles at a time" if config.under_way else ""
        first = f"read older keys{pace}" if config.settled else ""
        first += " and " if config.settled and config.prefetched else ""
        first += f"ask for keys of {config.prefetched} tiles in L2" if config.prefetched else ""
        first = f", and before that {first}" if first else ""
        reasons += (f"its CTAs may come before the launch in front has ended, which they wait for{first}",)
    if config.spread:
        reasons += ("a CTA takes every n-th head, so that heads beside each other are read at the same time",)
    once = "latents are read once, as keys and as values, and each of two warpgroups has half of the output's columns"
    return (*reasons, once) if isinstance(config, MlaConfig) else reasons


def row_tiles(problem: Problem) -> int:
    """64-row tiles of a key head."""
    return -(-problem.seq_q * problem.heads_q // problem.heads_kv // 64)


def workspace(problem: Problem, choice: Choice) -> Workspace:
    """What the choice's launch needs."""
    config: DecodeConfig = choice.config
    entries = problem.batch * row_tiles(problem) * problem.heads_kv
    slots = entries * _partitions(problem, config, 0) if config.invariant else 2 * choice.grid[0]
    rows = config.kept_rows if config.few_rows else min(64, problem.seq_q * problem.heads_q // problem.heads_kv)
    return Workspace(slots, rows, config.padded_v, entries)


def list_launches(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice | None = None
) -> tuple[Launch, ...]:
    """The decode kernel and, if it leaves parts behind, the one that adds them up; `choice` replaces the one made from
    the problem."""
    choice = choose(checked.problem, ARCHS["sm90"]) if choice is None else choice
    space = workspace(checked.problem, choice).allocate(x.q.device)
    mask, score = programs(checked)
    problem, config = checked.problem, choice.config
    key = (config, mask.key, None if score is None else score.key, problem.has_sinks, problem.has_lse)
    args = arguments(checked, x, sequence, choice) | {"workspace": space}

    def source():
        from .signature import decode_source  # imports Triton

        return decode_source(config, mask, score, problem.has_sinks, problem.has_lse)

    def source_of_sum():
        from .signature import combine_source

        return combine_source(config, mask, problem.has_sinks, problem.has_lse)

    decode = Launch(
        f"sm90.{choice.kernel}", "sm90", key, source, options(config), choice.grid, args,
        persistent=True, ahead=config.ahead,
    )  # fmt: skip
    if not config.combine_apart:
        return (decode,)
    shared = {name: args[name] for name in COMBINE_ARGUMENTS}
    heads = problem.batch * row_tiles(problem) * problem.heads_kv
    rows = CombineTile(config.combine_cols).rows
    grid = (heads, -(-space[2] // rows), config.padded_v // config.combine_cols)
    return (decode, Launch("sm90.combine", "sm90", key, source_of_sum, OPTIONS, grid, shared))


def options(config: DecodeConfig) -> dict[str, object]:
    """Options of triton.compile."""
    limit = {"maxnreg": config.max_registers} if config.ctas > 1 else {}
    return OPTIONS | limit


def arguments(checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice) -> dict[str, object]:
    """Every argument of the kernel but its workspace."""
    p, config = checked.problem, choice.config
    keys, pages = (None, None, 0), p.batch
    if isinstance(sequence, PagedKV):
        table = sequence.block_table
        table = table if table.stride(-1) == 1 else table.contiguous()
        keys, pages = (sequence.lengths, table, table.stride(0)), len(x.k)
    tiles = row_tiles(p)
    cut = even_cut(p.batch * tiles * p.heads_kv, choice.grid[0])
    shape = (p.batch, p.seq_q, p.seq_k, p.heads_kv, p.heads_q // p.heads_kv, tiles, pages, max(p.page_size, 1), *cut)
    return {
        "k": _matrix(x.k) if config.gathers else (x.k,), "v": _matrix(x.v) if config.gathers else (x.v,),
        "q": _matrix(x.q), "out": _matrix(x.out), "keys": keys, "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "scale": checked.scale, "shape": shape, **modifier_args(checked),
    }  # fmt: skip


def _matrix(x: Tensor) -> tuple[Any, ...]:
    """Pointer and strides of the first three dimensions, see `run_strides`."""
    return (x, *run_strides(x))


def _partitions(problem: Problem, config: DecodeConfig, grid: int) -> int:
    """Parts of a head at most."""
    tiles = -(-max(problem.seq_k, 1) // config.block_n)
    return -(-tiles // config.unit) if config.invariant else min(grid, tiles)


def _blocks(problem: Problem, config: DecodeConfig, grid: int) -> int:
    """Blocks of 32 parts by 4 rows of a head, about: as many parts as CTAs that a head keeps busy."""
    heads = problem.batch * problem.heads_kv * row_tiles(problem)
    parts = min(_partitions(problem, config, grid), problem.seq_k if config.invariant else -(-grid // heads) + 1)
    rows = min(64, problem.seq_q * problem.heads_q // problem.heads_kv)
    return -(-parts // 32) * -(-rows // 4)


def _same_span(span: Reads) -> bool:
    """Whether all sequences have the same span."""
    return not span.tensors and "b" not in span.symbols
