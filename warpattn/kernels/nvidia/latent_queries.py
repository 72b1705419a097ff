"""Queries of latent attention on NVIDIA GPUs, in one tensor or two."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.aggregate
class LatentQueries:
    """Where the queries' columns are: `latent`, and `rope` from its column `rope_column` on; both address rows in the
    architecture's way."""

    latent: gl.base_value
    rope: gl.base_value
    rope_column: gl.constexpr

    @gluon.jit
    def after(self, token):
        """The queries from `token` on."""
        return LatentQueries(self.latent.after(token), self.rope.after(token), self.rope_column)
