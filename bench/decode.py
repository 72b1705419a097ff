"""Times decode steps in bytes of K and V per second: `python3 -m bench.decode --peers warpattn,cudnn --json FILE`.

One query token a sequence, keys dense or in shuffled pages, every call in a CUDA graph, peers interleaved as in
`bench.run`. A variant of the kernel is a peer of its own: `--variant ctas=2 --variant block_n=64,stages=6` times the
chosen configuration and these fields beside it. Inputs are rotated until they are four times as large as L2 of an H200,
so that reading is what is timed. Without a GPU, a few small cases run with the reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import record, timing
from bench.inputs import default_device
from bench.peers.adapter import Unsupported, cannot_import, first_line, no_gpu, version_of

OWN = "warpattn"
COLD = 240 << 20  # bytes of inputs used in turn
MAX_SETS = 12
FLASHINFER_WORKSPACE = 256 << 20
LATENT = (576, 512)  # head dims of latent attention

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """One decode step: the lengths of its sequences, heads, and the page size (0: dense)."""

    name: str
    lengths: tuple[int, ...]
    heads_q: int
    heads_kv: int
    page: int = 0
    tokens: int = 1
    dim: int = 128
    dtype: str = "bfloat16"
    dim_v: int = 0  # in latent attention (MLA, absorbed): the values are these first columns of the keys

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def even(self) -> bool:
        """Whether all sequences are equally long."""
        return len(set(self.lengths)) == 1

    def bytes(self) -> int:
        """Bytes of the keys and values that are read, latents once."""
        return 2 * (1 if self.dim_v else 2) * sum(self.lengths) * self.heads_kv * self.dim


@dataclass(frozen=True)
class Inputs:
    """q (B, T, Hq, D); k, v (B, S, Hkv, D), or pages (N, page, Hkv, D) with their table; lengths (B,)."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    lengths: Tensor

    def sequence(self, b: int) -> tuple[Tensor, Tensor]:
        """Keys and values (S, Hkv, D) of one sequence."""
        length = self.case.lengths[b]
        if self.table is None:
            return self.k[b, :length], self.v[b, :length]
        used = self.table[b, : -(-length // self.case.page)].long()
        return self.k[used].flatten(0, 1)[:length], self.v[used].flatten(0, 1)[:length]


def cases() -> tuple[Case, ...]:
    """The rows that are required on a card: dense, then through pages of 16 and 64, then mixed lengths; and latent
    attention with 16 query heads (a model over 8 cards) and 128."""
    shapes = [
        (32, 16, 32, 8), (128, 4, 32, 8), (64, 8, 64, 8), (16, 8, 32, 32), (32, 4, 32, 8), (8, 8, 32, 8),
        (1, 128, 32, 8), (1, 16, 32, 8),
    ]  # fmt: skip
    found = []
    for page in (0, 16, 64):
        kind = f"page{page}" if page else "dense"
        for batch, seq, heads, kv in shapes:
            found.append(Case(f"{kind}-{batch}x{seq}k-{heads}/{kv}", (seq * 1024,) * batch, heads, kv, page))
    ranks = [1 + (37 * i) % 64 for i in range(64)]  # in an order that is no order
    for name, power in (("mixed64", 1.0), ("skewed64", 2.5)):  # Zipf's law from 32 Ki down to 512 and to 1
        lengths = tuple(int(32768 / rank**power) for rank in ranks)
        found += [Case(f"page{page}-{name}", lengths, 32, 8, page) for page in (16, 64, 256)]
    for batch, seq, heads in ((128, 4, 16), (32, 16, 16), (1, 64, 16), (128, 4, 128), (32, 16, 128), (1, 64, 128)):
        name = f"mla-{batch}x{seq}k-{heads}"
        found.append(Case(name, (seq * 1024,) * batch, heads, 1, 64, dim=LATENT[0], dim_v=LATENT[1]))
    return tuple(found)


def smoke_cases() -> tuple[Case, ...]:
    """Small ones for a CPU."""
    return (
        Case("smoke-dense", (512, 512), 8, 2, dim=64),
        Case("smoke-page16", (300, 77, 1), 8, 2, 16, dim=64),
        Case("smoke-mla", (130, 7), 16, 1, 64, dim=LATENT[0], dim_v=LATENT[1]),
    )


def make(case: Case, device: torch.device, seed: int) -> Inputs:
    """Random inputs; pages lie in random order."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    q = draw(case.batch, case.tokens, case.heads_q, case.dim)
    if not case.page:
        shape = (case.batch, max(case.lengths), case.heads_kv, case.dim)
        return Inputs(case, q, *keys_and_values(case, draw, *shape), None, lengths)
    counts = [-(-length // case.page) for length in case.lengths]
    order = torch.randperm(sum(counts), generator=generator, device=device).to(torch.int32)
    table = torch.zeros(case.batch, max(counts), dtype=torch.int32, device=device)
    for b, pages in enumerate(order.split(counts)):
        table[b, : len(pages)] = pages
    shape = (sum(counts), case.page, case.heads_kv, case.dim)
    return Inputs(case, q, *keys_and_values(case, draw, *shape), table, lengths)


def keys_and_values(case: Case, draw: Callable[..., Tensor], *shape: int) -> tuple[Tensor, Tensor]:
    """Keys of a shape and values of their own, or their first columns."""
    k = draw(*shape)
    return k, k[..., : case.dim_v] if case.dim_v else draw(*shape)


def own_call(x: Inputs, fields: dict[str, int]) -> Call:
    """The decode kernel with `fields` of its configuration set, bound once; on a CPU the public call."""
    import warpattn as wa
    from warpattn.problem import Call as Asked
    from warpattn.problem import examine
    from warpattn.sequences import Dense, PagedKV

    sequence = Dense() if x.table is None else PagedKV(x.k, x.v, x.table, x.lengths)
    if x.q.device.type == "cpu":
        if isinstance(sequence, PagedKV):
            return lambda: wa.attention_paged(x.q, sequence)
        return lambda: wa.attention(x.q, x.k, x.v)

    from warpattn import cuda, dispatch
    from warpattn.kernels.sm90 import decode_steps
    from warpattn.kernels.sm90.decode_config import deepest
    from warpattn.operands import Operands
    from warpattn.target import ARCHS

    ready = examine(Asked(x.q, x.k, x.v, sequence, backend="reference"), read_values=False)
    fields = dict(fields)
    grid = fields.pop("grid", 0)
    choice = decode_steps.choose(ready.problem, ARCHS["sm90"], ctas=fields.pop("ctas", None),
                                 batch_invariant=bool(fields.pop("invariant", 0)))  # fmt: skip
    choice = replace(choice, grid=(grid,)) if grid else choice
    config = replace(choice.config, **fields)
    config = config if "stages" in fields else replace(config, stages=deepest(config))
    out = x.q.new_empty((*x.q.shape[:-1], x.v.shape[-1]))
    operands = Operands(x.q, x.k, x.v, out, None, None)
    steps = decode_steps.steps(ready, operands, sequence, replace(choice, config=config))
    device = x.q.get_device()
    bound = [dispatch.load(step, device).bind(step.args) for step in steps]

    def call() -> Tensor:
        for launch, step in zip(bound, steps, strict=True):
            launch.launch(step.grid, cuda.current_stream(device))
        return out

    return call


def cudnn_call(x: Inputs) -> Call:
    """torch's SDPA with cuDNN, on equal lengths in one piece."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if x.table is not None or not x.case.even or x.case.tokens > 1 or x.case.dim_v:
        raise Unsupported("torch's SDPA takes one token and dense keys of one length")
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=x.case.heads_q > x.case.heads_kv)
        return out.transpose(1, 2)

    return call


def flashinfer_call(x: Inputs, tensor_cores: bool) -> Call:
    """FlashInfer's batch decode through pages."""
    import flashinfer

    case = x.case
    if x.table is None or case.tokens > 1:
        raise Unsupported("its batch decode takes one token and pages")
    if case.dim_v:
        return flashinfer_latent_call(x, x.table, "fa3" if tensor_cores else "fa2")
    counts = [-(-length // case.page) for length in case.lengths]
    host = torch.tensor([0, *counts], dtype=torch.int32)
    pages = torch.cat([x.table[b, :count] for b, count in enumerate(counts)])
    last = torch.tensor([(length - 1) % case.page + 1 for length in case.lengths], dtype=torch.int32)
    buffer = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=x.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        host.cumsum(0).to(torch.int32).to(x.q.device), pages, last.to(x.q.device), case.heads_q, case.heads_kv,
        case.dim, case.page, q_data_type=x.q.dtype, kv_data_type=x.k.dtype,
    )  # fmt: skip
    q = x.q.flatten(0, 1)
    return lambda: wrapper.run(q, (x.k, x.v)).view_as(x.q)


def flashinfer_latent_call(x: Inputs, table: Tensor, backend: str) -> Call:
    """FlashInfer's latent attention, with latents and rotary parts in caches of their own as it wants them."""
    import flashinfer

    case = x.case
    counts = [-(-length // case.page) for length in case.lengths]
    buffer = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=x.q.device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(buffer, backend=backend)
    queries = torch.arange(case.batch + 1, dtype=torch.int32, device=x.q.device)
    pages = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(x.q.device, torch.int32)
    used = torch.cat([table[b, :count] for b, count in enumerate(counts)])
    wrapper.plan(
        queries, pages, used, x.lengths, case.heads_q, case.dim_v, case.dim - case.dim_v, case.page, False,
        case.dim**-0.5, x.q.dtype, x.k.dtype,
    )  # fmt: skip
    q, k = x.q.flatten(0, 1), x.k.flatten(2)
    parts = [part.contiguous() for y in (q, k) for part in (y[..., : case.dim_v], y[..., case.dim_v :])]
    return lambda: wrapper.run(*parts).unsqueeze(1)


@dataclass(frozen=True)
class Peer:
    """A name, how to make a call, why it cannot run here (or None), and its version."""

    name: str
    prepare: Callable[[Inputs], Call]
    reason: str | None
    version: str


def peers(names: Sequence[str], variants: Sequence[str]) -> list[Peer]:
    """The peers of these names, and warpattn's variants."""
    own = version_of("warpattn", "triton")
    infer = no_gpu() or cannot_import("flashinfer")
    known = {
        OWN: Peer(OWN, lambda x: own_call(x, {}), None, own),
        "cudnn": Peer("cudnn", cudnn_call, no_gpu(), f"cuDNN {torch.backends.cudnn.version()}"),
        "flashinfer": Peer("flashinfer", lambda x: flashinfer_call(x, False), infer, version_of("flashinfer-python")),
        "flashinfer-tc": Peer(
            "flashinfer-tc", lambda x: flashinfer_call(x, True), infer, version_of("flashinfer-python")
        ),
    }
    found = [known[name] for name in names]
    for text in variants:
        fields = {key: int(value) for key, value in (part.split("=") for part in text.split(","))}
        found.append(Peer(f"{OWN}:{text}", lambda x, fields=fields: own_call(x, fields), no_gpu(), own))
    return found


def expected(x: Inputs) -> tuple[Tensor, float]:
    """(fp32 output, largest error that counts as right: twice that of the same in the case's dtype, and rounding)."""
    outs = [(_attend(x, b, torch.float32), _attend(x, b, x.q.dtype)) for b in range(x.case.batch)]
    out = torch.stack([exact for exact, _ in outs])
    same = (torch.stack([rough for _, rough in outs]).float() - out).abs().max().item()
    rounding = (out.to(x.q.dtype).float() - out).abs().max().item()
    return out, 2 * same + 2 * rounding


def _attend(x: Inputs, b: int, dtype: torch.dtype) -> Tensor:
    """softmax(q·kᵀ/√D)·v of one sequence in `dtype`; (T, Hq, D). One token sees every key."""
    k, v = (t.to(dtype).transpose(0, 1) for t in x.sequence(b))  # (Hkv, S, D)
    heads = (x.case.heads_kv, x.case.heads_q // x.case.heads_kv)
    q = (x.q[b].to(dtype) * x.case.dim**-0.5).unflatten(1, heads).permute(1, 2, 0, 3).flatten(1, 2)  # (Hkv, G·T, D)
    out = (q @ k.mT).softmax(-1) @ v
    return out.unflatten(1, (heads[1], x.case.tokens)).permute(2, 0, 1, 3).flatten(1, 2)


def run_case(case: Case, usable: Sequence[Peer], rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times every peer on one case; one entry of the record's `cases`."""
    device = default_device()
    sets = min(MAX_SETS, max(1, -(-COLD // case.bytes()))) if device.type == "cuda" else 1
    inputs = [make(case, device, seed + i) for i in range(sets)]
    want, limit = expected(inputs[0])
    results: dict[str, dict[str, Any]] = {}
    samples: dict[str, timing.Sample] = {}
    for peer in usable:
        result = results[peer.name] = {"status": "timed", "reason": None, "error": None, "speed": None}
        try:
            calls = [peer.prepare(x) for x in inputs]
            result["error"] = (calls[0]().float() - want).abs().max().item()
            if not result["error"] <= limit:  # also refuses NaN
                result |= {"status": "wrong", "reason": f"largest error {result['error']:.3g}, allowed {limit:.3g}"}
                continue
            samples[peer.name] = timing.sample(calls, device)
        except Unsupported as error:
            result |= {"status": "unsupported", "reason": str(error)}
        except Exception as error:  # a broken peer is a line in the report, not the end of the run
            result |= {"status": "failed", "reason": first_line(error)}
    times = timing.interleave(samples, rounds, seed)
    for name, taken in times.items():
        ratio = timing.paired_ratio(taken, times[OWN]).asdict() if OWN in times and name != OWN else None
        summary = timing.Summary.of(taken)
        results[name] |= {
            "mode": samples[name].mode, "note": samples[name].note, "calls": samples[name].calls,
            "ms": summary.asdict(), "tb_s": case.bytes() / (summary.median * 1e9), "speed": ratio,
        }  # fmt: skip
    group = "mla" if case.dim_v else "decode"
    return {"group": group, "case": asdict(case), "bytes": case.bytes(), "sets": sets, "results": results}


def render(found: record.Record) -> str:
    """A line for every case and peer: microseconds, TB/s, and how many times warpattn's time it took."""
    lines = [f"{'case':<24}{'peer':<28}{'us':>10}{'TB/s':>8}{'x own':>8}"]
    for entry in found["cases"]:
        for name, result in entry["results"].items():
            head = f"{entry['case']['name']:<24}{name:<28}"
            if "ms" not in result:
                lines.append(f"{head}  {result['status']}: {result['reason']}")
                continue
            ratio = f"{result['speed']['median']:8.3f}" if result["speed"] else ""
            lines.append(f"{head}{1000 * result['ms']['median']:10.2f}{result['tb_s']:8.3f}{ratio}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if warpattn was wrong or failed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _arguments(argv)
    found = record.start("bench.decode", argv, {"rounds": args.rounds, "seed": args.seed})
    usable = []
    for peer in peers(args.peers.split(","), args.variant):
        available = peer.reason is None
        found["peers"][peer.name] = {"available": available, "reason": peer.reason, "version": peer.version}
        usable += [peer] if available else []
    for case in cases() if torch.cuda.is_available() else smoke_cases():
        if args.only not in case.name:
            continue
        found["cases"].append(run_case(case, usable, args.rounds, args.seed))
        if args.json is not None:
            record.write(found, args.json)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(render(found), flush=True)
    status = [result["status"] for entry in found["cases"] for name, result in entry["results"].items() if OWN in name]
    return int(any(word in ("wrong", "failed") for word in status))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    every = f"{OWN},cudnn,flashinfer,flashinfer-tc"
    parser.add_argument("--peers", default=every, help=f"of {every}; default all")
    parser.add_argument("--variant", action="append", default=[], help="fields of the configuration, such as ctas=2")
    parser.add_argument("--only", default="", help="keep only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=20, help="recorded rounds per case")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and the order within a round")
    parser.add_argument("--json", type=Path, help="write the record here (after every case)")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
