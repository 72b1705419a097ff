"""An array in memory that threads address by its strides, without TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class Strided:
    """A (batch, token, head) array in memory whose entries are rows or numbers; strides in `unit` elements."""

    pointer: gl.tensor
    batch: gl.tensor
    token: gl.tensor
    head: gl.tensor
    unit: gl.constexpr

    @gluon.jit
    def at(self, b, token, head):
        """Pointers to entries, any shape."""
        to_batch = gl.to_tensor(b).to(gl.int64) * self.batch
        return self.pointer + (to_batch + token.to(gl.int64) * self.token + head.to(gl.int64) * self.head) * self.unit

    @gluon.jit
    def after(self, token):
        """The array from `token` on."""
        return gl.aggregate_replace(self, pointer=self.pointer + token.to(gl.int64) * self.token * self.unit)
