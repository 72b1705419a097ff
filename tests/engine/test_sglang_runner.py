"""SGLang's own model runner on the CPU with our backend: its scheduler's batches, pools and allocator, its Llama.

A process of its own, since it holds one runner. SGLang's kernels for CPUs (`sgl_kernel`) are on no package index; they
and torchvision are stand-ins, and the values show that this model needs none of them.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from array import array
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import transformers

from tests.families import decoder

pytestmark = pytest.mark.engine
CLOSE = 2e-5  # of log-probabilities in fp32
SERVER = {
    "device": "cpu", "dtype": "float32", "page_size": 16, "max_total_tokens": 4096, "max_running_requests": 8,
    "mem_fraction_static": 0.1, "skip_tokenizer_init": True, "disable_cuda_graph": True, "disable_radix_cache": True,
    "sampling_backend": "pytorch", "grammar_backend": "none", "disable_overlap_schedule": True,
}  # fmt: skip


class Absent(ModuleType):
    """A module with whatever is taken from it."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A small Llama, SGLang's runner of it with our backend, and the functions by which its benchmark makes steps."""
    pytest.importorskip("sglang")
    assert transformers.__version__  # imported before the stand-ins, which it would take for the real ones
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    images = [f"torchvision{name}" for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2")]
    for name in (*images, "torchvision.transforms.v2.functional", "sgl_kernel"):
        sys.modules[name] = Absent(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    from sglang.benchmark import one_batch
    from sglang.srt.distributed import bootstrap
    from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler

    from warpattn.integrations.sglang_plugin import register

    register()
    model, folder = decoder("llama", head_dim=32), tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    server = ServerArgs(model_path=str(folder), attention_backend="warpattn", **SERVER)
    set_global_server_args_for_scheduler(server)
    server.resolve_once()
    bootstrap._bind_threads_if_cpu = lambda **_: None  # reads the machine's NUMA nodes
    rank = one_batch.spawn_world_rank(server, tp_rank=0, pp_rank=0)
    one_batch.publish(server, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    one_batch.get_tokenizer = lambda *_, **__: None
    runner, _ = one_batch.load_model(server, PortArgs.init_new(server), 0, 0)
    return SimpleNamespace(model=model, runner=runner.torch_runner, steps=one_batch)


def request(number: int, tokens: list[int]):
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=8)
    made = Req(rid=number, origin_input_text="", origin_input_ids=array("q", tokens), sampling_params=sampling)
    made.full_untruncated_fill_ids = made.origin_input_ids
    made.logprob_start_len, made.extend_end = -1, len(tokens)
    return made


def check(served, logits: torch.Tensor, texts: list[list[int]]) -> None:
    """The last token's log-probabilities are those of eager attention over each whole text."""
    with torch.inference_mode():
        wanted = torch.stack([served.model(torch.tensor([text])).logits[0, -1] for text in texts])
    torch.testing.assert_close(logits.log_softmax(-1), wanted.log_softmax(-1), atol=CLOSE, rtol=0)


def test_prompts_chunks_and_decoding(served):
    from warpattn.integrations.sglang.backend import WarpattnAttnBackend

    assert type(served.runner.attn_backend) is WarpattnAttnBackend
    chance = torch.Generator().manual_seed(3)
    texts = [torch.randint(1, 60, (n,), generator=chance).tolist() for n in (40, 7, 100)]
    cuts = [17, 3, 64]
    requests = [request(n, text[:cut]) for n, (text, cut) in enumerate(zip(texts, cuts, strict=True))]
    _, logits, _ = served.steps.extend(requests, served.runner)
    check(served, logits, [text[:cut] for text, cut in zip(texts, cuts, strict=True)])
    for one, text, cut in zip(requests, texts, cuts, strict=True):
        one.full_untruncated_fill_ids.extend(text[cut:])
        one.prefix_len, one.extend_end = cut, len(text)
    tokens, logits, batch = served.steps.extend(requests, served.runner)
    check(served, logits, texts)
    for _ in range(20):  # over the end of a page
        texts = [[*text, token] for text, token in zip(texts, tokens.tolist(), strict=True)]
        tokens, logits = served.steps.decode(tokens, batch, served.runner)
        check(served, logits, texts)
