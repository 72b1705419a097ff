"""Latent attention over pages: `BatchMLAPagedAttentionWrapper`.

    q_nope (tokens, H, 512) | q_pe (tokens, H, 64)  ▶ `LatentQuery`          ckv_cache | kpe_cache  ▶ keys of 576

Queries are read in place. So are both parts of a cache if they are views of one buffer, as in engines; if not, each
call copies the whole cache to join them. 8-bit latents with a 16-bit kpe_cache are
`LatentPages`, without copies.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.api import attention_paged
from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import is_tensor, kind_of, number
from warpattn.integrations.flash_attn import packed
from warpattn.integrations.flash_attn.latent import joined, queries
from warpattn.integrations.flashinfer.layer import Layer, all_of, check_output, eight_bit_scale, finished
from warpattn.integrations.flashinfer.older import Wrapper, check_planned
from warpattn.integrations.flashinfer.tables import PageLists, Tables, kept_offsets
from warpattn.integrations.signature import Given, drop_in, require_integers
from warpattn.masks import Causal, Full
from warpattn.quantized import EIGHT_BIT
from warpattn.sequences import PagedKV, Ragged
from warpattn.sequences.latent import LatentPages

REFUSED_BY_RUN = {
    "profiler_buffer": "kernels write no profile",
    **dict.fromkeys(("kv_len", "page_table"), "plan says which pages belong to each request"),
    **dict.fromkeys(("o_scale", "bmm2_scale"), "multiply the output by it"),
    "bmm1_scale": "give plan a sm_scale",
    "kpe_scale": "rotary parts have 16 bits",
    "skip_softmax_threshold_scale_factor": "every key counts",
}
NAMES_OF_RUN = {
    "seq.cu_q": "qo_indptr",
    "kv.k_pages": "ckv_cache",
    "kv.v_pages": "ckv_cache",
    "kv.block_table": "block_tables",
    "kv.lengths": "seq_lens",
}
FEW = 16  # new tokens of a request that kernels decode
LISTS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
NEEDED = ("head_dim_ckv", "head_dim_kpe", "page_size", "sm_scale")


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Requests and their pages: as lists (qo_indptr, kv_indptr, kv_indices, kv_len_arr), or as a table."""

    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> MLAPlanMetadata:
        """Give pages as lists."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Tensor, block_tables: Tensor, seq_lens: Tensor, max_q_len: int | None = None
    ) -> MLAPlanMetadata:
        """Give pages as a table (requests, pages)."""
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(
        cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, **table: Any
    ) -> MLAPlanMetadata:
        """Give pages as both; the table is used."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, **table)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are used: offsets of queries, then lists or a table. Raises AttentionError."""
        names = LISTS if self.block_tables is None else ("cum_seq_lens_q", "block_tables", "seq_lens")
        found = all_of(*(partial(self.tensor, name) for name in names))
        return dict(zip(names, found, strict=True))

    def tensor(self, name: str) -> Tensor:
        """Return the tensor `name`; raises AttentionError if it does not fit."""
        x, rank = getattr(self, name), 1 + (name == "block_tables")
        if not is_tensor(x) or x.ndim != rank or x.dtype not in (torch.int32, torch.int64):
            found = f"{x.dtype} of rank {x.ndim}" if is_tensor(x) else kind_of(x)
            raise AttentionError(f"{name} is {found}; it must be a tensor of int32 or int64 of rank {rank}")
        require_integers(name, x)
        return x


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Absorbed latent attention of any numbers of new tokens of each request."""

    @drop_in(
        "self, float_workspace_buffer: tensor, use_cuda_graph=False, qo_indptr: ints=None, "
        "kv_indptr=None, kv_indices: ints=None, kv_len_arr=None, backend='auto'",
        hints={"kv_indptr", "kv_len_arr", "backend"},
    )
    def __init__(given: Any) -> None:
        """With `use_cuda_graph` the buffers give the largest batch: requests, and pages of all requests."""
        own, fixed = given.self, None
        own.device, own.is_cuda_graph_enabled = given.float_workspace_buffer.device, bool(given.use_cuda_graph)
        buffers = (given.qo_indptr, given.kv_indices)
        if given.use_cuda_graph and all(map(is_tensor, buffers)):  # a table needs none
            fixed = (len(buffers[0]) - 1, len(buffers[1]))
        own.tables, own.layer, own.planned, own.offsets, own.max_q = Tables(fixed), None, given, {}, None

    @drop_in(
        "self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads: count=None, "
        "head_dim_ckv: count=None, head_dim_kpe: count=None, page_size: count=None, causal=False, "
        "sm_scale: number=None, q_data_type=None, kv_data_type=None, use_profiler=False, *, metadata=None, "
        "cum_seq_lens_q=None, block_tables=None, seq_lens=None, max_q_len=None, query_layout=None, "
        "kv_cache_layout=None, lse_mode='none', output_dtype=None, output_scale='none', scale_mode='default', "
        "skip_softmax=False, enable_pdl=None, use_sinks=False",
        refused={
            "use_profiler": "kernels write no profile",
            "output_scale": "multiply the output by it",
            "skip_softmax": "every key counts",
        },
        hints={"q_data_type", "kv_data_type", "query_layout", "kv_cache_layout", "scale_mode",
               "enable_pdl", "use_sinks"},
        names={"indptr": "kv_indptr", "indices": "kv_indices"},
    )  # fmt: skip
    def plan(given: Any) -> None:
        """Set the queries and pages of each request. Reads lists back from a card, as FlashInfer does; a table and its
        lengths are used in place, and may change between replays of a graph."""
        own = given.self
        own.layer = None  # nothing is planned until all of it is
        found, _ = all_of(lambda: _requests(given).tensors(), lambda: _check_needed(given))
        offsets, page_size = next(iter(found.values())), int(given.page_size)
        all_of(lambda: _plan_queries(own, offsets), lambda: _plan_pages(own, found, page_size))
        own.layer, own.planned = Layer(Causal() if given.causal else Full(), None, number(given.sm_scale) or 0.0), given

    @drop_in(
        "self, q_nope: 3=None, q_pe: 3=None, ckv_cache: 3=None, kpe_cache: 3=None, out: 3=None, lse: 2=None, "
        "return_lse=False, profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, "
        "o_scale=None, *, query=None, kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None, "
        "skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None",
        refused=REFUSED_BY_RUN,
        names=NAMES_OF_RUN,
    )
    def run(given: Any) -> Any:
        """q_nope (tokens, H, 512), q_pe (tokens, H, 64), caches (pages, rows, 512 and 64), or both as `query` and
        `kv_cache`; out (tokens, H, 512), with return_lse also lse (tokens, H), of base 2 or e."""
        own, plan = given.self, given.self.planned
        check_planned(own, "run")
        widths = (plan.head_dim_ckv, plan.head_dim_kpe)
        (q, rope), cache, base = all_of(
            lambda: _parts(given, Parts("query", "q_nope", "q_pe", widths)),
            lambda: _parts(given, Parts("kv_cache", "ckv_cache", "kpe_cache", widths)),
            lambda: _base_of_lse(given),
        )
        kv, *_ = all_of(
            lambda: _pages(given, *cache),
            lambda: _check_queries(given, q),
            lambda: check_output("output_dtype", plan.output_dtype, q),
        )
        tail = own.layer.tail() | {"sinks": given.sinks}
        found = Given(vars(given) | {"lse_base": base})
        if own.tokens is None:
            out, lse = attention_paged(queries(q, rope), kv, Ragged(own.cu_q, max_q=own.max_q), out=given.out, **tail)
            return finished(found, out, lse)
        shape = len(kv.lengths), own.tokens
        target = None if given.out is None else given.out.unflatten(0, shape)
        out, lse = attention_paged(queries(*(x.unflatten(0, shape) for x in (q, rope))), kv, out=target, **tail)
        return finished(found, out.flatten(0, 1) if given.out is None else given.out, lse.transpose(0, 1).flatten(1))


def _requests(given: Given) -> MLAPlanMetadata:
    """Return the requests of a plan, given as one value or as separate arguments."""
    named = {field.name: getattr(given, field.name) for field in fields(MLAPlanMetadata)}
    if given.metadata is None:
        return MLAPlanMetadata(**named)
    both = [name for name, value in named.items() if value is not None]
    if both or not isinstance(given.metadata, MLAPlanMetadata):
        rule = f"without {both[0]}, which it replaces" if both else "from this module"
        raise AttentionError(f"metadata is {kind_of(given.metadata)}; it must be a MLAPlanMetadata {rule}")
    return given.metadata


def _check_needed(given: Given) -> None:
    absent = [f"{name} is None; latent attention needs it" for name in NEEDED if getattr(given, name) is None]
    if absent:
        raise AttentionError(*absent)


def _plan_queries(own: Any, offsets: Tensor) -> None:
    own.cu_q, longest = kept_offsets(own, "qo_indptr", offsets)
    own.tokens = longest if bool((offsets.cpu().diff() == longest).all()) else None
    if own.is_cuda_graph_enabled and own.max_q is not None and longest > own.max_q:
        rule = f"graphs of this wrapper were planned for at most {own.max_q}"
        raise AttentionError(f"a request has {many(longest, 'new token')}; {rule}")
    if own.is_cuda_graph_enabled:
        longest = FEW if longest <= FEW else None
    own.max_q = longest


def _plan_pages(own: Any, found: dict[str, Tensor], page_size: int) -> None:
    if "block_tables" in found:
        own.tables.hold(found["block_tables"], found["seq_lens"], page_size)
    else:
        own.tables.plan(_page_lists(found, page_size), own.device)


def _base_of_lse(given: Given) -> str:
    planned, e = given.self.planned.lse_mode, given.return_lse_base_on_e
    fine = isinstance(planned, str) and planned in ("none", "basee" if e else "base2")
    if given.return_lse and not fine:
        raise AttentionError(f"return_lse_base_on_e is {e}; plan was called with lse_mode {kind_of(planned)}")
    return "ln" if e else "log2"


def _check_queries(given: Given, q: Tensor) -> None:
    own, rules, rows = given.self, Rules(), len(q)
    heads, planned = q.shape[1], number(own.planned.num_heads)
    fine = own.planned.num_heads is None or heads == planned
    rules.require(fine, f"num_heads of the plan is {planned}", f"queries of the call have {heads}")
    if own.tokens is not None:
        requests = len(own.tables.lengths)
        rule = f"plan was called for {many(requests, 'request')} of {own.tokens}"
        rules.require(rows == own.tokens * requests, f"the queries have {many(rows, 'token')}", rule)
        if given.out is not None:
            what = f"out has {many(len(given.out), 'row')}"
            rules.require(len(given.out) == rows, what, f"it must have those of the queries, {rows}")
    rules.done()


def _page_lists(found: dict[str, Tensor], page_size: int) -> PageLists:
    """Return the lists of the pages that the lengths need, with the rows of last pages. kv_indptr may list more."""
    indptr, indices, lengths = (found[name].to("cpu", torch.int64) for name in LISTS[1:])
    counts = indptr.diff()
    if len(lengths) != len(counts):
        raise AttentionError(f"kv_indptr lists {many(len(counts), 'request')}; kv_len_arr has {len(lengths)}")
    needed = (lengths + page_size - 1) // max(page_size, 1)
    rules = Rules()
    for b in ((lengths < 0) | (needed > counts)).nonzero().flatten().tolist()[:1]:
        rule = f"request {b} has {many(int(counts[b]), 'page')} of {many(page_size, 'row')} in kv_indptr"
        rules.add(f"kv_len_arr[{b}] is {int(lengths[b])}", rule)
    if len(indptr):
        first, last = int(indptr[0]), int(indptr[-1])
        rules.require(first == 0, f"kv_indptr begins with {first}", "it must begin with 0")
        listed = f"kv_indptr lists {many(last, 'page')}"
        rules.require(last <= len(indices), listed, f"kv_indices has {len(indices)}")
    rules.done()
    at = packed.places("kv_indptr", needed, len(indices))
    begins = torch.cat((indptr[:1], needed.cumsum(0)))
    return PageLists(begins, indices[indptr[at.sequence] + at.position], lengths - (needed - 1) * page_size, page_size)


class Parts(NamedTuple):
    """Names of a tensor with latent and rotary columns and of its two parts, and their widths."""

    whole: str
    latent: str
    rotary: str
    widths: tuple[int, int]


def _parts(given: Given, parts: Parts) -> list[Tensor]:
    """Return the two parts, each of rank 3, given separately, as a pair, or as one tensor."""
    names, whole = (parts.latent, parts.rotary), getattr(given, parts.whole)
    named = [getattr(given, name) for name in names]
    if whole is None:
        found = named
    elif any(x is not None for x in named):
        raise AttentionError(f"{parts.whole} is given beside {names[0]} or {names[1]}; it replaces both")
    elif is_tensor(whole) and whole.ndim and whole.shape[-1] == sum(parts.widths):
        found = list(whole.split(parts.widths, -1))
    else:
        found, names = whole, (f"{parts.whole}[0]", f"{parts.whole}[1]")
    if not isinstance(found, list | tuple) or len(found) != 2:
        widths = " and ".join(map(str, parts.widths))
        rule = f"it must be a tensor of {sum(parts.widths)} columns, or a pair of {widths}"
        raise AttentionError(f"{parts.whole} is {kind_of(found)}; {rule}")
    rules = Rules()
    for name, x, width in zip(names, found, parts.widths, strict=True):
        shape = f"has shape {tuple(x.shape)}" if is_tensor(x) else f"is {kind_of(x)}"
        fine = is_tensor(x) and x.ndim == 3 and x.shape[-1] == width
        rules.require(fine, f"{name} {shape}", f"it must be a tensor of rank 3 with {width} columns")
    rules.done()
    latent, rotary = found
    if latent.shape[:-1] != rotary.shape[:-1] or latent.device != rotary.device:
        what = f"{names[0]} has shape {tuple(latent.shape)} on {latent.device}, {names[1]} {tuple(rotary.shape)}"
        raise AttentionError(f"{what} on {rotary.device}; they must agree but for their columns")
    return list(found)


def _pages(given: Given, latents: Tensor, rotary: Tensor) -> PagedKV:
    """Return the cache: keys whose first columns are the values, or 8-bit latents with rotary parts."""
    tables = given.self.tables
    pages, _ = all_of(
        lambda: _joined(given, latents.unsqueeze(2), rotary.unsqueeze(2)), lambda: tables.check("the cache", latents)
    )
    return pages


def _joined(given: Given, latents: Tensor, rotary: Tensor) -> PagedKV:
    tables, rules = given.self.tables, Rules()
    if latents.dtype in EIGHT_BIT and rotary.dtype not in EIGHT_BIT:
        return LatentPages(latents, rotary, tables.table, tables.lengths, scale=_scale(given, latents))
    for name, x in {"ckv_scale": given.ckv_scale, "ckv_scale_arr": given.ckv_scale_arr}.items():
        rule = "it belongs to a ckv_cache of 8 bits beside a kpe_cache of 16"
        rules.require(x is None, f"{name} is {kind_of(x)}", rule)
    what = f"ckv_cache has dtype {latents.dtype} and kpe_cache {rotary.dtype}"
    fine = latents.dtype == rotary.dtype and latents.dtype not in EIGHT_BIT
    rules.require(fine, what, "they must have one dtype of 16 bits or more, or 8 bits and 16")
    rules.done()
    keys = joined(latents, rotary)
    return PagedKV(keys, keys[..., : latents.shape[-1]], tables.table, tables.lengths)


def _scale(given: Given, latents: Tensor) -> Tensor | None:
    """Return the scale of 8-bit latents (pages, rows, 1, columns): one number, or one per token (pages, rows)."""
    arr, shape = given.ckv_scale_arr, tuple(latents.shape[:2])
    if arr is None:
        return eight_bit_scale("ckv_scale", given, latents)
    if not is_tensor(arr) or tuple(arr.shape) != shape or given.ckv_scale is not None:
        rule = f"it must be a tensor {shape}, one for each token, without ckv_scale"
        raise AttentionError(f"ckv_scale_arr is {kind_of(arr)}; {rule}")
    return arr.unsqueeze(-1)
