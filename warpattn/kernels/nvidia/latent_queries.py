"""Queries of latent attention on NVIDIA cards, in one tensor or in two."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class LatentQueries:
    """Where columns of queries are, as rows that an architecture addresses: latent ones, and the rotary ones from
    column `rope_column` of theirs on."""

    latent: gl.base_value
    rope: gl.base_value
    rope_column: gl.constexpr

    @gluon.jit
    def after(self, token):
        """The queries from a token on."""
        return LatentQueries(self.latent.after(token), self.rope.after(token), self.rope_column)
