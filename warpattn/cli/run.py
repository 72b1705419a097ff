"""`run`: runs attention on tensors from a file or on random ones, and compares it with another computation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from torch import Tensor

from warpattn.api import attention
from warpattn.cli import independent, spelling, tensors
from warpattn.cli.progress import working
from warpattn.cli.training import kernels
from warpattn.errors import AttentionError
from warpattn.inputs import kind_of
from warpattn.problem import Call
from warpattn.quantized import EIGHT_BIT, Quantized, quantize
from warpattn.reference import reference
from warpattn.sequences import Dense

SHAPE = "2x256x8x64"
ROUNDS = 5
ENOUGH_S = 2.0  # of timing: a call that takes longer is timed once


class Times(NamedTuple):
    """Median of the wall times of a call, and how many there were."""

    milliseconds: float
    rounds: int


def run(
    file: Annotated[
        Path | None, typer.Argument(help=".safetensors or .npz with q, k, v (batch, seq, heads, dim)")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"Random q, k, v: {spelling.SHAPE_HELP}; {SHAPE} without a file")
    ] = None,
    seed: Annotated[int | None, typer.Option(help=f"{spelling.SEED_HELP}; 0 without a file")] = None,
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = "full",
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[
        str | None, typer.Option(help=f"{spelling.RUN_DTYPE_HELP}; without: the file's, or fp32 (card: bf16)")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help=f"8-bit keys and values: {spelling.STORED_HELP}")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write out and lse: .safetensors or .npz")] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="Also the gradients of q, k and v for a random gradient of out")
    ] = False,
) -> None:
    """Run attention on q, k, v from a file, or random ones, and compare the result.

    A card's kernels are compared with the reference in fp32, the reference on a CPU with torch's softmax in fp64."""
    if out is not None:
        tensors.check_format(out)
        tensors.check_writable(out, file)
    _refuse_idle(file, {"--shape": shape, "--seed": seed}, (dtype, kv_dtype), backward)
    place = spelling.device(device)
    default = "fp32" if place.type == "cpu" else "bf16"
    products, shown = dtype is not None and dtype in spelling.STORED, dtype
    if products:
        kv_dtype, dtype = str(dtype), "bf16"
    kind = _dtype(default if dtype is None and not file else dtype)
    made, size, start = spelling.mask(mask), spelling.shape(SHAPE if shape is None else shape), spelling.seed(seed or 0)
    stored = spelling.stored(kv_dtype)
    loaded = tensors.load(file) if file else tensors.random(size, start)
    q, k, v = (x.to(device=place, dtype=kind) for x in loaded)
    options: dict[str, Any] = {"mask": made, "score": spelling.score(score, q.shape[2] if q.ndim == 4 else 1)}
    over = str(shown) if products else f"{q.dtype}{f' over {kv_dtype}' if kv_dtype else ''}"
    _refuse_narrow(file, (q, k, v), backward)
    given: list[Any] = [q, k, v]
    if stored is not None:
        names = zip("qkv", given, strict=True)
        given = [x if x is q and not products else _in_eight_bits(name, x, stored) for name, x in names]
        q, k, v = (x.dequantized() if isinstance(x, Quantized) else x for x in given)
    with working(f"attention on {place}"):
        o, lse = attention(*given, return_lse=True, **options)
        times = timed(lambda: attention(*given, **options), place)
    on_cpu = place.type == "cpu"
    truth = "torch's softmax in fp64" if on_cpu else "the fp32 reference"
    with working(f"comparing with {truth}"):
        expected, expected_lse = independent.attention(q, k, v, **options) if on_cpu else reference(q, k, v, **options)
    console = Console(highlight=False, soft_wrap=True)
    sizes = f"q {_size(q)}  k {_size(k)}  v {_size(v)}"
    console.print(f"{sizes}  {over} on {place}  mask {mask}  score {score or 'none'}")
    console.print(f"{'the reference' if on_cpu else 'the kernel'}, compared with {truth}:")
    console.print(f"out  {_error(o, expected)}")
    console.print(f"lse  {_error(lse, expected_lse)}")
    console.print(f"time {times.milliseconds:.3f} ms ({'once' if times.rounds == 1 else f'median of {times.rounds}'})")
    gradients = _gradients(console, Call(q, k, v, Dense(), **options)) if backward else {}
    if out is not None:
        tensors.save(out, {"out": o, "lse": lse, **gradients})
        console.print(f"wrote {out}")


def _dtype(given: str | None) -> torch.dtype | None:
    """Return the dtype that --dtype names; None: the file's."""
    return None if given is None else spelling.dtype(given, spelling.RUN_DTYPE_HELP)


