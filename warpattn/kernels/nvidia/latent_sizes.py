"""Columns of latent attention's keys [latent | rotary]; latents are also the values. This file imports no Triton."""


class LatentSizes:
    """Sizes that follow from a config's head dims. Latents are two blocks, since a TMA box has at most 256 columns."""

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
