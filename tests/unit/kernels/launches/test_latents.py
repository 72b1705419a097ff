"""Bytes, slots and scales of latent attention's configurations, by hand."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch

import warpattn as wa
from warpattn.kernels.sm90.mla.config import choose, tiles_of
from warpattn.kernels.sm90.mla.launch import hiding, list_launches
from warpattn.kernels.sm100.mla.config import choose_latent
from warpattn.problem import Call, Problem, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.operands import Operands
from warpattn.problem.problem import Scales
from warpattn.sequences import PagedKV
from warpattn.sequences.latent import LatentPages

E4M3 = {"kv_dtype": torch.float8_e4m3fn, "rope": 64}


def problem(**changes: Any) -> Problem:
    """16 heads of a token over pages of 16 keys."""
    q, k = torch.empty(1, 1, 16, 576).bfloat16(), torch.empty(4, 16, 1, 576).bfloat16()
    sequence = PagedKV(k, k[..., :512], torch.zeros(1, 4).int(), torch.zeros(1).int())
    checked = validate(Call(q, k, k[..., :512], sequence, backend="reference"), read_values=False)
    return replace(checked.problem, **changes)


@pytest.mark.parametrize("narrow", [False, True])
def test_tiles_of_8_bits_on_hopper(narrow: bool) -> None:
    """The slots of 16 bits; a barrier for what arrives in each, instead of that of a tile to clear."""
    config = tiles_of(problem(**E4M3, narrow_rope=narrow))
    plain = replace(config, latents=None, narrow_rope=False)
    assert config.private_bytes == plain.private_bytes
    assert config.smem_bytes - plain.smem_bytes == 8 * ((4 + 2 if narrow else 4) - 1)
    assert (config.block_n, config.stages, config.rope_stages, config.clears) == (64, 4, 2, False)


def test_16_bit_tiles_on_blackwell() -> None:
    choice = choose_latent(problem(), ARCHS["sm100"])
    config = choice.config
    assert (config.BM, config.BN, config.stages, config.own_rope, config.narrow_rope) == (64, 64, 2, False, False)
    assert (config.tile_bytes, config.ring.slot_bytes, config.ring.stages) == (64 * 1152, 64 * 1152, 2)
    assert config.scale_blocks("k") == config.scale_blocks("v") == 0
    assert choose_latent(problem(q_rope=64), ARCHS["sm100"]).config.own_rope


@pytest.mark.parametrize(("scales", "blocks"), [(Scales(), 1), (Scales(128, 128), 4)])
@pytest.mark.parametrize("narrow", [False, True])
def test_tiles_of_8_bits_on_blackwell(scales: Scales, blocks: int, narrow: bool) -> None:
    """32 keys a tile, in three slots; latents alone have scales, and products of rotary parts none."""
    choice = choose_latent(problem(**E4M3, scales=scales, narrow_rope=narrow), ARCHS["sm100"])
    config = choice.config
    assert (config.BN, config.stages, config.tile_bytes) == (32, 3, 32 * 1152)
    assert (config.scale_blocks("k"), config.scale_blocks("v")) == (0, blocks)
    assert config.rope_bytes == 32 * 64 * 2
    assert (config.staged_bytes, config.landing_bytes) == (32 * 576, 32 * 576) if narrow else (32 * 512, 32 * 640)
    assert len(choice.reasons) == len(choose_latent(problem(), ARCHS["sm100"]).reasons) + 1


@pytest.mark.parametrize("heads", [16, 128])
def test_one_token_needs_no_mask_that_hides_newer_keys(heads: int) -> None:
    """Its launches have the code of those without a mask; those of two tokens have not."""
    one, two = ([codes(tokens, heads, mask) for mask in (wa.Causal(), None)] for tokens in (1, 2))
    assert one[0] == one[1] and two[0] != two[1]
    assert codes(1, heads, wa.SlidingWindow(64)) != one[1]


def codes(tokens: int, heads: int, mask: wa.Mask | None) -> list[Hashable]:
    """What the code of each launch depends on."""
    q, k = torch.empty(1, tokens, heads, 576).bfloat16(), torch.empty(4, 16, 1, 576).bfloat16()
    sequence = PagedKV(k, k[..., :512], torch.zeros(1, 4).int(), torch.zeros(1).int())
    call = Call(q, k, sequence.v_pages, sequence, mask, backend="simulate:sm90")
    checked = validate(call, read_values=False)
    operands = Operands(q, k, sequence.v_pages, q[..., :512].contiguous(), None, None)
    return [launch.key for launch in list_launches(checked, operands, sequence, choose(checked.problem, ARCHS["sm90"]))]


@pytest.mark.parametrize(("tokens", "mask", "looks"), [
    (1, wa.Causal(), False), (2, wa.Causal(), True), (1, wa.SlidingWindow(64), True), (2, None, False),
])  # fmt: skip
@pytest.mark.parametrize("heads", [4, 128])
def test_which_kernels_over_8_bit_latents_look_at_their_output(heads, tokens, mask, looks) -> None:
    """They keep a mask that hides nothing, and do not look where nothing is hidden."""
    q, latents = torch.empty(1, tokens, heads, 576).bfloat16(), torch.empty(4, 64, 1, 512).to(torch.float8_e4m3fn)
    tables = torch.zeros(1, 4).int(), torch.zeros(1).int()
    sequence = LatentPages(latents, torch.empty(4, 64, 1, 64).bfloat16(), *tables, scale=torch.ones(4, 64, 1, 4))
    call = Call(q, sequence.k_pages, sequence.v_pages, sequence, mask, backend="simulate:sm90")
    checked = validate(call, read_values=False)
    hidden, config = hiding(checked, choose(checked.problem, ARCHS["sm90"]).config)
    assert (config.recomputes, hidden) == (looks, checked)
