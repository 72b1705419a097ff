"""`warm`: compiles all kernels of a model's attention on all cores before it serves, so that none compiles later.

    config.json ─ layers_of ─▶ layers ─┐
    the largest step ──────────────────┴─▶ examples of all sizes ─▶ launches ─▶ kernels, each once ─▶ files in the cache
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.errors import AttentionError, many
from warpattn.inputs import kind_of, of_type
from warpattn.kernels.cache.launch import NewRows, append_launches, slot_launches
from warpattn.language.traced import whole
from warpattn.problem import Call, validate
from warpattn.problem.arch import RUNS, TARGETS
from warpattn.problem.backends import LIMITS, chip_of, target_here
from warpattn.problem.launch import MOST_DECODED, Launch, PlanOptions
from warpattn.problem.memory import COPIED_BYTES
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime import compiler, compilers, kernel_cache
from warpattn.runtime.launches import list_launches
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged
from warpattn.sequences.latent import LatentPages
from warpattn.serving.layers import EightBitCache, LargestStep, Layer, check_step, layers_of, read_config, with_cache


@dataclass(frozen=True)
class Warmed:
    """What `warm` did: how many kernels the layers need, and how many of them it compiled."""

    kernels: int
    compiled: int


CALLS = ("all", "engine")
ABSORBED, STEP = "absorbed", "step"


class Example(NamedTuple):
    """A call that needs kernels: `tokens` new tokens of all `requests`, with block tables of `pages` columns.

    kind: a sequence's kind, "append", ABSORBED (paged, with queries in two tensors) or STEP (paged-ragged, by a
    `StepPlan`). most: the `max_q` of ragged queries. decoded: that of a `StepPlan`.
    """

    layer: Layer
    kind: str
    requests: int
    tokens: int
    pages: int = 1
    most: int | None = None
    decoded: int = 0


class Needed(NamedTuple):
    """A kernel to compile: launch number `position` of an example, and its file in the cache."""

    example: Example
    position: int
    name: str
    file: Path | None


def warm(
    model: str | PathLike[str] | Mapping[str, Any] | Sequence[Layer],
    largest: LargestStep | None = None,
    *,
    calls: str = "all",
    cache: EightBitCache | None = None,
    arch: str | None = None,
    processes: int | None = None,
    progress: Callable[[float], None] = lambda part: None,
) -> Warmed:
    """Compile the kernels of all calls of a model's layers up to the largest step, and keep them in the cache.

    model: a transformers config (a folder with config.json, such a file, or its dictionary), or the layers. calls:
    "engine" for only those of our engine plug-ins: slots, ragged prompts and steps over pages. cache: the format of
    8-bit pages, for layers without their own; without it pages have the layers' dtype. arch: a name of `plan --arch`
    or sm103 (B300); None: that of the current device, which there must be. processes: most parallel compilers; None:
    one per core. progress: called with the part done, 0 .. 1. Covers `attention`, `attention_varlen`, `attention_paged`
    with and without ragged queries, plans of them, `append_paged` and `append_slots` without rotation; tensors are laid
    out as engines do, in rows of 16 bytes.

    Raises AttentionError for unknown calls or architectures, for layers that the kernels do not take, and if the cache
    cannot keep kernels.
    """
    if not isinstance(calls, str) or calls not in CALLS:
        raise AttentionError(f"calls is {kind_of(calls)}; it must be one of {', '.join(CALLS)}")
    if cache is not None and not isinstance(cache, EightBitCache):
        raise AttentionError(f"cache is {kind_of(cache)}; it must be an EightBitCache or None")
    check_step(largest, progress)
    if arch is not None and not isinstance(arch, str):
        raise AttentionError(f"arch is {kind_of(arch)}; it must be the name of an architecture")
    arch = arch or chip_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")).target
    if arch not in TARGETS:
        listed = ", ".join(TARGETS)
        raise AttentionError(f"arch is {arch!r}; without a card that has kernels it must be one of {listed}")
    if processes is not None and whole(processes, 1) is None:
        raise AttentionError(f"processes is {kind_of(processes)}; it must be an int of at least 1, or None")
    kernel_cache.require_triton()
    largest, layers = LargestStep() if largest is None else largest, _layers(model)
    layers = layers if cache is None else with_cache(layers, cache)
    context = compilers.start(__name__, arch)  # the server imports while this process plans
    progress(0.0)
    workers = whole(processes, 1) or os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(dict(os.environ),)) as pool:
        compile_one = partial(pool.submit, partial(_compile, page_size=largest.page_size, arch=arch))
        try:
            number, futures = _begun(kernels_of(layers, largest, arch, calls), compile_one)
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(done / len(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Warmed(number, len(futures))


def _begun(kernels: Iterable[Needed], compile_one: Callable[[Needed], Future[None]]) -> tuple[int, list[Future[None]]]:
    """Begin to compile what the cache lacks, the slowest while the caller still looks for more, so that no core has one
    at the end; return the number of kernels and what has begun."""
    number, begun, waiting = 0, [], []
    for kernel in kernels:
        number += 1
        if kernel_cache.load(kernel.file) is not None:
            continue
        if rank(kernel) == 0:
            begun.append(compile_one(kernel))
        else:
            waiting.append(kernel)
    return number, begun + [compile_one(kernel) for kernel in sorted(waiting, key=rank)]


def _layers(model: str | PathLike[str] | Mapping[str, Any] | Sequence[Layer]) -> Sequence[Layer]:
    """Return the layers that the argument `model` of `warm` means."""
    if isinstance(model, (str, PathLike)):
        return layers_of(read_config(model))
    if isinstance(model, Mapping):
        return layers_of(model)
    if not isinstance(model, Sequence) or not all(isinstance(layer, Layer) for layer in model):
        rule = "it must be a transformers config, or a list of Layer"
        raise AttentionError(f"model is {of_type(model)}; {rule}")
    return model


def rank(kernel: Needed) -> int:
    """Order kernels by compile time, 0 for the slowest."""
    return next((rank for rank, part in enumerate(("prefill", "decode", "mla")) if part in kernel.name), 3)


def _begin(environment: dict[str, str]) -> None:
    """Initialise a process of the pool: the server it was forked from may have an older environment."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # imported objects stay, so the collector need not visit them