def _refuse_idle(file: Path | None, of_random: dict[str, Any], dtypes: tuple[str | None, str], backward: bool) -> None:
    """Raise AttentionError for options without effect: sizes of random tensors with a file, a second format; and for
    gradients of 8 bits."""
    given = [name for name, value in of_random.items() if value is not None]
    if file is not None and given:
        rule = "--shape and --seed are of random q, k and v: leave them out"
        raise AttentionError(f"{file} and {given[0]} are given; {rule}")
    dtype, kv_dtype = dtypes
    if backward and (dtype in spelling.STORED or spelling.stored(kv_dtype)):
        option = "--kv-dtype" if kv_dtype else f"--dtype {dtype}"
        raise AttentionError(f"--backward and {option} are given; 8-bit keys and values have no backward")
    if dtype in spelling.STORED and kv_dtype and spelling.stored(kv_dtype) != spelling.stored(dtype):
        raise AttentionError(f"--dtype {dtype} and --kv-dtype {kv_dtype} are given; q, k and v of 8 bits have one")


def _refuse_narrow(file: Path | None, qkv: tuple[Tensor, ...], backward: bool) -> None:
    """Raise AttentionError for gradients of a file's tensors of 8 bits."""
    narrow = [name for name, x in zip("qkv", qkv, strict=True) if x.dtype in EIGHT_BIT]
    if backward and narrow:
        rule = "8-bit q, k and v have no backward; --dtype bf16 converts them"
        raise AttentionError(f"--backward is given and {narrow[0]} of {file} has 8 bits; {rule}")


def _in_eight_bits(name: str, x: Tensor, stored: torch.dtype) -> Quantized:
    """Quantise a tensor of a file or a random one; raises AttentionError that names it."""
    if x.ndim != 4 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        rule = "8 bits are made of four dimensions of fp16, bf16 or fp32, to which --dtype converts"
        raise AttentionError(f"{name} is {kind_of(x)}; {rule}")
    return quantize(x, stored)


def _gradients(console: Console, call: Call) -> dict[str, Tensor]:
    """Compute gradients for a random dout; print their errors, and the time of a forward and backward."""
    dout, operands = tensors.random_like_out(call.q, call.v, 0), (call.q, call.k, call.v)

    def step() -> kernels.Taken:
        return kernels.differentiated(lambda *x: attention(*x, mask=call.mask, score=call.score), operands, dout)

    with working("gradients"):
        found, times = step(), timed(step, call.q.device)
    with working("comparing gradients"):
        expected = kernels.truth(call, dout)
    for name, mine, right in zip(kernels.NAMES, found, expected, strict=True):
        console.print(f"{name}   {_error(mine, right)}")
    console.print(f"forward and backward {times.milliseconds:.3f} ms")
    return found._asdict()


def _error(found: Tensor, expected: Tensor) -> str:
    """Describe the largest and root-mean-square difference; -inf on both sides is none."""
    found = found.to(expected.dtype)
    difference = torch.where(found == expected, 0.0, found - expected).abs()
    rms, size = difference.square().mean().sqrt(), expected[expected.isfinite()].square().mean().sqrt()
    return f"largest error {difference.max():.2e}, rms {rms:.2e} (rms of the values {size:.2e})"


def timed(call: Callable[[], object], device: torch.device) -> Times:
    """Time `call`, the GPU's work included, until there are enough times."""
    times: list[float] = []
    while len(times) < ROUNDS and sum(times) < ENOUGH_S:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return Times(sorted(times)[len(times) // 2] * 1e3, len(times))


def _size(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))
