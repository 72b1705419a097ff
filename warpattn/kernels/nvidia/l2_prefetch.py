"""Asking for boxes of a tensor in L2, ahead of the copies that will read them. Nothing is waited for and nothing can go
wrong with it: L2 is where the writes of all SMs meet, so whoever reads a box later finds what was written last."""

from triton.experimental.gluon.language._core import builtin  # tensor maps are no operands of `gl.inline_asm`

_PREFETCH = """{
.reg .pred p;
setp.ne.b32 p, $2, 0;
@p cp.async.bulk.prefetch.tensor.4d.L2.global.tile [$1, {$6, $5, $4, $3}];
mov.b32 $0, 0;
}"""


@builtin
def prefetch(desc, coord, wanted, _semantic=None):
    """Boxes of a 4-dimensional `desc` will be read soon, one a thread: coord, four int32 blocks of one layout, and
    wanted, where that is not 0."""
    operands = [desc.handle, wanted.handle, *(x.handle for x in coord)]
    nothing = wanted.type.to_ir(_semantic.builder)
    _semantic.builder.create_inline_asm(_PREFETCH, "=r,l,r,r,r,r,r", operands, [nothing], False, 1)
