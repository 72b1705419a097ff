"""`plan`: which kernel a problem gets, with which configuration, and why. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.console import Console

from warpattn.cli import spelling
from warpattn.problem import Call, CheckedCall, validate
from warpattn.runtime.plan import plan
from warpattn.sequences import Dense


def plan_command(
    shape: Annotated[str, typer.Option(help=spelling.SHAPE_HELP)] = "4x4096x16x128",
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = "causal",
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    arch: Annotated[str, typer.Option(help=f"Architecture: {spelling.ARCH_HELP}")] = "sm90",
) -> None:
    """Print the plan of a problem and its reasons."""
    chosen = plan(checked_call(shape, mask, score, dtype).problem, arch=spelling.arch(arch))
    Console(highlight=False, markup=False, soft_wrap=True).print(str(chosen))


def checked_call(shape: str, mask: str, score: str, dtype: str) -> CheckedCall:
    """The checked call that the options spell, as a GPU would get it; its tensors are never touched."""
    size, kind = spelling.shape(shape), spelling.half(dtype)
    q = torch.empty(size.batch, size.seq_q, size.heads_q, size.dim_qk, dtype=kind)
    k = torch.empty(size.batch, size.seq_k, size.heads_kv, size.dim_qk, dtype=kind)
    v = torch.empty(size.batch, size.seq_k, size.heads_kv, size.dim_v, dtype=kind)
    call = Call(
        q, k, v, Dense(), spelling.mask(mask), spelling.score(score, size.heads_q), backend="reference", return_lse=True
    )
    checked = validate(call)
    return replace(checked, problem=replace(checked.problem, device_type="cuda"))
