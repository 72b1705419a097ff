"""Decoders of transformers: prompts, padded batches, `generate`, `generate_batch` and a training step.

The shapes are those of Llama 3 8B, Gemma 2 9B (soft-cap, windows) and gpt-oss 20B's attention (sinks, windows; two
experts) with fewer layers, by the name of an attention implementation: the framework's own ones and warpattn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from bench.frameworks.exact import error_of_choices, exact, register, usual_error
from bench.frameworks.timing import Case, Group, Way, largest_error
from bench.peers import OWN
from warpattn.integrations import transformers as adapter

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 131072,
}  # fmt: skip
GEMMA = LLAMA | {
    "hidden_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 256,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
GPT_OSS = LLAMA | {
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64, "head_dim": 64,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_local_experts": 2,
    "num_experts_per_tok": 2,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 61, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
STOCK = ("sdpa",)
CAPPED = ("eager", "flex_attention")  # sdpa has neither soft-caps nor sinks


class Sizes(NamedTuple):
    """Of the card, or of a smoke test on the CPU."""

    device: str
    dtype: torch.dtype
    divisor: int  # of lengths
    new: int  # tokens of `generate`
    requests: int  # of `generate_batch`

    def ids(self, vocabulary: int, batch: int, length: int) -> Tensor:
        """Token ids (batch, length / divisor)."""
        chance = torch.Generator(self.device).manual_seed(length)
        shape = (batch, length // self.divisor)
        return torch.randint(1, vocabulary, shape, generator=chance, device=self.device)


CARD = Sizes("cuda", torch.bfloat16, 1, 32, 16)
SMOKE = Sizes("cpu", torch.float32, 128, 3, 3)


def groups(smoke: bool) -> list[Group]:
    """Everything that is timed."""
    register()
    adapter.register()
    sizes = SMOKE if smoke else CARD
    capped = CAPPED[:1] if smoke else CAPPED  # compiling for a CPU takes most of a minute
    models = {
        "Llama 3 8B": (transformers.LlamaConfig, LLAMA, llama_cases(sizes)),
        "Gemma 2 9B": (transformers.Gemma2Config, GEMMA, {"prefill 1 x 8k": prefill(sizes, capped, 1, 8192)}),
        "gpt-oss": (transformers.GptOssConfig, GPT_OSS, {"prefill 1 x 4k": prefill(sizes, capped, 1, 4096)}),
    }
    found = []
    for name, (kind, shape, cases) in models.items():
        values = shape | (TINY | {"layer_types": shape["layer_types"][:2]} if "layer_types" in shape else TINY)
        config = kind(**(values if smoke else shape), eos_token_id=None)  # so that all requests are equally long
        title = f"{name}, {config.num_hidden_layers} layers"
        found.append(Group("transformers", title, functools.partial(build, config, sizes), cases))
    return found


def llama_cases(sizes: Sizes) -> dict[str, Callable[[Any], Case]]:
    """Those of the model that every implementation can run."""
    return {
        "prefill 4 x 4k": prefill(sizes, STOCK, 4, 4096),
        "prefill 1 x 16k": prefill(sizes, STOCK, 1, 16384),
        "prefill 4 x up to 4k, padded on the left": prefill(sizes, STOCK, 4, 4096, "left"),
        "prefill 4 x up to 4k, padded on the right": prefill(sizes, STOCK, 4, 4096, "right"),
        f"generate {sizes.new} tokens, 8 x 4k": functools.partial(generate, sizes, 8, 4096),
        f"generate_batch {sizes.new} tokens, {sizes.requests} x 512 to 2k": functools.partial(generate_batch, sizes),
        "training step 2 x 4k": functools.partial(training, sizes, 2, 4096),
    }


def build(config: Any, sizes: Sizes) -> Any:
    """A model with random weights on the device."""
    torch.manual_seed(0)
    with torch.device(sizes.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=sizes.dtype).eval()
    model._supports_flash_attn = False  # or `generate_batch` would replace sdpa where flash-attn is installed
    return model


def ways(model: Any, names: Sequence[str], call: Callable[[], Any]) -> dict[str, Way]:
    """The same call with each implementation, warpattn's last."""
    assert adapter.NAME == OWN
    return {name: Way(functools.partial(model.set_attn_implementation, name), call) for name in (*names, OWN)}


