"""warpattn as an out-of-tree attention backend of vLLM (0.26 to 0.33).

    vllm serve MODEL --attention-backend WARPATTN        (CUSTOM where vLLM takes no new names)

`vllm_plugin` registers `WarpattnBackend` in each of vLLM's processes. Per layer, vLLM calls `do_kv_cache_update` (one
launch, `append_slots`) and `forward`. A step of the engine is a batch of requests, their new tokens laid end to end:

    requests     0    1    2    3         4
    new tokens   1    1    1    300       128
    context    812   77  501      0      1024          one `StepPlan`: decode and prefill kernels divide them

    backend.py    tells vLLM what is supported              metadata.py   a step, the same for all layers
    layer.py      one layer's mask, score and options       impl.py       one layer's attention
    images.py     ranges of tokens that see each other
    latent.py     models with latent attention: a separate backend on vLLM's classes for them

Nothing is read back from the card and launches do not depend on lengths, so on Hopper CUDA graphs can capture any step.
Graphs have not been tried on other cards.
"""

from warpattn.integrations.vllm.backend import WarpattnBackend
from warpattn.integrations.vllm.impl import WarpattnImpl
from warpattn.integrations.vllm.metadata import WarpattnMetadata, WarpattnMetadataBuilder

__all__ = ["WarpattnBackend", "WarpattnImpl", "WarpattnMetadata", "WarpattnMetadataBuilder"]
