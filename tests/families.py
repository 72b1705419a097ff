"""Small models of the families that the transformers adapter is tried with: random weights, a few hundred kilobytes.

Each family brings one thing: Llama grouped heads, Qwen norms of q and k, Mistral a window, Gemma 2 soft-capping and
alternating windows, Gemma 3 windows with few key heads, gpt-oss sinks, Bloom ALiBi, DeepSeek 2 latent attention,
Llama 4 chunks, BERT both directions, ModernBERT windows to both sides, T5 a position bias.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

SMALL = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0}
WINDOW = 6


def decoder_config(family: str, head_dim: int = 16) -> Any:
    """The configuration of a small decoder."""
    heads = {"head_dim": head_dim}
    match family:
        case "llama":
            return transformers.LlamaConfig(**GROUPED, **heads)
        case "qwen2":
            return transformers.Qwen2Config(**GROUPED)
        case "qwen3":
            return transformers.Qwen3Config(**GROUPED, **heads)
        case "mistral":
            return transformers.MistralConfig(**GROUPED, **heads, sliding_window=WINDOW)
        case "gemma2":
            capped = {"attn_logit_softcapping": 2.0, "sliding_window": WINDOW, "query_pre_attn_scalar": head_dim}
            return transformers.Gemma2Config(**GROUPED, **heads, **capped)
        case "gemma3":
            return transformers.Gemma3TextConfig(**GROUPED, **heads, sliding_window=WINDOW, layer_types=MIXED)
        case "gpt_oss":
            # All experts: choosing among them would turn a rounding error into another network.
            experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
            return transformers.GptOssConfig(**GROUPED, **heads, **experts, sliding_window=WINDOW, layer_types=MIXED)
        case "deepseek_v2":  # its real head dims, whatever `head_dim` says; no experts
            latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
            dense = {"q_lora_rank": None, "first_k_dense_replace": 2, "n_routed_experts": 2, "num_experts_per_tok": 1}
            return transformers.DeepseekV2Config(**GROUPED | {"num_key_value_heads": 4}, **latent, **dense)
        case "bloom":
            return transformers.BloomConfig(vocab_size=61, hidden_size=4 * head_dim, n_layer=2, n_head=4)
    raise ValueError(family)


MIXED = ["sliding_attention", "full_attention"]
DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")


def decoder(family: str, head_dim: int = 16) -> Any:
    """A small decoder with eager attention; weights large enough that attention matters."""
    torch.manual_seed(0)
    config = decoder_config(family, head_dim)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return enlarged(model)


def encoder(family: str) -> Any:
    """A small encoder with eager attention."""
    torch.manual_seed(0)
    if family == "modernbert":
        config = transformers.ModernBertConfig(
            **SMALL, local_attention=2 * WINDOW, global_attn_every_n_layers=2, pad_token_id=0, reference_compile=False
        )
    else:
        config = transformers.BertConfig(**SMALL, pad_token_id=0)
    return enlarged(transformers.AutoModel.from_config(config, attn_implementation="eager").eval())


def enlarged(model: Any) -> Any:
    """The model with its query and key weights scaled up and random sinks, so that no softmax is nearly uniform."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "query", "key", "Wqkv")):
                weight.mul_(6)
            elif "sinks" in name:
                weight.normal_()
    return model


def batches_of(tokens: int) -> Any:
    """What `generate_batch` is told for steps of so many tokens: 64 pages of 16, by the name that transformers has."""
    names = transformers.ContinuousBatchingConfig.__dataclass_fields__
    page = {"page_size" if "page_size" in names else "block_size": 16}
    return transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=tokens, **page)