def prefill(
    sizes: Sizes, names: Sequence[str], batch: int, length: int, padding: str | None = None
) -> Callable[[Any], Case]:
    """The decoder's layers over prompts, with the cache that generation goes on with; all hidden states of tokens."""

    def case(model: Any) -> Case:
        ids = sizes.ids(model.config.vocab_size, batch, length)
        real = torch.ones_like(ids, dtype=torch.bool)
        if padding:
            lengths = torch.linspace(ids.shape[1], ids.shape[1] // 4, batch, device=ids.device).int()
            real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            real = real.flip(1) if padding == "left" else real
        given = {"attention_mask": real.long()} if padding else {}

        @torch.inference_mode()
        def hidden(of: Any = model, use_cache: bool = True) -> Tensor:
            return of.model(ids, use_cache=use_cache, **given).last_hidden_state

        with exact(model) as twin:
            true = hidden(twin, use_cache=False)[real]
        return Case(ways(model, names, hidden), lambda found: largest_error(found[real], true), int(real.sum()))

    return case


def generate(sizes: Sizes, batch: int, length: int, model: Any) -> Case:
    """Greedy generation with a dynamic cache, prompts included."""
    ids = sizes.ids(model.config.vocab_size, batch, length)
    options = greedy(sizes)

    def tokens() -> list[list[int]]:
        return model.generate(ids, generation_config=options)[:, ids.shape[1] :].tolist()

    prompts = ids.tolist()
    model.set_attn_implementation(STOCK[0])
    noise = usual_error(model, prompts, sizes.new)
    return Case(ways(model, STOCK, tokens), functools.partial(error_of_choices, model, prompts), 0, noise)


def generate_batch(sizes: Sizes, model: Any) -> Case:
    """Continuous batching: prompts of many lengths, in chunks beside decoding requests."""
    requests, page, step = sizes.requests, 16 if sizes.divisor > 1 else 256, 2048 // sizes.divisor + 8
    lengths = torch.linspace(512, 2048, requests).long().tolist()
    prompts = [sizes.ids(model.config.vocab_size, 1, length)[0].tolist() for length in lengths]
    total = sum(map(len, prompts)) + requests * sizes.new
    names = transformers.ContinuousBatchingConfig.__dataclass_fields__
    pages: dict[str, Any] = {"page_size" if "page_size" in names else "block_size": page}
    pages["num_blocks"] = total // page + 2 * requests
    batches = transformers.ContinuousBatchingConfig(max_batch_tokens=step, **pages)

    def tokens() -> list[list[int]]:
        found = model.generate_batch(prompts, greedy(sizes), batches)
        made = [one.generated_tokens for one in found.values()]
        if [len(one) for one in made] != [sizes.new] * requests:
            raise RuntimeError(f"{len(made)} of {requests} requests have {list(map(len, made))} tokens")
        return made

    model.set_attn_implementation(STOCK[0])
    noise = usual_error(model, prompts, sizes.new)
    judged = functools.partial(error_of_choices, model, prompts)
    return Case(ways(model, STOCK, tokens), judged, total, noise)


def greedy(sizes: Sizes) -> transformers.GenerationConfig:
    """As many tokens of every request."""
    return transformers.GenerationConfig(max_new_tokens=sizes.new, do_sample=False, eos_token_id=None, pad_token_id=0)


def training(sizes: Sizes, batch: int, length: int, model: Any) -> Case:
    """Loss and gradients of all weights; those of the first layer's projections, which the error of every layer has
    reached, are compared."""
    ids = sizes.ids(model.config.vocab_size, batch, length)

    def gradients(of: Any) -> Tensor:
        of.train().zero_grad(set_to_none=True)
        of(ids, labels=ids, use_cache=False).loss.backward()
        of.eval()
        attention = of.model.layers[0].self_attn
        return torch.cat([x.weight.grad.flatten() for x in (attention.q_proj, attention.k_proj, attention.v_proj)])

    with exact(model) as twin:
        true = gradients(twin).float()
        twin.zero_grad(set_to_none=True)
    return Case(
        ways(model, STOCK, functools.partial(gradients, model)), lambda found: largest_error(found, true), ids.numel()
    )


