"""Kernels that copy the keys of a step's long prompts into a workspace of fixed size, which may hold only some of them.

Steps of an engine mix prompts and new tokens, up to far more keys than a workspace holds. So the device decides: each
sequence of enough queries gets places for all of its keys, one sequence after the other, as long as there are places.
Prefill then reads the copies of these sequences, and of the others the pages.

      cu_q, lengths ──▶ places_kernel ──▶ ends, places, table ──▶ copy_places_kernel ──▶ places of 128 keys
                                              └─▶ order_kernel: which sequences have places
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warpattn.problem.memory import COPIED_KEYS

from ..arguments import PLACES_OF_PROGRAM
from .kernel import Place, copy_rows, keys_of

KEYS = gl.constexpr(COPIED_KEYS)
OWN = gl.constexpr(PLACES_OF_PROGRAM)
OTHERS = gl.constexpr(256)  # sequences at a time
WARPS = gl.constexpr(4)
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))  # [OTHERS]
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS.value, 1], [1, 0]))  # [OWN, OTHERS]
DOWN = gl.constexpr(gl.SliceLayout(1, PAIRS.value))  # [OWN]
ALONG = gl.constexpr(gl.SliceLayout(0, PAIRS.value))  # [OTHERS]


@gluon.jit
def places_kernel(lengths, cu_q, lists, shape, masked: gl.constexpr):
    """Fills `lists`, a `PlaceLists`. lengths: int32* (batch,). cu_q: int32* (batch + 1,). shape: `PlacesShape`.
    masked: rows do not see all keys. Grid: one program for OWN places."""
    gdc_wait()
    gdc_launch_dependents()  # all kernels before this one have ended
    own = gl.program_id(0) * OWN + gl.arange(0, OWN, DOWN)
    sequence, start = gl.zeros([OWN], gl.int32, DOWN), gl.zeros([OWN], gl.int32, DOWN)
    total, used = gl.to_tensor(0), gl.to_tensor(0)
    for first in range(0, shape.batch, OTHERS):
        b = first + gl.arange(0, OTHERS, FLAT)
        end = total + gl.cumsum(places_of(b, lengths, cu_q, shape, masked), 0)
        if gl.program_id(0) == 0:
            gl.store(lists.ends + 1 + b, end, mask=b < shape.batch)
        along = gl.convert_layout(end, ALONG)[None, :]
        before = along <= own[:, None]  # sequences whose places are all before one's own
        sequence += gl.sum(before.to(gl.int32), 1)
        start = gl.maximum(start, gl.max(gl.where(before, along, 0), 1))
        used = gl.maximum(used, gl.max(gl.where(end <= shape.capacity, end, 0), 0))
        total = gl.max(end, 0)
    if gl.program_id(0) == 0:
        gl.store(lists.ends, used)
    there = own < used
    gl.store(lists.places + 2 * own, sequence, mask=there)
    gl.store(lists.places + 2 * own + 1, (own - start) * KEYS, mask=there)
    gl.store(lists.table + sequence.to(gl.int64) * lists.table_stride + (own - start), own, mask=there)


@gluon.jit
def places_of(b, lengths, cu_q, shape, masked: gl.constexpr):
    """Places that the keys of sequences `b` need; 0 if too few of its queries see a key (config.py: seeing_rows)."""
    inside = b < shape.batch
    queries = gl.load(cu_q + b + 1, mask=inside, other=0) - gl.load(cu_q + b, mask=inside, other=0)
    keys = gl.minimum(gl.maximum(gl.load(lengths + b, mask=inside, other=0), 0), shape.keys)
    enough = queries >= shape.least
    if masked:  # the mean of the queries that see a key, if each also sees the older keys
        q, most = queries.to(gl.int64), gl.maximum(queries, keys).to(gl.int64)
        enough = enough & (q * (2 * most - q) >= 2 * most * shape.least)
    return gl.where(enough, (keys + KEYS - 1) // KEYS, 0)


@gluon.jit
def copy_places_kernel(k, v, k_out, v_out, index, lists, shape, k_kind: gl.constexpr, v_kind: gl.constexpr):
    """Copies the keys and values of all places in use. Arguments as of `copy_kernel`, over pages. Grid: any number."""
    gdc_wait()
    gdc_launch_dependents()  # all kernels before this one have ended
    units = gl.load(lists.ends) * shape.heads * 2
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        number, head = unit // (2 * shape.heads), unit // 2 % shape.heads
        b, first = gl.load(lists.places + 2 * number), gl.load(lists.places + 2 * number + 1)
        end = keys_of(b, index, shape, True)
        place = Place(b, head, first, end, (number.to(gl.int64) * shape.heads + head) * KEYS)
        if unit % 2 == 0:
            copy_rows(k, k_out, place, index, shape, shape.k_runs, k_kind)
        else:
            copy_rows(v, v_out, place, index, shape, shape.v_runs, v_kind)
