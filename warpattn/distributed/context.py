"""Attention over sequences that several ranks share: the functions that users call.

    ring_attention       keys and values pass from rank to rank; any number of heads
    ulysses_attention    heads are exchanged for rows, so that a rank has whole sequences; no more ranks than heads
    mesh_attention       both: a ring of groups, each of which shares the heads

Operands are this rank's parts as `shard` cuts them, (B, S / ranks, heads, D). Masks, scores and sinks are those of the
whole sequence, the same on every rank, and see positions in it. Every function is a collective.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.distributed import ring as rings
from warpattn.distributed.agreement import agree, described
from warpattn.distributed.blocks import Whole, blocks_of
from warpattn.distributed.heads import copies_of_key_heads, heads_of_rows, rows_of_heads
from warpattn.distributed.placement import PLACEMENTS, Placement
from warpattn.distributed.ranks import Ranks, ranks_of, ranks_of_mesh
from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import kind_of
from warpattn.language.traced import Lengths
from warpattn.masks import Full, Mask
from warpattn.problem import Call, validate
from warpattn.problem.backends import Backend
from warpattn.scores import Score
from warpattn.sequences import Dense

Result = Tensor | tuple[Tensor, Tensor]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    placement: str = "zigzag",
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | Backend = "auto",
) -> Result:
    """Compute `attention` over a sequence that is split over the ranks of `group`.

    q (B, Sq / ranks, Hq, D), k (B, Sk / ranks, Hkv, D), v (B, Sk / ranks, Hkv, Dv). group: None (all processes), a
    ProcessGroup, or a DeviceMesh of one dimension. placement: as `shard` was called; "zigzag" balances causal masks,
    "contiguous" suits windows, where only neighbours exchange keys. The rest is as in `warpattn.attention`.

    Returns this rank's part of the output, (B, Sq / ranks, Hq, Dv), with return_lse also lse (B, Hq, Sq / ranks).
    Gradients of tensors that every rank has whole (sinks, tensors captured by the score) are this rank's share: sum
    them over the ranks, as data parallelism does with parameters. Raises AttentionError, on every rank, for arguments
    that break a rule or differ between ranks; failures of communication are torch's errors.
    """
    given = Given(q, k, v, mask, score, sinks, scale, return_lse, backend)
    return _attend(given, Over(ranks_of(group), None, placement))


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    placement: str = "zigzag",
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | Backend = "auto",
) -> Result:
    """Do the same as `ring_attention`, by exchanging heads for rows (Jacobs et al., arXiv 2309.14509).

    The number of query heads must be a multiple of the ranks; key heads are sent to every rank that reads them.
    """
    given = Given(q, k, v, mask, score, sinks, scale, return_lse, backend)
    ranks = ranks_of(group)
    return _attend(given, Over(Ranks(ranks.group, 0, 1), ranks, placement))


def mesh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Any,
    placement: str = "zigzag",
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | Backend = "auto",
) -> Result:
    """Do the same on a DeviceMesh of two dimensions: the first is a ring, the second shares the heads.

    Operands are cut by `shard(x, 1, mesh)`. Neighbours on the second dimension exchange every row, so it belongs on the
    fast links.
    """
    given = Given(q, k, v, mask, score, sinks, scale, return_lse, backend)
    return _attend(given, Over(*ranks_of_mesh(mesh), placement))


class Given(NamedTuple):
    """The arguments of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    score: Score | None
    sinks: Tensor | None
    scale: float | None
    return_lse: bool
    backend: str | Backend

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Call:
        """Make the call of these options on operands."""
        named = self.backend if isinstance(self.backend, Backend) else Backend(self.backend)
        return Call(q, k, v, Dense(), self.mask, self.score, self.sinks, self.scale, self.return_lse,
                    backend=named.name, deterministic=named.deterministic)  # fmt: skip


class Over(NamedTuple):
    """The ranks of a call: those of the ring, those that share heads, and how the sequence is cut."""

    ring: Ranks
    heads: Ranks | None
    placement: str

    @property
    def is_mesh(self) -> bool:
        """Whether a ring's parts are cut once more for the ranks that share heads."""
        return self.heads is not None and self.heads.group is not self.ring.group

    @property
    def function(self) -> str:
        """The name of the function that was called."""
        return "mesh_attention" if self.is_mesh else "ring_attention" if self.heads is None else "ulysses_attention"

    @property
    def groups(self) -> list[Ranks]:
        """The groups that exchange messages."""
        return [self.ring] if self.heads is None else [self.heads] if not self.is_mesh else [self.ring, self.heads]

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.ring.size * (1 if self.heads is None else self.heads.size)

    @property
    def of_ring(self) -> Placement:
        """The placement of the sequence on the ring's ranks."""
        return Placement("contiguous" if self.heads and not self.is_mesh else self.placement, self.ring.size)

    @property
    def of_heads(self) -> Placement:
        """The placement of the sequence, or of the ring's part, on the ranks that share heads."""
        assert self.heads is not None
        return Placement("contiguous" if self.is_mesh else self.placement, self.heads.size)


