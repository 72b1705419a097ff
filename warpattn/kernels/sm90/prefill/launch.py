"""Plans tile order and grid of a dense prefill on Hopper (`arrange`); makes a call's launches (`list_launches`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from warpattn.errors import many
from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import Arch, compile_options
from warpattn.problem.element import ELEMENT_OF
from warpattn.problem.launch import EARLY_AND_WAITS, Choice, Launch
from warpattn.problem.operands import COPY_RULE, Features, Operands, is_masked, modifier_args, programs, sees_first_keys
from warpattn.problem.scales import call_scales
from warpattn.sequences import Sequence

from ...nvidia.combine_launch import combine_launch, workspace
from ..arguments import LARGEST_EXPONENT, PrefillShape, SplitShape
from ..copies.launch import copied
from .config import CONSUMER_ROWS, SM90Config, pad_dim, value_blocks, value_words
from .eight_bit.transpose_launch import transposed_values, value_lines

OPTIONS = compile_options()
SHORT_KEYS = 512  # up to so many keys a section has a head an SM: 64 x 256 was 1.04, 128 x 128 1.16 x as fast (H200)
LONG_ROWS = 16384  # keys from which on rows count as `long` in `SM90Config.shares_code`


@dataclass(frozen=True)
class TileOrder:
    """How the scheduler numbers output tiles: section by section, within each the longest first."""

    m_tiles: int  # query tiles per head
    heads: int  # batch * query heads
    section: int  # heads whose tiles the scheduler hands out together


def arrange(
    problem: Problem, target: Arch, config: SM90Config, why: tuple[str, ...], parts: int = 1, ctas: int = 1
) -> Choice:
    """Makes the `Choice` of `config` for a dense `problem`: tile order, grid, lines. `why`: reasons for
    the configuration; `parts`: CTAs that share the keys of a tile; `ctas`: those that an SM runs at once."""
    heads, values_why = problem.batch * problem.heads_q, value_words(problem.dim_v, config.exact_values)
    m_tiles = -(-problem.seq_q // config.tokens)
    section, section_why = _section(problem, target, m_tiles, config.packed)
    order = TileOrder(m_tiles, heads, section)
    tiles = heads // config.packed * m_tiles * parts
    grid = min(target.processors * ctas, tiles)
    packed = f" of {config.packed} heads" if config.packed > 1 else ""

    def lines() -> tuple[str, ...]:
        return (
            f"tile {config.block_m}{packed} x {config.block_n}, {many(config.consumers, 'consumer warpgroup')}, rings "
            f"K {config.kv_stages} V {config.v_stages} Q {config.q_stages}, {config.smem_bytes} bytes of shared memory",
            f"{many(tiles, 'tile')} ({m_tiles} a head), sections of {many(section, 'head')}, {many(grid, 'CTA')}",
            *value_lines(problem, config),
        )

    which = "one persistent CTA" if ctas == 1 else f"one of {ctas} persistent CTAs"
    cta_why = f"{which} on each of {target.processors} SMs takes tiles as it gets free"
    early = EARLY_AND_WAITS if config.split else f"{EARLY_AND_WAITS}; then those of the next kernel may"
    reasons = (*why, *values_why, section_why, cta_why, early, COPY_RULE)
    return Choice("prefill", config, (grid,), lines, reasons, partitions=parts, order=order)


def _section(problem: Problem, target: Arch, m_tiles: int, packed: int) -> tuple[int, str]:
    """(query heads of a section, in whole groups that share keys; reason)."""
    group = problem.heads_q // problem.heads_kv
    kv_heads = problem.batch * problem.heads_kv
    if not is_masked(problem):
        side_by_side = -(-target.processors // max(1, m_tiles * group // packed))
        fill = "head at a time fills" if side_by_side == 1 else "heads at a time fill"
        why = f"tiles are equally long: {side_by_side} key {fill} {target.processors} SMs"
        return min(kv_heads, side_by_side) * group, why
    element = ELEMENT_OF[problem.kv_dtype or problem.dtype]
    kv_bytes = element.bytes * max(problem.seq_k, 1) * (problem.dim_qk + problem.dim_v)
    sections = -(-kv_heads // max(1, target.l2_keep // kv_bytes))
    side_by_side = -(-kv_heads // sections)
    if problem.seq_k <= SHORT_KEYS:
        side_by_side = min(side_by_side, -(-target.processors // group))
        heads = f"{side_by_side} key head{'s' * (side_by_side > 1)}"
        why = f"few keys: sections of {heads}, so that short tiles run while others load long ones"
        return side_by_side * group, why
    even = f"{sections} even section{'s' * (sections > 1)} of {side_by_side} key head{'s' * (side_by_side > 1)}"
    keep = f"K and V within {target.l2_keep >> 20} MiB of L2"
    why = f"tiles differ in length: {even}, {keep}, each section longest tile first"
    return side_by_side * group, why


def list_launches(checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice) -> tuple[Launch, ...]:
    """The launches of a dense call: first one that transposes 8-bit values (8-bit queries, and v does not bring them)
    or copies 8-bit K and V to 16 bits; then attention; last one that combines partial outputs, if keys are split."""
    problem = checked.problem
    before: tuple[Launch, ...] = ()
    if choice.config.products:
        values, before = transposed_values(x.v, sequence.v_transposed, choice.config)
        x = x._replace(v=values)
    elif choice.config.widened:
        x, _, copying = copied(x, sequence)
        before = (copying,)
    firsts = value_blocks(problem.dim_v)
    if choice.partitions == 1:
        return *before, *(attention_launch(checked, x, sequence, choice, first) for first in firsts)
    parts = workspace(problem, choice.partitions, pad_dim(firsts[-1] + choice.config.padded_v), x.q)
    to_parts = x._replace(out=parts.o, lse=parts.denominators)
    blocks = [attention_launch(checked, to_parts, sequence, choice, first) for first in firsts]
    return *before, *blocks, combine_launch("sm90", checked, x, choice.partitions, parts)


def attention_launch(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice, first_value: int = 0
) -> Launch:
    """The attention launch for values from column `first_value` on. With split keys, out and lse of `x`
    are the workspace."""
    problem, split = checked.problem, choice.config.split
    has_lse, has_sinks = (problem.has_lse or split) and not first_value, problem.has_sinks and not split
    features = Features(*programs(checked, LARGEST_EXPONENT), has_sinks, has_lse, split_keys=True)
    code, masked, modifiers = features.key, is_masked(problem), modifier_args(checked)
    long = sees_first_keys(problem) and problem.seq_k >= LONG_ROWS
    config = choice.config.from_value(first_value)
    shared, options = config.shares_code(masked, long), _options(config)
    scale = checked.scale if config.eight_bit is None else call_scales(checked.scale, x, sequence)
    args = {
        "q_maps": (x.q,) * len(config.qk_parts), "k_maps": (x.k,) * len(config.qk_parts),
        "v_maps": (x.v,) * len(config.v_parts), "o_maps": (x.out,) * len(config.store_parts),
        "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "counter_ptr": torch.zeros(1, dtype=torch.int32), "scale": scale,
        "shape": _shape(problem, choice),
        **modifiers,
    }  # fmt: skip
    if CONSUMER_ROWS % config.packed:
        from .query_maps import query_maps  # imports what few calls need
        args |= query_maps(x.q, x.out, config)

    def source(one_copy: bool = False):
        from .signature import prefill_source  # imports Triton

        return prefill_source(args, replace(config, one_copy=one_copy), features)

    return Launch(
        "sm90.prefill", "sm90", (config, code, shared), source, options, choice.grid, args,
        persistent=1, pdl=True, tile_counter="counter_ptr", l2_promotion=256, shared_code=shared,
    )  # fmt: skip


def _options(config: SM90Config) -> dict[str, Any]:
    """Options of triton.compile."""
    return OPTIONS | {"maxnreg": config.max_registers} if config.ctas > 1 else OPTIONS


def _shape(problem: Problem, choice: Choice) -> PrefillShape | SplitShape:
    p, order = problem, choice.order
    group = p.heads_q // p.heads_kv
    shape = PrefillShape(p.seq_q, p.seq_k, p.heads_q, group, order.m_tiles, order.heads, order.section)
    return SplitShape(*shape, problem.batch, choice.partitions) if choice.config.split else shape
