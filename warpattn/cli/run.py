"""`run`: attention on tensors from a file, or on random ones, against the fp32 reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

from warpattn.api import attention
from warpattn.cli import spelling, tensors
from warpattn.reference import reference

ROUNDS = 5


def run(
    file: Annotated[
        Path | None, typer.Argument(help=".safetensors or .npz with q, k, v (batch, seq, heads, dim)")
    ] = None,
    shape: Annotated[str, typer.Option(help=f"Random q, k, v: {spelling.SHAPE_HELP}")] = "2x256x8x64",
    seed: Annotated[int, typer.Option(help="Seed of the random tensors")] = 0,
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = "full",
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[str | None, typer.Option(help=f"{spelling.DTYPE_HELP}; as in the file, else fp32 or bf16")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write out and lse: .safetensors or .npz")] = None,
) -> None:
    """Run attention on q, k, v from a file (or random ones) and compare with the fp32 reference."""
    if out:
        tensors.check_format(out)
    place = spelling.device(device)
    default = "fp32" if place.type == "cpu" else "bf16"
    kind = spelling.dtype(dtype) if dtype else None if file else spelling.dtype(default)
    loaded = tensors.load(file) if file else tensors.random(spelling.shape(shape), seed)
    q, k, v = (x.to(device=place, dtype=kind) for x in loaded)
    options = {"mask": spelling.mask(mask), "score": spelling.score(score, q.shape[2] if q.ndim == 4 else 1)}
    o, lse = attention(q, k, v, return_lse=True, **options)
    milliseconds = _median_ms(lambda: attention(q, k, v, **options), place)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"q {_size(q)}  k {_size(k)}  v {_size(v)}  {q.dtype} on {place}  mask {mask}  score {score or 'none'}"
    )
    expected, expected_lse = reference(q, k, v, **options)
    console.print(f"out  {_error(o, expected)}")
    console.print(f"lse  {_error(lse, expected_lse)}")
    console.print(f"time {milliseconds:.3f} ms (median of {ROUNDS})")
    if out:
        tensors.save(out, {"out": o, "lse": lse})
        console.print(f"wrote {out}")


def _error(found: Tensor, expected: Tensor) -> str:
    """Largest and root-mean-square difference from the reference; -inf on both sides is no difference."""
    difference = torch.where(found.float() == expected, 0.0, found.float() - expected).abs()
    rms, size = difference.square().mean().sqrt(), expected[expected.isfinite()].square().mean().sqrt()
    return f"largest error {difference.max():.2e}, rms {rms:.2e} (rms of the values {size:.2e})"


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median wall time of `call` in milliseconds, the GPU's work included."""
    times = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[ROUNDS // 2] * 1e3


def _size(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))
