"""`attention` of DTensors that are sharded along the sequence: a ring over that dimension of their mesh.

    q, k, v    (B, S, H, D), placed alike on one mesh    Shard(1) on one mesh dimension: contiguous, as DTensors are;
                                                         on others Replicate(), Shard(0) batch, Shard(2) heads:
    out        placed as q                               there each rank has its own sequences and heads
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from warpattn.distributed.context import ring_attention
from warpattn.distributed.place import depends_on
from warpattn.errors import Rules, many
from warpattn.inputs import kind_of
from warpattn.problem import Call
from warpattn.problem.backends import Backend

BATCH, ROWS, HEADS = Shard(0), Shard(1), Shard(2)
OF_LSE = {BATCH: Shard(0), ROWS: Shard(2), HEADS: Shard(1), Replicate(): Replicate()}  # (B, H, S)


def attend(call: Call, backend: str | Backend) -> Any:
    """Return out, with `return_lse` also the LSE, as DTensors. Raises AttentionError."""
    q, k, v = _checked(call)
    mesh, placements = q.device_mesh, q.placements
    result = ring_attention(
        *(x.to_local() for x in (q, k, v)), group=mesh.get_group(placements.index(ROWS)), placement="contiguous",
        mask=call.mask, score=call.score, sinks=call.sinks, scale=call.scale, return_lse=call.return_lse,
        backend=backend,
    )  # fmt: skip
    out, lse = (result, None) if isinstance(result, Tensor) else result
    shared = DTensor.from_local(out, mesh, placements, run_check=False)
    if lse is None:
        return shared
    return shared, DTensor.from_local(lse, mesh, [OF_LSE[p] for p in placements], run_check=False)


def _checked(call: Call) -> tuple[DTensor, DTensor, DTensor]:
    """Return q, k and v; raises AttentionError if a ring cannot attend to them."""
    rules, q = Rules(), call.q
    assert isinstance(q, DTensor)
    for name, x in (("k", call.k), ("v", call.v)):
        alike = isinstance(x, DTensor) and x.device_mesh == q.device_mesh and x.placements == q.placements
        got = f"placed {x.placements}" if isinstance(x, DTensor) else kind_of(x)
        rules.require(alike, f"{name} is {got}", f"it must be a DTensor placed as q is, {q.placements}, on its mesh")
    known = all(p in OF_LSE for p in q.placements)
    fine = known and q.placements.count(ROWS) == 1
    rule = "one dimension of the mesh must shard the sequence, Shard(1), others Shard(0), Shard(2) or Replicate()"
    rules.require(fine, f"q is a DTensor placed {q.placements}", f"{rule}; else pass what .to_local() gives")
    rules.require(call.out is None, "out is given", "with DTensors it must be None")
    rules.done()
    for dim, size in enumerate(q.device_mesh.shape):
        placement = q.placements[dim]
        for name, x in (("q", q), ("k", call.k), ("v", call.v)):
            if isinstance(placement, Shard):
                what = f"{name} has {many(x.shape[placement.dim], 'element')} in dimension {placement.dim}"
                rules.require(x.shape[placement.dim] % size == 0, what, f"its {size} ranks must have equal parts")
    for placement, symbol, what in ((BATCH, "b", "sequences"), (HEADS, "h", "heads")):
        for name, value in (("mask", call.mask), ("score", call.score)):
            looks = placement in q.placements and value is not None and depends_on(value, symbol)
            rules.require(not looks, f"{name} is {kind_of(value)}", f"it must not depend on {what}, which are sharded")
    rules.require(call.sinks is None or HEADS not in q.placements, "sinks are given", "heads must not be sharded then")
    rules.done()
    return q, call.k, call.v  # type: ignore[return-value]  # DTensors, see above
