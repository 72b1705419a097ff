"""Times attention over several cards: `python -m bench.distributed --ranks 2 --rounds 5 --json FILE`.

One process per card, started here. Every round takes one sample of each call of a group, in turn, between barriers:
one card alone on half of the sequence, then rings, Ulysses and torch's context parallelism over cuDNN on all of it. A
sample's time is the slowest rank's, of as many calls as make the samples of a group equally long: a card holds its
highest clock for some tens of milliseconds. TFLOP/s are one card's: 4·B·H·Sq·Sk·D forward, 3.5 times that with the
backward, and half of it since the calls are causal. Values are compared before anything is timed. Without cards it
runs small on gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import warpattn as wa
import warpattn.distributed as wad
from bench.measure import record
from bench.measure.arguments import status
from bench.peers.adapter import first_line
from warpattn.distributed.exchange import pass_on
from warpattn.distributed.ranks import ranks_of

DIM = 128
ERROR = 2e-2  # of the largest value, in bf16
CAUSAL = wa.Causal()
HEADS = ((16, 16), (32, 8))

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A causal call: `tokens` of the whole sequence, which `cards` share."""

    way: str
    tokens: int
    heads: int
    heads_kv: int
    backward: bool
    cards: int

    @property
    def name(self) -> str:
        what = "forward and backward" if self.backward else "forward"
        return f"{self.way}, {self.tokens} tokens, {self.heads}/{self.heads_kv} heads, {what}"

    def flops(self) -> float:
        """Of one card."""
        forward = 2.0 * self.heads * self.tokens**2 * DIM / self.cards
        return forward * (3.5 if self.backward else 1.0)


