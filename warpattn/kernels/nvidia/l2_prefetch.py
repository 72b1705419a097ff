"""L2 prefetch of boxes of a tensor, before the copies that read them. It waits for nothing and needs no
synchronisation: the writes of all SMs meet in L2, so a later read of the box finds the last value written."""

from triton.experimental.gluon.language._core import builtin  # tensor maps are no operands of `gl.inline_asm`

_PREFETCH = """{
.reg .pred p;
setp.ne.b32 p, $2, 0;
@p cp.async.bulk.prefetch.tensor.4d.L2.global.tile [$1, {$6, $5, $4, $3}];
mov.b32 $0, 0;
}"""


@builtin
def prefetch(desc, coord, wanted, _semantic=None):
    """Prefetch boxes of a 4-dimensional `desc`, one a thread: coord, four int32 blocks of one layout; wanted, another:
    a thread whose element is 0 prefetches nothing."""
    operands = [desc.handle, wanted.handle, *(x.handle for x in coord)]
    nothing = wanted.type.to_ir(_semantic.builder)
    _semantic.builder.create_inline_asm(_PREFETCH, "=r,l,r,r,r,r,r", operands, [nothing], False, 1)