def _compile(kernel: Needed, page_size: int, arch: str) -> None:
    """Compile a kernel, in a process of the pool."""
    launch = launches_of(kernel.example, page_size, RUNS.get(arch, arch))[kernel.position]
    kernel_cache.find(_key(launch, arch), partial(compiler.artifact_of, launch, arch))
    if kernel_cache.load(kernel.file) is None:
        raise AttentionError(f"{launch.name} was compiled and cannot be kept in {kernel_cache.folder()}")


def _key(launch: Launch, target: str) -> tuple[Hashable, ...]:
    return (launch.name, target, launch.key)


def kernels_of(layers: Iterable[Layer], largest: LargestStep, target: str, calls: str = "all") -> Iterator[Needed]:
    """Yield every kernel that the layers need on a chip of `TARGETS`, once; `calls` as in `warm`."""
    arch = RUNS.get(target, target)
    found: set[str] = set()
    for layer in dict.fromkeys(layers):
        kinds = (*LIMITS[arch].kinds, ABSORBED, STEP) if calls == "all" else kinds_of_engines(layer)
        for example in examples_of(layer, largest, kinds):
            with torch.device("cpu"):  # whatever torch's default device is
                launches = launches_of(example, largest.page_size, arch)
            for position, launch in enumerate(launches):
                key = _key(launch, target)
                if repr(key) not in found:
                    found.add(repr(key))
                    yield Needed(example, position, launch.name, kernel_cache.path_of(key))


