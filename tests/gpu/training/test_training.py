"""A small Llama trained in bf16 for 200 steps to repeat what it has read, beside torch's own kernels.

The loss falls from 4.17 to 2.1 within some 40 steps, and when it does so is chaotic: on an H200 means of 20 steps
differed by up to 21 % between torch's four kernels, and by up to 5 % where one weight had moved by one unit in the last
place. So the loss has to stay within what torch's kernels do, and 5 %. What shows an error is the gradients along one
trajectory, from the same weights and words: there ours had at most 1.15 times the error of torch's flash-attention over
all parameters, and 1.30 times over one call's dq, dk or dv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("transformers")

import transformers

import warpattn as wa

pytestmark = pytest.mark.gpu

STEPS, EVERY, BATCH, ROWS, WORDS = 200, 10, 8, 256, 64
WINDOW, MOVED = 20, 1.05
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (batch, heads, rows, dim)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = wa.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=wa.Causal())
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def torchs(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In fp64."""
    return torchs(SDPBackend.MATH)(q.double(), k.double(), v.double()).to(q.dtype)


FLASH = torchs(SDPBackend.FLASH_ATTENTION)
OTHERS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
Call = tuple[Tensor, ...]  # q, k, v and the gradient of the output


class Training:
    """A model with its optimizer and its words, the same for every attention."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=WORDS, max_position_embeddings=ROWS,
        )  # fmt: skip
        transformers.AttentionInterface.register("chosen", self._attend)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="chosen")
        self.model = model.to("cuda", torch.bfloat16).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.words = torch.Generator("cuda").manual_seed(0)
        self.attention: Attention = FLASH
        self.calls: list[Call] | None = None

    def _attend(
        self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: object, **_: object
    ) -> tuple[Tensor, None]:
        out = self.attention(q, k, v)
        if self.calls is not None:
            calls, operands = self.calls, (q.detach(), k.detach(), v.detach())
            out.register_hook(lambda dout: calls.append((*operands, dout)))
        return out.transpose(1, 2).contiguous(), None

    def batch(self) -> Tensor:
        half = torch.randint(0, WORDS, (BATCH, ROWS // 2), device="cuda", generator=self.words)
        return torch.cat((half, half), 1)

    def gradients(self, attention: Attention, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, all parameters' gradients one after the other)."""
        self.attention = attention
        self.optimizer.zero_grad()
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach().float(), torch.cat([p.grad.float().flatten() for p in self.model.parameters()])

    @contextmanager
    def caught(self) -> Iterator[list[Call]]:
        """The attention calls of a step."""
        self.calls = []
        yield self.calls
        self.calls = None


def losses(attention: Attention) -> Tensor:
    """Means of WINDOW steps."""
    training, found = Training(), []
    for _ in range(STEPS):
        found.append(training.gradients(attention, training.batch())[0])
        training.optimizer.step()
    return torch.stack(found).view(-1, WINDOW).mean(1).cpu()


def taken(attention: Attention, call: Call) -> tuple[Tensor, ...]:
    q, k, v = leaves = [x.clone().requires_grad_() for x in call[:3]]
    return torch.autograd.grad(attention(q, k, v), leaves, call[3])


def error(found: Tensor, right: Tensor) -> float:
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def test_gradients_along_a_training_are_as_good_as_those_of_flash_attention():
    training = Training()
    for step in range(1, STEPS + 1):
        ids = training.batch()
        if step % EVERY == 0:
            with training.caught() as calls:
                _, right = training.gradients(exact, ids)
            mine, theirs = (error(training.gradients(kernel, ids)[1], right) for kernel in (ours, FLASH))
            assert mine <= 2 * theirs, f"step {step}, all parameters: {mine:.2e}, flash-attention {theirs:.2e}"
            assert len(calls) == 2
            for call in calls:
                best = taken(exact, tuple(x.double() for x in call))
                for name, own, flash, true in zip("qkv", taken(ours, call), taken(FLASH, call), best, strict=True):
                    mine, theirs = error(own, true), error(flash, true)
                    assert mine <= 2 * theirs, f"step {step}, d{name}: {mine:.2e}, flash-attention {theirs:.2e}"
        training.gradients(FLASH, ids)
        training.optimizer.step()


def test_the_loss_stays_within_that_of_torchs_kernels():
    peers = torch.stack([losses(kernel) for kernel in (FLASH, *map(torchs, OTHERS))])
    found = losses(ours)
    assert (peers[:, -1] < peers[:, 0] - 1).all(), "nothing was learnt"
    assert (found <= MOVED * peers.amax(0)).all() and (found >= peers.amin(0) / MOVED).all(), (found, peers)
