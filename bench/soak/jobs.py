"""Jobs of `bench.soak --load`: calls, plans and captures of 16 bits, latent attention, 8-bit keys and values.

Each thread has jobs of its own sizes; what must come out of one is the reference's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

import warpattn as wa

PAGE, PAGES = 64, 6  # keys of a page, pages of a sequence
LATENT, WIDTH = 512, 576  # columns of values, and of keys, in latent attention
STREAMS = 8

Draw = Callable[..., Tensor]  # takes a shape


class Job(NamedTuple):
    """Something to do, on the caller's stream, and what it must return."""

    name: str
    run: Callable[[], Tensor]
    wanted: Tensor


@cache
def streams() -> list[torch.cuda.Stream]:
    """The threads' streams, and the last for captures alone. Made at once: torch hands out 32 streams in turn, so one
    made later may be another's, and what its threads launch would be captured instead of run."""
    return [torch.cuda.Stream() for _ in range(STREAMS + 1)]


_one_capture = threading.Lock()


def card_jobs(number: int) -> list[Job]:
    """What a thread does on a card."""
    seed = torch.Generator().manual_seed(number)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seed).to("cuda", torch.bfloat16)

    jobs = [*dense_jobs(draw, number), captured_job(draw, number)]
    return [*jobs, *latent_jobs(draw, number), *narrow_jobs(draw, number)]


def dense_jobs(draw: Draw, number: int) -> list[Job]:
    """A call, a new plan, and a plan of the thread's own again."""
    q, k, v = (draw(1, 130 + number, heads, 128) for heads in (8, 2, 2))
    step, cache = draw(2, 1, 8, 128), (draw(2, 300 + number, 2, 128), draw(2, 300 + number, 2, 128))
    whole = wa.attention(q, k, v, mask=wa.Causal(), backend="reference")
    token = wa.attention(step, *cache, backend="reference")
    plan = wa.DecodePlan(step, cache)
    return [
        Job("calls", lambda: wa.attention(q, k, v, mask=wa.Causal()), whole),
        Job("new plans", lambda: wa.DecodePlan(step, cache)(step, cache), token),
        Job("planned calls", lambda: plan(step, cache), token),
    ]


def captured_job(draw: Draw, number: int) -> Job:
    """A graph that the thread captured."""
    q, k, v = (draw(1, 130 + number, heads, 128) for heads in (8, 2, 2))
    whole = wa.attention(q, k, v, mask=wa.Causal(), backend="reference")
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(whole)
    wa.attention(q, k, v, mask=wa.Causal(), out=out)
    with _one_capture, torch.cuda.graph(graph, stream=streams()[-1], capture_error_mode="thread_local"):
        wa.attention(q, k, v, mask=wa.Causal(), out=out)

    def replayed() -> Tensor:
        out.fill_(torch.nan)
        graph.replay()
        return out

    return Job("replays", replayed, whole)


def latent_jobs(draw: Draw, number: int) -> list[Job]:
    """Latent attention over pages, called and planned."""
    q, pages = draw(2, 1, 16, WIDTH), draw(2 * PAGES, PAGE, 1, WIDTH)
    kv = wa.PagedKV(pages, pages[..., :LATENT], *tables(q.device, number))
    wanted = wa.attention_paged(q, kv, backend="reference")
    plan = wa.DecodePlan(q, kv)
    return [
        Job("latent calls", lambda: wa.attention_paged(q, kv), wanted),
        Job("planned latent calls", lambda: plan(q, kv), wanted),
    ]


def narrow_jobs(draw: Draw, number: int) -> list[Job]:
    """A prefill and a planned decode over keys and values of 8 bits."""
    q, k, v = (draw(1, 130 + number, heads, 128) for heads in (8, 2, 2))
    k, v = wa.quantize(k, per="head"), wa.quantize(v, per="head")
    step, pages = draw(2, 1, 8, 128), [wa.quantize(draw(2 * PAGES, PAGE, 2, 128), per="head") for _ in range(2)]
    (k_pages, k_scale), (v_pages, v_scale) = ((x.values, x.scale) for x in pages)
    kv = wa.PagedKV(k_pages, v_pages, *tables(step.device, number), k_scale=k_scale, v_scale=v_scale)
    plan = wa.DecodePlan(step, kv)
    return [
        Job(
            "8-bit calls",
            lambda: wa.attention(q, k, v, mask=wa.Causal()),
            wa.attention(q, k, v, mask=wa.Causal(), backend="reference"),
        ),
        Job("planned 8-bit calls", lambda: plan(step, kv), wa.attention_paged(step, kv, backend="reference")),
    ]


def tables(device: torch.device, number: int) -> tuple[Tensor, Tensor]:
    """Block table and lengths of two sequences."""
    table = torch.arange(2 * PAGES, dtype=torch.int32).reshape(2, PAGES)
    lengths = torch.tensor([300 + number, 1 + number], dtype=torch.int32)
    return table.to(device), lengths.to(device)