def _attend(given: Given, over: Over) -> Result:
    more = {"placement": over.placement, "gradients": torch.is_grad_enabled()}
    agree(over.groups, described(over.function, given._asdict() | more), lambda: _check(given, over))
    if over.heads is not None:
        return _by_heads(given, over, over.heads)
    out, lse = _around(given, over, None)
    return (out, lse) if given.return_lse else out


def _around(given: Given, over: Over, head: int | None) -> tuple[Tensor, Tensor]:
    """Compute out and LSE of query heads from `head` on by the ring, which may have one rank."""
    lens = Lengths(*(x.shape[1] * over.ring.size for x in (given.q, given.k)))
    whole = Whole(Full() if given.mask is None else given.mask, given.score, lens, head, given.q.device)
    options = given.call(given.q, given.k, given.v)
    options.return_lse, options.sinks = True, None
    ring = rings.Ring(over.ring, blocks_of(whole, over.of_ring), options)
    return rings.attend(ring, given.q, given.k, given.v, given.sinks)


def _by_heads(given: Given, over: Over, ranks: Ranks) -> Result:
    """Compute the result by exchanging rows for heads, before and after attention."""
    copies = copies_of_key_heads(given.q.shape[2], given.k.shape[2], ranks.size)
    keys = (x if copies == 1 else x.repeat_interleave(copies, 2) for x in (given.k, given.v))
    q, k, v = rows_of_heads(ranks, over.of_heads, given.q, *keys)
    heads = q.shape[2]
    head = ranks.rank * heads
    sinks = None if given.sinks is None else given.sinks[head : head + heads]
    out, lse = _around(given._replace(q=q, k=k, v=v, sinks=sinks), over, head)
    del q, k, v  # the next exchange reuses their memory
    if not given.return_lse:
        return heads_of_rows(ranks, over.of_heads, out)[0]
    out, lse = heads_of_rows(ranks, over.of_heads, out, lse.mT[..., None])
    return out, lse[..., 0].mT


def _check(given: Given, over: Over) -> None:
    """Check the rules of the whole problem, with tensors of its shapes that take no memory."""
    rules, axes = Rules(), ("batch", "seq", "heads", "head_dim")
    known = isinstance(over.placement, str) and over.placement in PLACEMENTS
    rules.require(known, f"placement is {kind_of(over.placement)}", f"it must be one of {', '.join(PLACEMENTS)}")
    operands = {"q": given.q, "k": given.k, "v": given.v}
    if all([rules.tensor(name, x, *axes) for name, x in operands.items()]) and not rules.broken:
        _check_parts(rules, operands, over)
        q, k, v = (_stand_in(x, over.size) for x in operands.values())
        try:
            validate(given.call(q, k, v))
        except AttentionError as error:
            rules.broken.extend(error.reasons)
    rules.done()


def _check_parts(rules: Rules, operands: dict[str, Tensor], over: Over) -> None:
    """Check that rows and heads can be split as the call says."""
    for name, x in operands.items():
        rows = x.shape[1] * (over.heads.size if over.is_mesh and over.heads else 1)
        chunks = Placement(over.placement, over.size).per_rank
        rule = f"{over.placement} placement gives each rank {chunks} equal chunks"
        rules.require(rows % chunks == 0, f"{name} has {many(rows, 'row')} on a rank", rule)
    if over.heads is not None:
        heads = operands["q"].shape[2]
        rule = f"they must be a multiple of the {over.heads.size} ranks that share them; ring_attention takes any"
        rules.require(heads % over.heads.size == 0, f"q has {many(heads, 'head')}", rule)


def _stand_in(x: Tensor, ranks: int) -> Tensor:
    """Make a tensor with the shape of the whole and the memory of one element."""
    one = x.new_empty(()).requires_grad_(x.requires_grad) if x.is_floating_point() else x.new_empty(())
    return one.expand(x.shape[0], x.shape[1] * ranks, *x.shape[2:])
