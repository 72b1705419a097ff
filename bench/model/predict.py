"""Predicted SM cycles of a whole problem: what one CTA takes, from small runs, and which SM is free when.

    small runs ─ differences ─▶ Costs of a CTA: its start, a tile, a key tile, a masked key tile
    the mask's span ──────────▶ pieces of work in the kernel's order ─▶ the SM that is free first ─▶ cycles

The kernels before and after the backward move bytes and are charged for nothing else; no launch takes less time than
its bytes take from DRAM. What is said of a piece holds for every kernel family: query tiles over keys in prefill, key
tiles over queries in the backward, and parts of a head in decode.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from bench.model.problems import Problem
from bench.model.small import SM90, Size, checked, plan_of, run
from warpattn.kernels.pieces.span_tiles import TileSize, span_tiles
from warpattn.kernels.sm90.decode.choice import EvenCut, even_cut, head_tiles
from warpattn.problem.launch import Choice
from warpattn.sim.timing.cost import SM90 as CHIP
from warpattn.sim.timing.replay import Timing

FIRST = " of program (0, 0, 0)"  # of an engine's name where there are several programs
LAUNCH = 3000.0  # cycles of a kernel that only moves bytes, beside its bytes: first and last bytes are on their way


class Piece(NamedTuple):
    """Work that is not shared out: key tiles (of the backward: query tiles) without and with the mask."""

    plain: int
    masked: int


class Costs(NamedTuple):
    """Cycles of one CTA: once, per piece, per tile of a piece without and with the mask; and of these tiles without,
    how long each engine is busy."""

    start: float
    piece: float
    plain: float
    masked: float
    busy: tuple[tuple[str, float], ...]

    def of(self, piece: Piece) -> float:
        return self.piece + piece.plain * self.plain + piece.masked * self.masked


class Prediction(NamedTuple):
    """SM cycles of all launches, and the engine that is busiest in the main one, with its share of the time."""

    cycles: float
    bound: str
    share: float


def predict(problem: Problem) -> Prediction:
    """SM cycles of a problem on a whole card, by the model."""
    choice = plan_of(problem).choice
    costs = _costs(problem, choice)
    pieces = list(_backward_pieces(problem, choice) if problem.backward else _forward_pieces(problem, choice))
    ctas = getattr(choice.config, "ctas", 1)
    share = max(cycles for _, cycles in costs.busy) / costs.plain
    stretch = max(1.0, ctas * share)  # CTAs beside each other on an SM fill each other's gaps, but no engine twice
    slots = min(SM90.processors * ctas, choice.grid[0] if choice.kernel != "backward" else len(pieces))
    working = costs.start + _makespan([stretch * costs.of(piece) for piece in pieces], slots)
    moving = costs.start + _bytes(problem) / _dram()
    bound = max(costs.busy, key=lambda part: part[1])[0] if working > moving else "DRAM"
    cycles = max(working, moving) + _beside(problem, choice)
    return Prediction(cycles, bound, share if working > moving else _bytes(problem) / _dram() / moving)


def _dram() -> float:
    """Bytes that all SMs get from DRAM in a cycle."""
    return CHIP.rates["DRAM"] * CHIP.sms


def _makespan(work: Iterable[float], slots: int) -> float:
    """When the last of `slots` CTAs ends, each taking the next piece when it is free."""
    free = [0.0] * slots
    for cycles in work:
        heapq.heapreplace(free, free[0] + cycles)
    return max(free)


def _bytes(problem: Problem) -> float:
    """Bytes of a forward's q, k, v and out; of a backward's main launch with dq in fp32, read and written."""
    case, element = problem.case, 2
    q, k = case.batch * case.seq_q * case.heads_q, case.batch * case.seq_k * case.heads_kv
    if problem.backward:
        return element * (q * (case.dim + case.dim_v) + 2 * k * (case.dim + case.dim_v)) + 4 * q * case.dim
    return element * (q + k) * (case.dim + case.dim_v)


def _beside(problem: Problem, choice: Choice) -> float:
    """Cycles of the launches before and after the main one."""
    case = problem.case
    rows = case.batch * case.seq_q * case.heads_q
    if problem.backward:  # out, dout and zeros for dq before it; dq in fp32 and in 16 bits after it
        return 2 * LAUNCH + rows * (4 * case.dim_v + 4 * case.dim + 6 * case.dim) / _dram()
    if choice.kernel == "prefill" and choice.partitions > 1:
        return LAUNCH + rows * case.dim_v * 4 * choice.partitions / _dram()
    return 0.0


def _costs(problem: Problem, choice: Choice) -> Costs:
    if problem.backward:
        return _backward_costs(problem, choice)
    return _decode_costs(problem, choice) if choice.kernel == "decode" else _prefill_costs(problem, choice)


def _prefill_costs(problem: Problem, choice: Choice) -> Costs:
    config = choice.config
    m, n, heads = config.tokens, config.block_n, config.packed
    tiles = 8 * max(1, 128 // n)  # key tiles of the shorter runs
    short, more, longer = (
        run(problem, choice, Size(heads, m * rows, n * keys)) for rows, keys in ((2, tiles), (3, tiles), (2, 2 * tiles))
    )
    plain = (longer.cycles - short.cycles) / (2 * tiles)
    piece = more.cycles - short.cycles - tiles * plain
    start = short.cycles - 2 * piece - 2 * tiles * plain
    busy = _busy(short, longer, 2 * tiles)
    if not problem.case.causal:
        return Costs(start, piece, plain, plain, busy)
    rows = m * max(4, 2 * n // m)
    masked = run(problem, choice, Size(heads, rows, rows, causal=True)).cycles - start
    whole = sum((row + 1) // n for row in range(0, rows, m))
    every = sum(-(-min(row + m, rows) // n) for row in range(0, rows, m))
    return Costs(start, piece, plain, (masked - rows // m * piece - whole * plain) / (every - whole), busy)


def _backward_costs(problem: Problem, choice: Choice) -> Costs:
    m, n = choice.config.block_m, choice.config.block_n
    short, longer = (run(problem, choice, Size(1, m * tiles, n)) for tiles in (8, 16))
    plain = (longer.cycles - short.cycles) / 8
    piece = short.cycles - 8 * plain
    busy = _busy(short, longer, 8)
    if not problem.case.causal:
        return Costs(0.0, piece, plain, plain, busy)
    hidden = max(1, n // m)  # tiles on the diagonal; the first CTA has the longest walk
    masked = run(problem, choice, Size(1, 4 * hidden * m, 4 * hidden * m, causal=True)).cycles
    return Costs(0.0, piece, plain, (masked - piece - 3 * hidden * plain) / hidden, busy)


def _decode_costs(problem: Problem, choice: Choice) -> Costs:
    """Of a CTA; the CTAs that share a head also combine their parts, which belongs to the start."""
    n, heads = choice.config.block_n, problem.case.heads_q // problem.case.heads_kv
    ctas = _cut(problem, choice).splits
    short, longer = (run(problem, choice, Size(heads, 1, n * tiles * ctas, ctas=ctas)) for tiles in (4, 8))
    plain = (longer.cycles - short.cycles) / 4
    parts = _busy(short, longer, 4)
    busy = tuple((name.removesuffix(FIRST), cycles) for name, cycles in parts if ctas == 1 or name.endswith(FIRST))
    if ctas > 1:
        return Costs(short.cycles - 4 * plain, 0.0, plain, plain, busy)
    more = run(problem, choice, Size(2 * heads, 1, n * 4, heads_kv=2)).cycles
    piece = more - short.cycles - 4 * plain
    return Costs(short.cycles - piece - 4 * plain, piece, plain, plain, busy)


def _cut(problem: Problem, choice: Choice) -> EvenCut:
    """How the heads of a decode step are shared out."""
    ready, _ = checked(problem)
    return even_cut(head_tiles(ready.problem), choice.grid[0])


def _busy(short: Timing, longer: Timing, tiles: int) -> tuple[tuple[str, float], ...]:
    """Cycles that each engine is busy for a tile, from two runs that differ by so many."""
    return tuple((name, (longer.busy(name) - short.busy(name)) / tiles) for name in short.engines)


def _forward_pieces(problem: Problem, choice: Choice) -> Iterator[Piece]:
    case, config = problem.case, choice.config
    if choice.kernel == "decode":
        splits = _cut(problem, choice).splits
        tiles = -(-case.seq_k // config.block_n)
        yield from [Piece(-(-tiles // splits), 0)] * (case.batch * case.heads_kv * splits)
        return
    ready, _ = checked(problem)
    size = TileSize(config.tokens, config.block_n)
    spans = span_tiles(ready.problem, [size] if case.causal else []).get(size)
    every = [Piece(-(-case.seq_k // config.block_n), 0)] * choice.order.m_tiles
    if spans is not None:
        every = [Piece(t - h, h) for t, h in zip(spans.total, spans.masked, strict=True)]
    for first in range(0, choice.order.heads, choice.order.section):
        heads = min(choice.order.section, choice.order.heads - first) // config.packed
        for piece in reversed(every):
            for part in range(choice.partitions):
                yield from [_part(piece, part, choice.partitions)] * heads


def _part(piece: Piece, part: int, parts: int) -> Piece:
    """One of `parts` parts of the key tiles, the masked ones last."""
    total = piece.plain + piece.masked
    low, high = part * total // parts, (part + 1) * total // parts
    plain = max(0, min(high, piece.plain) - low)
    return Piece(plain, high - low - plain)


def _backward_pieces(problem: Problem, choice: Choice) -> Iterator[Piece]:
    for first in range(0, choice.order.heads, choice.order.section):
        for tile in range(choice.order.tiles):
            piece = _queries(problem, tile * choice.config.block_n, choice.config.block_m, choice.config.block_n)
            yield from [piece] * min(choice.order.section, choice.order.heads - first)


@lru_cache(1 << 14)
def _queries(problem: Problem, first: int, m: int, n: int) -> Piece:
    """The query tiles that see the keys from `first` on, for all query heads of the key head."""
    case = problem.case
    group, end, offset = case.heads_q // case.heads_kv, min(first + n, case.seq_k), case.seq_k - case.seq_q
    if not case.causal:
        return Piece(-(-case.seq_q // m) * group, 0)
    window = case.window or case.seq_k
    whole = met = 0
    for row in range(0, case.seq_q, m):
        low, high = row + offset, min(row + m, case.seq_q) - 1 + offset
        met += low - window < end - 1 and first <= high
        whole += end - 1 <= low and high - window < first
    return Piece(whole * group, (met - whole) * group)


