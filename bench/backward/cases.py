"""The shapes that `bench.backward` times, their inputs, and their gradients in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from warpattn.masks import Causal, Mask, SlidingWindow
from warpattn.scores import ALiBi, Score, SoftCap
from warpattn.sequences import Dense, Ragged, Sequence

LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
DOCUMENTS = 32
GROUPS = (  # batch, sequence, query heads, key heads, causal: beside the required one of "groups"
    (1, 16384, 32, 8, True), (16, 1024, 64, 8, True), (8, 2048, 32, 8, True), (1, 32768, 28, 4, True),
    (4, 4096, 64, 8, False),
)  # fmt: skip
ROWS = 1024  # whose scores in fp32 exist at a time
KINDS = ("full", "causal", "window", "groups", "more-groups", "documents", "equal", "soft-cap", "alibi", "both")


@dataclass(frozen=True)
class Case:
    """One problem; `window`: keys that a row sees, None for all or, if causal, those before it. With `lengths`, batch
    is 1 and sequences are end to end. `both`: the forward is timed with its gradients."""

    batch: int
    seq: int
    heads: int
    dim: int
    causal: bool
    heads_kv: int | None = None
    window: int | None = None
    dim_v: int | None = None
    softcap: float | None = None
    alibi: bool = False
    lengths: tuple[int, ...] | None = None
    both: bool = False

    @property
    def name(self) -> str:
        """What it is in words."""
        kind = f"window-{self.window}" if self.window else "causal" if self.causal else "full"
        heads = f"{self.heads}" if self.heads_kv is None else f"{self.heads}/{self.heads_kv}"
        dims = f"{self.dim}" if self.dim_v is None else f"{self.dim}/{self.dim_v}"
        parts = [f"{self.batch}x{self.seq} heads {heads} dim {dims} {kind}"]
        if self.lengths:
            parts.append(f"{len(self.lengths)} {'equal' if len(set(self.lengths)) == 1 else 'packed'}")
        further = {"softcap": self.softcap, "alibi": self.alibi, "both": self.both}
        return " ".join([*parts, *(word for word, is_so in further.items() if is_so)])

    @property
    def value_dim(self) -> int:
        """Head dim of the values."""
        return self.dim_v or self.dim

    @property
    def kv(self) -> int:
        """Key heads."""
        return self.heads_kv or self.heads

    @cached_property
    def mask(self) -> Mask | None:
        """Its mask."""
        return SlidingWindow(self.window) if self.window else Causal() if self.causal else None

    def score(self, device: str | torch.device) -> Score | None:
        """Its score function with tensors on a device."""
        if self.alibi:
            return ALiBi(self.slopes(device))
        return SoftCap(self.softcap) if self.softcap else None

    def slopes(self, device: str | torch.device) -> Tensor:
        """2^(-8 (h + 1) / H) for head h."""
        return torch.exp2(-8 * torch.arange(1, self.heads + 1, device=device, dtype=torch.float32) / self.heads)

    def sequence(self, device: str | torch.device) -> Sequence:
        """Where its sequences are."""
        return Dense() if self.lengths is None else Ragged(self.offsets(device))

    def offsets(self, device: str | torch.device) -> Tensor:
        """(sequences + 1,) int32."""
        ends = torch.tensor([0, *(self.lengths or ())], device=device).cumsum(0)
        return ends.to(torch.int32)

    def flops(self) -> float:
        """Of five products, seven with the forward."""
        pairs = sum(n * min(self.window or n, n) for n in self.lengths or (self.seq,) * self.batch)
        columns = 3 * self.dim + 2 * self.value_dim + (self.dim + self.value_dim if self.both else 0)
        return 2.0 * self.heads * pairs * columns * (0.5 if self.causal and not self.window else 1.0)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Operands and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make(case: Case, device: str, seed: int = 0) -> Inputs:
    """Random bf16 inputs: (batch, seq, heads, dim), or (tokens, heads, dim)."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, dim: int) -> Tensor:
        rows = (case.batch, case.seq) if case.lengths is None else (case.seq,)
        return torch.randn((*rows, heads, dim), generator=generator, device=device, dtype=torch.bfloat16)

    return Inputs(
        draw(case.heads, case.dim),
        draw(case.kv, case.dim),
        draw(case.kv, case.value_dim),
        draw(case.heads, case.value_dim),
    )


Made = tuple[Tensor, Tensor, Tensor]


def errors(case: Case, x: Inputs, made: Made) -> list[float]:
    """Of dq, dk, dv of the first sequence and key head and of the last ones, relative to the largest true value."""
    found = [sample_errors(case, x, made, last) for last in (False, True)]
    return [max(pair) for pair in zip(*found, strict=True)]


