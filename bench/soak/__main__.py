"""Random serving for minutes: arrivals, chunked prefill, decode, finishes, pages reused; a sample is compared.

`python -m bench.soak --minutes 6` keeps up to 32 sequences in a cache of pages. Unused pages hold NaN, so any
read past a sequence's end shows. Every few steps one sequence's output is compared with the reference on the same
tensors. Ends with the number of steps of each kind, or with the first difference.

`python -m bench.soak --load` puts a card through what `load.py` lists instead: threads, processes, no memory, a lost
device; `--load threads` through one of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import warpattn as wa
from bench.measure.arguments import status
from bench.soak.load import PARTS, put_through

SLOTS, PAGES, MAX_PAGES = 32, 4096, 256
HEADS, KV_HEADS, DIM = 32, 8, 128
MASKS = (wa.Causal(), wa.SlidingWindow(300), wa.Causal() & wa.Chunked(512))
MOST_PLANNED = 16  # new tokens of a sequence
TOLERANCE = 2e-2  # absolute; values are standard normal, outputs bf16


@dataclass
class Server:
    """The cache and who uses it; slot b holds `lengths[b]` tokens, none if 0."""

    device: torch.device
    page: int
    chance: random.Random
    lengths: list[int] = field(default_factory=lambda: [0] * SLOTS)
    used: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    done: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        shape = (PAGES, self.page, KV_HEADS, DIM)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        self.free = list(range(PAGES))
        self.chance.shuffle(self.free)
        self.sinks = torch.randn(HEADS, device=self.device)

    def step(self) -> None:
        """One arrival with its prompt, one step of all sequences, or one finish."""
        idle = [b for b in range(SLOTS) if not self.lengths[b]]
        active = [b for b in range(SLOTS) if self.lengths[b]]
        if idle and (not active or self.chance.random() < 0.15):
            self.prefill(self.chance.choice(idle), self.chance.choice((1, 7, 130, 700, self.chance.randint(1, 2000))))
        elif self.chance.random() < 0.1:
            self.finish(self.chance.choice(active))
        else:
            self.decode(active, self.chance.choice((1, 1, 1, 2, 4)))

    def prefill(self, b: int, tokens: int) -> None:
        """A prompt in chunks, each attending to what the cache holds already."""
        while tokens:
            chunk = min(tokens, self.chance.choice((64, 256, 1000)))
            if not self.grow(b, chunk):
                return
            self.attend([b], chunk, self.chance.choice(MASKS), "chunks of prompts")
            tokens -= chunk

    def decode(self, active: list[int], tokens: int) -> None:
        """`tokens` new tokens of every sequence."""
        grown = [b for b in active if self.grow(b, tokens)]
        if grown:
            self.attend(grown, tokens, MASKS[0] if tokens > 1 else self.chance.choice(MASKS), "decode steps")

    def grow(self, b: int, tokens: int) -> bool:
        """Room for more tokens; a sequence for which there is none ends."""
        needed = -(-(self.lengths[b] + tokens) // self.page) - len(self.used[b])
        if len(self.used[b]) + needed > MAX_PAGES or needed > len(self.free):
            self.finish(b)
            return False
        self.used[b] += [self.free.pop() for _ in range(needed)]
        self.lengths[b] += tokens
        return True

    def finish(self, b: int) -> None:
        """Give a sequence's pages back, poisoned."""
        if self.used[b]:
            pages = torch.tensor(self.used[b], device=self.device)
            self.k[pages] = self.v[pages] = torch.nan
        self.free += self.used[b]
        self.lengths[b], self.used[b] = 0, []
        self.done["finished sequences"] += 1

    def cache(self, slots: Sequence[int]) -> wa.PagedKV:
        """The sequences of some slots; unused entries of the table point nowhere."""
        table = torch.full((len(slots), MAX_PAGES), 2**30, dtype=torch.int32)
        for row, b in enumerate(slots):
            table[row, : len(self.used[b])] = torch.tensor(self.used[b], dtype=torch.int32)
        lengths = torch.tensor([self.lengths[b] for b in slots], dtype=torch.int32)
        return wa.PagedKV(self.k, self.v, table.to(self.device), lengths.to(self.device))

    def attend(self, slots: list[int], tokens: int, mask: wa.Mask, what: str) -> None:
        """Append new keys and values, attend, and compare one sequence now and then."""
        kv = self.cache(slots)
        draw = {"dtype": torch.bfloat16, "device": self.device}
        q = torch.randn(len(slots), tokens, HEADS, DIM, **draw)
        new = [torch.randn(len(slots), tokens, KV_HEADS, DIM, **draw) for _ in range(2)]
        plan = None
        if tokens <= MOST_PLANNED and self.chance.random() < 0.3:  # made first, so that appending directly precedes
            plan = wa.DecodePlan(q, kv, mask=mask, sinks=self.sinks, kv_ready_before_dependency=True)
            self.done["of them planned, with a settled cache"] += 1
        wa.append_paged(kv.k_pages, kv.v_pages, kv.block_table, kv.lengths, *new)
        out = wa.attention_paged(q, kv, mask=mask, sinks=self.sinks) if plan is None else plan(q, kv)
        self.done[what] += 1
        self.done["tokens"] += tokens * len(slots)
        if self.chance.random() < 0.2:
            self.compare(q, out, slots, mask)

    def compare(self, q: Tensor, out: Tensor, slots: list[int], mask: wa.Mask) -> None:
        """One sequence against the reference; raises on a difference."""
        i = self.chance.randrange(len(slots))
        alone = self.cache([slots[i]])
        wanted = wa.attention_paged(q[i : i + 1], alone, mask=mask, sinks=self.sinks, backend="reference")
        error = (out[i : i + 1].float() - wanted.float()).abs().max().item()
        self.done["compared"] += 1
        if not error <= TOLERANCE:
            what = f"slot {slots[i]} of {len(slots)}, {q.shape[1]} tokens, {self.lengths[slots[i]]} keys, {mask}"
            raise SystemExit(f"difference {error} after {dict(self.done)}: {what}, pages of {self.page}")


def under_load(parts: Sequence[str], seconds: float) -> int:
    """Put the card through parts of the load; the exit status is 0 if all is as it should be."""
    if not torch.cuda.is_available():
        raise SystemExit("--load needs a card, and this machine has none")
    right = True
    for part in parts:
        verdict = put_through(part, seconds)
        right &= verdict.right
        print(f"{part}: {'right' if verdict.right else 'WRONG'}; {verdict.said}", flush=True)
    return 0 if right else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the time is over; the exit status is 0 if no comparison differed."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", nargs="*", choices=[*PARTS, "lost"], help="instead: what load.py lists, or a part")
    args = parser.parse_args(argv)
    if args.load is not None:
        return under_load(args.load or PARTS, 60 * args.minutes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    chance = random.Random(args.seed)
    servers = [Server(device, page, chance) for page in (16, 64)]
    end, steps = time.monotonic() + 60 * args.minutes, 0
    with torch.no_grad():
        while time.monotonic() < end:
            servers[steps % len(servers)].step()
            steps += 1
    total = sum((server.done for server in servers), Counter())
    counts = ", ".join(f"{count} {what}" for what, count in total.items())
    print(f"{steps} steps in {args.minutes:g} minutes on {device}, seed {args.seed}: {counts}; no comparison differed")
    return 0


if __name__ == "__main__":
    sys.exit(status(main))