def kinds_of_engines(layer: Layer) -> Sequence[str]:
    """Return the kinds that engine plug-ins call: prompts and steps over pages. Steps over latents have equally many
    queries, in one tensor if ranks share the context, else in two."""
    return ("ragged", *(("paged", ABSORBED) if layer.latent else (STEP,)))


def examples_of(layer: Layer, largest: LargestStep, kinds: Sequence[str]) -> Iterator[Example]:
    """Yield calls of all sizes that may choose another kernel: powers of two up to the largest, and the largest."""
    yield Example(layer, "append", 1, 1)
    tables = powers(-(-largest.length // largest.page_size))
    steps = [kind for kind in ("paged-ragged", STEP) if kind in kinds]
    for requests in powers(largest.requests):
        for pages in tables:
            for kind in ("paged", ABSORBED) if layer.latent else ("paged",):
                each = {1, 1 + largest.drafts} if kind in kinds else ()
                yield from (Example(layer, kind, requests, requests * n, pages) for n in each)
        for tokens in powers(largest.tokens):
            if tokens >= requests and not layer.latent:
                yield from (Example(layer, kind, requests, tokens) for kind in ("dense", "ragged") if kind in kinds)
                for kind in steps:  # engines make tables for the longest request
                    decoded = min(1 + largest.drafts, MOST_DECODED) if kind == STEP else 0
                    yield Example(layer, kind, requests, tokens, tables[-1], decoded=decoded)
        for kind in () if layer.latent else steps:
            for most in {1, 1 + largest.drafts}:
                yield Example(layer, kind, requests, requests * most, tables[-1], most)


def launches_of(example: Example, page_size: int, arch: str) -> tuple[Launch, ...]:
    """Return the launches of an example for a chip, which this machine need not have."""
    if example.kind == "append":
        return append_kernels(example.layer, page_size, arch)
    call = call_of(example, page_size)
    checked = validate(replace(call, backend=f"simulate:{arch}"), read_values=False)  # its limits, without a card
    out = call.q.new_empty((*call.q.shape[:-1], checked.problem.dim_v))
    operands = fitted(Operands(call.q, call.k, call.v, out, None, call.sinks))
    workspace = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="meta") if example.kind == STEP else None
    options = PlanOptions(
        copies=example.kind != STEP, workspace=workspace, decoded=example.decoded, target=target_here(arch)
    )  # fmt: skip
    return list_launches(replace(checked, backend=arch), operands, call.sequence, options)


def call_of(example: Example, page_size: int) -> Call:
    """Make the call on CPU tensors, whose values do not matter."""
    layer, kind, requests, tokens, pages, most, _ = example
    q = torch.empty(requests, tokens // requests, layer.heads_q, layer.dim_qk, dtype=layer.dtype)
    offsets = torch.arange(requests + 1, dtype=torch.int32) * (tokens // requests)
    if kind in ("dense", "ragged"):
        k, v = (q.new_empty(*q.shape[:2], layer.heads_kv, dim) for dim in (layer.dim_qk, layer.dim_v))
        sequence: Any = Dense()
        if kind == "ragged":
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            sequence = Ragged(offsets)
    else:
        sequence = kv = cache_of(layer, page_size, requests, pages)
        k, v = kv.k_pages, kv.v_pages
        if kind == ABSORBED:
            q, rope = q.split([layer.latent, layer.dim_qk - layer.latent], -1)
            sequence = kv.with_fields(q_rope=rope)
        if kind in ("paged-ragged", STEP):
            q, sequence = q.flatten(0, 1), PagedRagged(kv, Ragged(offsets, max_q=most))
    sinks = torch.zeros(layer.heads_q, dtype=torch.float32) if layer.sinks else None
    return Call(q, k, v, sequence, layer.mask, layer.score, sinks, layer.scale)


def cache_of(layer: Layer, page_size: int, requests: int, pages: int) -> PagedKV:
    """Make a cache of one page, with a table of `pages` columns. It is not filled: no rule reads its values, and
    filling it would leave torch's threads spinning on all cores."""
    rows, held = (1, page_size, layer.heads_kv), layer.cache
    table = torch.empty(requests, pages, dtype=torch.int32)
    lengths = torch.full((requests,), pages * page_size, dtype=torch.int32)
    if held is None:
        k = torch.empty(*rows, layer.dim_qk, dtype=layer.dtype)
        v = k[..., : layer.latent] if layer.latent else torch.empty(*rows, layer.dim_v, dtype=layer.dtype)
        return PagedKV(k, v, table, lengths)
    if layer.latent:
        latents = torch.empty(*rows, layer.latent, dtype=held.dtype)
        kind = held.dtype if held.per in (None, "tensor") else layer.dtype
        rope = torch.empty(*rows, layer.dim_qk - layer.latent, dtype=kind)
        return LatentPages(latents, rope, table, lengths, scale=_scale_of(latents, held.per))
    k, v = (torch.empty(*rows, dim, dtype=held.dtype) for dim in (layer.dim_qk, layer.dim_v))
    return PagedKV(k, v, table, lengths, k_scale=_scale_of(k, held.per), v_scale=_scale_of(v, held.per))


def _scale_of(pages: Tensor, per: str | int | None) -> Tensor | None:
    """Make a scale of 8-bit pages."""
    if per is None:
        return None
    if isinstance(per, int):
        if pages.shape[-1] % per:
            rule = f"scales per {many(per, 'column')} need a multiple of {per}"
            raise AttentionError(f"the head dim of the cache is {pages.shape[-1]}; {rule}")
        shape = (*pages.shape[:-1], pages.shape[-1] // per)
    else:
        shape = {"tensor": (), "head": pages.shape[-2:-1], "token": pages.shape[:-1]}[per]
    return torch.empty(shape, dtype=torch.float32)


def append_kernels(layer: Layer, page_size: int, arch: str) -> tuple[Launch, ...]:
    """Return the launches that write the cache, by table and by slots; latents by slots only."""
    kv = cache_of(layer, page_size, 1, 1)
    latents = NewRows(_new_rows(kv.k_pages, layer), None, None, False, (kv.k_scale, None))
    if isinstance(kv, LatentPages) and kv.rope.dtype == kv.k_pages.dtype:
        writes = [(kv.k_pages, kv.rope, latents._replace(v=_new_rows(kv.rope, layer), scales=(kv.k_scale, kv.k_scale)))]
    elif isinstance(kv, LatentPages):
        writes = [(kv.k_pages, None, latents), (kv.rope, None, NewRows(_new_rows(kv.rope, layer), None, None, False))]
    elif layer.latent:
        parts = kv.v_pages, kv.k_pages[..., layer.latent :]  # new latents and rotary parts are in two tensors
        apart = NewRows(_new_rows(parts[0], layer), _new_rows(parts[1], layer), None, False, (None, None))
        writes = [(kv.k_pages, None, latents), (*parts, apart)]
    else:
        both = latents._replace(v=_new_rows(kv.v_pages, layer), scales=(kv.k_scale, kv.v_scale))
        writes = [(kv.k_pages, kv.v_pages, both)]
    found = () if layer.latent else append_launches(arch, kv, writes[0][-1])
    for k_pages, v_pages, new in writes:
        rows = new._replace(k=new.k[0], v=None if new.v is None else new.v[0])
        for dtype in (torch.int32, torch.int64):
            found += slot_launches(arch, (k_pages, v_pages), torch.zeros(1, dtype=dtype), None, rows)
    return found


def _new_rows(pages: Tensor, layer: Layer) -> Tensor:
    """Make one new token of one sequence for these pages, in the layer's dtype."""
    return torch.empty(1, 1, *pages.shape[2:], dtype=layer.dtype)


def powers(most: int) -> list[int]:
    """1, 2, 4, … below `most`, and `most`."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]
