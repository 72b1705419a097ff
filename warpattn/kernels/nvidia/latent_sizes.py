"""Columns of latent attention's keys, [latent | rotary], whose latents are the values. Nothing here imports Triton."""


class LatentSizes:
    """Sizes that follow from the head dims of a config; latents are two blocks, as no box has more than 256 columns."""

    dim_qk: int
    dim_v: int

    @property
    def half(self) -> int:
        """Columns of a block of latents."""
        return self.dim_v // 2

    @property
    def rope(self) -> int:
        """Columns of the rotary part."""
        return self.dim_qk - self.dim_v