def sample_errors(case: Case, x: Inputs, made: Made, last: bool) -> list[float]:
    """Of the first or last sequence and key head."""
    group = case.heads // case.kv
    kv_heads = slice(case.kv - 1, case.kv) if last else slice(0, 1)
    heads = slice(case.heads - group, case.heads) if last else slice(0, group)

    def taken(t: Tensor, at: slice) -> Tensor:
        """[heads, rows, dim] in fp32."""
        if case.lengths is None:
            rows = t[-1 if last else 0]
        else:
            length = case.lengths[-1 if last else 0]
            rows = t[-length:] if last else t[:length]
        return rows[:, at].float().transpose(0, 1)

    q, dout = taken(x.q, heads), taken(x.dout, heads)
    slopes = case.slopes(q.device)[heads] if case.alibi else None
    truth = gradients_in_fp32(case, (q, taken(x.k, kv_heads), taken(x.v, kv_heads)), dout, slopes)
    pairs = zip((taken(made[0], heads), taken(made[1], kv_heads), taken(made[2], kv_heads)), truth, strict=True)
    return [((t - want).abs().max() / want.abs().max()).item() for t, want in pairs]


def gradients_in_fp32(case: Case, qkv: Made, dout: Tensor, slopes: Tensor | None) -> Made:
    """Of one sequence and key head, in parts of the rows."""
    q, k, v = qkv
    dq, dk, dv = (torch.zeros_like(t) for t in qkv)
    at = torch.arange(q.shape[1], device=q.device)
    for start in range(0, q.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        leaves = [t.clone().requires_grad_() for t in (q[:, rows], k, v)]
        back = at[rows, None] - at[None, :]
        hidden = (back < 0) if case.causal or case.window else torch.zeros_like(back, dtype=torch.bool)
        hidden = hidden | (back >= case.window) if case.window else hidden
        s = (leaves[0] @ leaves[1].transpose(1, 2)) * case.dim**-0.5
        s = s if case.softcap is None else case.softcap * torch.tanh(s / case.softcap)
        s = s if slopes is None else s - slopes[:, None, None] * back.abs()
        out = s.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
        dq_rows, *more = torch.autograd.grad(out, leaves, dout[:, rows])
        dq[:, rows] = dq_rows
        dk += more[0]
        dv += more[1]
    return dq, dk, dv


def cases(dims: list[tuple[int, int | None]], kinds: list[str], only: str) -> list[Case]:
    """The required shapes: 16 heads of 128, 32 of 64, 8 of 256; those of head dims with one required speed are 4 x 4k;
    soft-cap and documents have a head dim of their own."""
    found = [case for dim, dim_v in dims for kind in kinds for case in _of_kind(kind, dim, dim_v)]
    return [case for case in dict.fromkeys(found) if any(part in case.name for part in only.split(","))]


def _of_kind(kind: str, dim: int, dim_v: int | None) -> Iterator[Case]:
    heads = 2048 // dim
    if kind in ("full", "causal"):
        for seq in LENGTHS if dim in (64, 128) else (4096,):
            yield Case(TOKENS // seq, seq, heads, dim, kind == "causal", dim_v=dim_v)
    elif kind == "window":
        yield Case(1, TOKENS, heads, dim, True, window=1024)
    elif kind == "groups":
        yield Case(4, 4096, 64, dim, True, heads_kv=8)
    elif kind == "more-groups":
        for batch, seq, q_heads, kv, causal in GROUPS:
            yield Case(batch, seq, q_heads, dim, causal, heads_kv=kv)
    elif kind == "documents":
        yield Case(1, TOKENS, heads, dim, True, lengths=document_lengths())
    elif kind == "equal":
        yield Case(1, TOKENS, heads, dim, True, lengths=(TOKENS // DOCUMENTS,) * DOCUMENTS)
    elif kind == "soft-cap":
        yield Case(4, 4096, 8, 256, True, softcap=50.0)
    else:
        yield Case(4, 4096, heads, dim, True, alibi=True, both=kind == "both")


def document_lengths() -> tuple[int, ...]:
    """DOCUMENTS lengths from 16 to 2,000 or so, 512 in the mean."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(DOCUMENTS).exponential_(generator=generator) + 0.03
    ends = (drawn.cumsum(0) * (TOKENS / drawn.sum())).round().int().tolist()
    return tuple(b - a for a, b in zip([0, *ends[:-1]], ends, strict=True))
