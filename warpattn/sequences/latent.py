"""LatentPages: a cache for latent attention (MLA) with latents of 8 bits and rotary parts of 16 or 8 bits.

    a token, 656 bytes      [ latent: 512 × e4m3 | scales: 4 × fp32 | rotary: 64 × bf16 ]      as DeepSeek has it
    its key                 [ latent · scales | rotary ]
    its value               latent · scales
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules
from warpattn.inputs import is_tensor, of_type
from warpattn.quantized import rows_of_pages
from warpattn.sequences.latent_query import check_rope
from warpattn.sequences.paged import PagedKV
from warpattn.sequences.rules import check_shapes
from warpattn.sequences.sequence import check_heads

LATENT, ROTARY, BLOCKS = 512, 64, 4  # columns of a token in DeepSeek's form, and scales of its latent
TOKEN_BYTES = LATENT + 4 * BLOCKS + 2 * ROTARY
ALIGNMENT = 16  # bytes


@dataclass(frozen=True, eq=False, init=False)
class LatentPages(PagedKV):
    """Latents of 8 bits and rotary parts in pages of a cache, for `attention_paged` and plans.

    latents (num_pages, page_size, Hkv, L) of 8 bits; rope (num_pages, page_size, Hkv, R) in the queries' dtype, or in
    the latents' dtype and with their scale, per tensor or token. Rows of rope start at multiples of 16 bytes; other
    strides are free, and both may be views of one tensor. block_table, lengths: as in `PagedKV`. scale fp32: of the
    latents, in any shape that `PagedKV` takes, of which kernels take one for all, those of tokens and those of 128
    columns; None is 1. Queries have L + R columns, the output has L. Raises AttentionError if `rope` cannot be read in
    place.
    """

    rope: Tensor

    def __init__(
        self, latents: Tensor, rope: Tensor, block_table: Tensor, lengths: Tensor, *, scale: Tensor | None = None
    ) -> None:
        if is_tensor(scale) and scale.shape == (1,) and is_tensor(latents) and latents.shape[2:3] == (1,):
            scale = scale.view(())  # of the only head
        values = latents.detach() if isinstance(latents, Tensor) else latents  # operands are separate objects
        super().__init__(latents, values, block_table, lengths, k_scale=scale, v_scale=scale)
        object.__setattr__(self, "rope", rope)
        if is_tensor(rope) and rope.ndim and not torch.compiler.is_compiling():  # checked when the graph runs
            steps = [stride * rope.element_size() for stride in rope.stride()[:-1]]
            even = rope.stride(-1) == 1 and not any(step % ALIGNMENT for step in (*steps, rope.data_ptr()))
            if not even:
                what = f"rope has strides {rope.stride()} at {rope.data_ptr()}"
                raise AttentionError(f"{what}; its rows must be in one piece and start at multiples of 16 bytes")

    @staticmethod
    def of_bytes(cache: Tensor, block_table: Tensor, lengths: Tensor) -> LatentPages:
        """Make pages of a cache in DeepSeek's form, uint8 (num_pages, page_size, 1, 656), without copies."""
        latents, scale, rope = latent_parts(cache)
        return LatentPages(latents, rope, block_table, lengths, scale=scale)

    def with_fields(self, **fields: Any) -> LatentPages:
        other = copy(self)  # `replace` would call an initialiser with other arguments
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        other.__post_init__()
        return other

    def token_scales(self) -> dict[str, Tensor]:
        return {}  # engines warm up over tokens that nothing has written: their scales are 0

    def indices(self) -> dict[str, Tensor]:
        return super().indices() | {"kv.rope": self.rope}

    def check_pages(self, rules: Rules, q: Tensor | None) -> bool:
        shaped = check_shapes(rules, self.k_pages, self.v_pages)
        if not rules.tensor("kv.rope", self.rope, "num_pages", "page_size", "heads", "head_dim") or not shaped:
            return False
        what, own = f"kv.rope has shape {tuple(self.rope.shape)}", tuple(self.k_pages.shape[:3])
        rule = f"it must be ({', '.join(map(str, own))}, columns) as the latents"
        rules.require(self.rope.shape[:3] == own, what, rule)
        if q is None or (self.q_rope is not None and not check_rope(rules, q, self.q_rope)):
            return False
        latent, rotary, columns = self.k_pages.shape[-1], self.rope.shape[-1], self.query_columns(q)
        rule = f"it must have the latents' columns and those of kv.rope, {latent} + {rotary}"
        if rules.require(columns == latent + rotary, f"q has head_dim {columns}", rule):
            check_heads(rules, q, self.k_pages, self.v_pages, "kv.k_pages", "kv.v_pages", latent)
        narrow = self.rope.dtype == self.k_pages.dtype
        rule = f"it must have the dtype of q, {q.dtype}, or that of the latents"
        rules.require(narrow or self.rope.dtype == q.dtype, f"kv.rope has dtype {self.rope.dtype}", rule)
        what = f"kv.rope has dtype {self.rope.dtype} and the scale shape {tuple(getattr(self.k_scale, 'shape', ()))}"
        fine = not narrow or self._rope_scale is self.k_scale
        rules.require(fine, what, "rotary parts of 8 bits have the latents' scale per tensor or token")
        return True

    @property
    def _rope_scale(self) -> Tensor | None:
        """The scale of 8-bit rotary parts, that of the latents; None if it is per block of columns."""
        scale = self.k_scale
        blocks = is_tensor(scale) and scale.ndim == 4 and scale.shape[-1] > 1
        return None if self.rope.dtype != self.k_pages.dtype or blocks else scale

    def gathered(self) -> Iterator[tuple[Tensor, Tensor]]:
        page_size = self.k_pages.shape[1]
        for b, (_, values) in enumerate(super().gathered()):
            used = self.block_table[b, : -(-len(values) // page_size)].long()
            rope = rows_of_pages(self.rope, self._rope_scale, used, len(values))
            yield torch.cat([values.float(), rope.float()], -1), values.float()


class LatentParts(NamedTuple):
    """Views of a cache in DeepSeek's form: e4m3 (…, 512), fp32 (…, 4), bf16 (…, 64)."""

    latents: Tensor
    scale: Tensor
    rope: Tensor


def latent_parts(cache: Tensor) -> LatentParts:
    """Split a cache of bytes, uint8 (num_pages, page_size, heads, 656), into views of its parts."""
    fine = is_tensor(cache) and cache.dtype == torch.uint8 and cache.ndim == 4 and cache.shape[-1] == TOKEN_BYTES
    if not fine:
        found = f"{cache.dtype} {tuple(cache.shape)}" if is_tensor(cache) else of_type(cache)
        raise AttentionError(f"cache is {found}; it must be uint8 (num_pages, page_size, heads, {TOKEN_BYTES})")
    rows = (*cache.stride()[:-1], cache.storage_offset())
    if cache.stride(-1) != 1 or any(start % 4 for start in rows):  # of fp32 scales, which torch would not view
        what = f"cache has strides {cache.stride()} and begins at byte {cache.storage_offset()}"
        raise AttentionError(f"{what}; a token's bytes must be in one piece and begin at multiples of 16")
    latents, scale, rope = cache.split([LATENT, 4 * BLOCKS, 2 * ROTARY], -1)
    return LatentParts(latents.view(torch.float8_e4m3fn), scale.view(torch.float32), rope.view(torch.bfloat16))
