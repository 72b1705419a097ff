"""Diffusion transformers of diffusers: one step of denoising, with its own attention and with `swapped()`.

The shapes are those of Flux (a picture of 1024 x 1024 and 512 tokens of text) and of Wan 2.1 1.3B (81 frames of
480 x 832, 32760 tokens), with fewer layers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from diffusers.utils.logging import set_verbosity_error
from torch import Tensor

from bench.frameworks.timing import Case, Group, Way, largest_error
from bench.peers import OWN
from warpattn.integrations.torch_sdpa import swapped

NATIVE = "native"  # torch's scaled_dot_product_attention, diffusers' default
CHOSEN = (NATIVE, "_native_cudnn")
Inputs = dict[str, Tensor]


def groups(smoke: bool) -> list[Group]:
    """Everything that is timed."""
    set_verbosity_error()  # every choice of a backend would warn that it is experimental
    made = {("Flux, 2 + 4 layers", "4096 + 512 tokens"): flux, ("Wan 1.3B, 2 layers", "32760 tokens"): wan}
    return [
        Group("diffusers", title, functools.partial(built, build, smoke), {case: functools.partial(step, smoke)})
        for (title, case), build in made.items()
    ]


def flux(smoke: bool) -> tuple[Any, Inputs]:
    """A Flux and its inputs."""
    heads, dim, text, pooled, latents = (2, 16, 32, 32, 4) if smoke else (24, 128, 4096, 768, 64)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=latents, num_layers=1 if smoke else 2, num_single_layers=1 if smoke else 4,
        attention_head_dim=dim, num_attention_heads=heads, joint_attention_dim=text, pooled_projection_dim=pooled,
        axes_dims_rope=(4, 4, 8) if smoke else (16, 56, 56),
    )  # fmt: skip
    side, words = (4, 8) if smoke else (64, 512)
    rows = torch.arange(side).repeat_interleave(side)
    places = torch.stack((torch.zeros(side * side), rows, torch.arange(side).repeat(side)), 1)
    inputs = {"hidden_states": torch.randn(1, side * side, latents), "timestep": torch.tensor([0.5])}
    inputs |= {"encoder_hidden_states": torch.randn(1, words, text), "pooled_projections": torch.randn(1, pooled)}
    return model, inputs | {"img_ids": places, "txt_ids": torch.zeros(words, 3)}


def wan(smoke: bool) -> tuple[Any, Inputs]:
    """A Wan and its inputs."""
    heads, dim, text, wide = (2, 16, 32, 64) if smoke else (12, 128, 4096, 8960)
    model = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=dim, text_dim=text, ffn_dim=wide, num_layers=1 if smoke else 2
    )
    frames, high, broad, words = (2, 8, 8, 8) if smoke else (21, 60, 104, 512)
    inputs = {"hidden_states": torch.randn(1, 16, frames, high, broad), "timestep": torch.tensor([500])}
    return model, inputs | {"encoder_hidden_states": torch.randn(1, words, text)}


def built(build: Callable[[bool], tuple[Any, Inputs]], smoke: bool) -> tuple[Any, Inputs]:
    """A model with random weights and its inputs on the device, in bf16; in a smoke test in fp32 on the CPU."""
    torch.manual_seed(0)
    device, dtype = ("cpu", torch.float32) if smoke else ("cuda", torch.bfloat16)
    with torch.device(device):
        model, inputs = build(smoke)
    inputs = {name: x.to(dtype) if x.is_floating_point() and "ids" not in name else x for name, x in inputs.items()}
    return model.to(dtype).eval(), inputs


def step(smoke: bool, made: tuple[Any, Inputs]) -> Case:
    """One call of the transformer."""
    model, inputs = made

    @torch.inference_mode()
    def native() -> Tensor:
        return model(**inputs, return_dict=False)[0]

    @torch.inference_mode()
    def ours() -> Tensor:
        with swapped():
            return model(**inputs, return_dict=False)[0]

    exact = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.inference_mode():
        true = copy.deepcopy(model).float()(**exact, return_dict=False)[0]
    chosen = CHOSEN[:1] if smoke else CHOSEN
    ways = {name: Way(functools.partial(model.set_attention_backend, name), native) for name in chosen}
    ways[OWN] = Way(functools.partial(model.set_attention_backend, NATIVE), ours)
    return Case(ways, lambda found: largest_error(found, true))