def draw(rows: int, heads: int, seed: int) -> Tensor:
    """A random bf16 operand on this rank's device."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn((1, rows, heads, DIM), generator=generator, device=device(), dtype=torch.bfloat16)


def device() -> torch.device:
    """This rank's card, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def operands(case: Case) -> list[Tensor]:
    """q, k, v and dout of a rank; which rows they are does not matter to the time."""
    heads = (case.heads, case.heads_kv, case.heads_kv, case.heads)
    return [draw(case.tokens // case.cards, n, 4 * dist.get_rank() + i) for i, n in enumerate(heads)]


@contextmanager
def ours(case: Case) -> Iterator[Call]:
    """A call of this package: on one card, in a ring, or with heads exchanged for rows."""
    attend: Any = {"one card": wa.attention, "ring": wad.ring_attention, "ulysses": wad.ulysses_attention}[case.way]
    q, k, v, dout = operands(case)
    leaves = [x.requires_grad_(case.backward) for x in (q, k, v)]

    def call() -> object:
        out = attend(*leaves, mask=CAUSAL)
        return torch.autograd.grad(out, leaves, dout) if case.backward else out

    yield call


@contextmanager
def cudnn(case: Case) -> Iterator[Call]:
    """torch's context_parallel over cuDNN."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    whole = [torch.cat([x.transpose(1, 2)] * case.cards, 2) for x in operands(case)]
    mesh = dist.device_mesh.init_device_mesh(device().type, (case.cards,))
    backend = SDPBackend.CUDNN_ATTENTION if device().type == "cuda" else SDPBackend.FLASH_ATTENTION
    with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * 4, no_restore_buffers=set(whole)):
        *leaves, dout = (x.detach() for x in whole)  # this rank's parts now
        leaves = [x.requires_grad_(case.backward) for x in leaves]

        def call() -> object:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
                return torch.autograd.grad(out, leaves, dout) if case.backward else out

        yield call


WAYS = {"one card": ours, "ring": ours, "ulysses": ours, "torch and cuDNN": cudnn}


def groups(tokens: int, cards: int) -> list[list[Case]]:
    """What is timed in turn."""
    made = []
    for heads in HEADS:
        for backward in (False, True):
            case = partial(Case, heads=heads[0], heads_kv=heads[1], backward=backward)
            over = [case("ring", tokens, cards=cards), case("ulysses", tokens, cards=cards)]
            made.append([case("one card", tokens // 2, cards=1), case("ring", tokens // 2, cards=cards), *over])
            if heads[0] == heads[1]:
                made.append([case("torch and cuDNN", tokens, cards=cards), over[0]])
    return made


def longer(tokens: int, cards: int) -> list[Case]:
    """What is called once more on twice the tokens, for its memory."""
    ways = [(way, *heads, backward) for way in ("ring", "ulysses") for heads in HEADS for backward in (False, True)]
    return [Case(way, 2 * tokens, heads, heads_kv, backward, cards) for way, heads, heads_kv, backward in ways]


def sample(call: Call, calls: int = 1) -> float:
    """Milliseconds of a call on the slowest rank."""
    card = torch.cuda.is_available()
    if card:
        torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if card:
        torch.cuda.synchronize()
    took = torch.tensor([(time.perf_counter() - begin) * 1e3 / calls], device=device())
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def run_group(cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    """Time the cases in turn; entries of the record. What fails says so and is left out, on every rank."""
    entries: list[dict[str, Any]] = []
    with ExitStack() as stack:
        calls: dict[Case, Call] = {}
        for case in cases:
            found: dict[str, Any] = {"status": "timed"}
            try:
                call = stack.enter_context(WAYS[case.way](case))
                for _ in range(2):
                    call()
                calls[case] = call
            except Exception as error:
                found = {"status": "failed", "reason": first_line(error)}
            entries.append({"group": "distributed", "case": asdict(case) | {"name": case.name}, "results": found})
        times: dict[Case, list[float]] = {case: [] for case in calls}
        longest = max((case.flops() for case in calls), default=1.0)
        for _ in range(rounds):
            for case, call in calls.items():
                times[case].append(sample(call, round(longest / case.flops())))
        for case, entry in zip(cases, entries, strict=True):
            if case in calls:
                ms = statistics.median(times[case])
                entry["results"] |= {"ms": ms, "all_ms": times[case], "tflops": case.flops() / ms / 1e9}
                entry["results"] |= {"memory_gib": peak_memory(calls[case])}
            say(line(entry))
    return entries


def peak_memory(call: Call) -> float | None:
    """GiB that a call takes beyond what is there before it, on this rank."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def compare(tokens: int) -> dict[str, float]:
    """Largest error of output and gradients over ranks against one card, relative to the largest value."""
    q, k, v, dout = (draw(tokens, n, seed).requires_grad_() for seed, n in enumerate((16, 4, 4, 16)))
    out = wa.attention(q, k, v, mask=CAUSAL)
    wanted = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    worst = {}
    for way in (wad.ring_attention, wad.ulysses_attention):
        parts = [wad.shard(x.detach(), 1).requires_grad_() for x in (q, k, v)]
        out = way(*parts, mask=CAUSAL)
        found = [out.detach(), *torch.autograd.grad(out, parts, wad.shard(dout.detach(), 1))]
        errors = [
            ((x.float() - wad.shard(w, 1).float()).abs().max() / w.float().abs().max()).item()
            for x, w in zip(found, wanted, strict=True)
        ]
        worst[way.__name__] = max(errors)
    return worst


def link(megabytes: int = 512) -> float:
    """GB/s in each direction between neighbours that exchange at once."""
    x = torch.empty(megabytes * 2**20 // 2, dtype=torch.bfloat16, device=device())
    ms = min(sample(lambda: pass_on([x], ranks_of(None)).wait(), 4) for _ in range(3))
    return x.numel() * 2 / ms / 1e6


def decode(tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one query over one long sequence: on one card, and on pages that all cards share."""
    size, heads, heads_kv = 64, 32, 8
    columns = tokens // size
    q = draw(1, heads, 0)
    pages = [draw(columns * size, heads_kv, seed).view(columns, size, heads_kv, DIM) for seed in (1, 2)]
    table = torch.arange(columns, dtype=torch.int32, device=device())[None]
    kv = wa.PagedKV(*pages, table, torch.tensor([tokens], dtype=torch.int32, device=device()))
    shared = wad.share_pages(kv)
    ways = {"one card": lambda: wa.attention_paged(q, kv), "shared": lambda: wad.paged_attention(q, shared)}
    calls: dict[str, Call] = {name: graphed(call) for name, call in ways.items()}
    error = (ways["one card"]() - ways["shared"]()).abs().max().item()
    times = {name: [sample(call, 20) for _ in range(rounds)] for name, call in calls.items()}
    return {name: statistics.median(all_ms) for name, all_ms in times.items()} | {"error": error}


def graphed(call: Call) -> Call:
    """The call as a CUDA graph, as engines run it."""
    call()
    if not torch.cuda.is_available():
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def compile_one(heads: tuple[int, int], causal: bool, backward: bool) -> None:
    """Fill the disk cache with the kernels of a case."""
    each = (heads[0], heads[1], heads[1])
    q, k, v = (torch.randn(1, 8192, n, DIM, device="cuda", dtype=torch.bfloat16) for n in each)
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    out, _ = wa.attention(*leaves, mask=CAUSAL if causal else None, return_lse=True)
    if backward:
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def compile_all() -> None:
    """All kernels at once, in processes of their own."""
    kinds = [(heads, causal, backward) for heads in HEADS for causal in (True, False) for backward in (True, False)]
    code = "import sys; from bench.distributed.__main__ import compile_one, partial, status; "
    code += "sys.exit(status(partial(compile_one, *eval(sys.argv[1]))))"
    started = [subprocess.Popen([sys.executable, "-c", code, repr(kind)]) for kind in kinds]
    for process in started:
        process.wait()


def say(text: str) -> None:
    """Print once, not on every rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def line(entry: dict[str, Any]) -> str:
    """One line of the table."""
    found = entry["results"]
    if found["status"] != "timed":
        return f"{entry['case']['name']:64} {found['status']}: {found['reason']}"
    memory = "" if found["memory_gib"] is None else f"{found['memory_gib']:7.2f} GiB"
    return f"{entry['case']['name']:64} {found['ms']:9.3f} ms {found['tflops']:6.0f} TFLOP/s {memory}"


def rank_main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Everything, on one rank."""
    card = torch.cuda.is_available()
    if card:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    options = {"device_id": device()} if card else {}
    dist.init_process_group("nccl" if card else "gloo", **options)
    cards = dist.get_world_size()
    found = record.start("bench.distributed", argv, {"rounds": args.rounds, "ranks": cards, "tokens": args.tokens})
    errors = compare(min(args.tokens, 8192))
    say(f"errors against one card: {errors}")
    found |= {"errors": errors, "link_gb_s": link(512 if card else 1)}
    say(f"link: {found['link_gb_s']:.0f} GB/s in each direction")
    for cases in groups(args.tokens, cards):
        found["cases"] += run_group(cases, args.rounds)
        write(found, args.json)
    for case in longer(args.tokens, cards):
        found["cases"] += run_group([case], 1)
    try:
        found["decode"] = decode(args.decode, args.rounds)
    except Exception as error:
        found["decode"] = {"reason": first_line(error)}
    say(f"decode of {args.decode} tokens, ms: {found['decode']}")
    write(found, args.json)
    dist.destroy_process_group()
    return int(max(errors.values()) > ERROR)


def write(found: dict[str, Any], path: Path | None) -> None:
    """Keep what there is so far."""
    if dist.get_rank() == 0:
        record.save(found, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Start one process per rank, or be one of them; 1 if values were wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    card = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m bench.distributed", description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if card else 2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=131072 if card else 256)
    parser.add_argument("--decode", type=int, default=1 << 20 if card else 512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        return rank_main(args, argv)
    if card:
        compile_all()
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    return subprocess.run([*run, "-m", "bench.distributed", *argv]).returncode


if __name__ == "__main__":
    sys.exit(status(main))
