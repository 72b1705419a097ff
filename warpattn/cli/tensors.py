"""q, k, v from files or from a seed, and results to files (.safetensors or .npz)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import typer
from torch import Tensor

from warpattn.cli.spelling import Shape


def load(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors named q, k and v of a .safetensors or .npz file, on the CPU."""
    found = read(path)
    missing = [name for name in "qkv" if name not in found]
    if missing:
        raise typer.BadParameter(f"{path} holds {', '.join(found) or 'nothing'}; it must hold q, k and v")
    return found["q"], found["k"], found["v"]


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor of a .safetensors or .npz file by name, on the CPU."""
    if not path.is_file():
        raise typer.BadParameter(f"{path} is not a file")
    if check_format(path) == ".safetensors":
        return _safetensors().load_file(path)
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def random(shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normally distributed q, k, v of a shape, fp32 on the CPU: the same numbers on every device and in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(shape.batch, shape.seq_q, shape.heads_q, shape.dim_qk, generator=generator)
    k = torch.randn(shape.batch, shape.seq_k, shape.heads_kv, shape.dim_qk, generator=generator)
    v = torch.randn(shape.batch, shape.seq_k, shape.heads_kv, shape.dim_v, generator=generator)
    return q, k, v


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write named tensors; .npz has no bf16, which is written as fp32."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    if check_format(path) == ".npz":
        arrays = {name: (x.float() if x.dtype == torch.bfloat16 else x).numpy() for name, x in tensors.items()}
        np.savez(path, allow_pickle=False, **arrays)
    else:
        _safetensors().save_file(tensors, path)


def check_format(path: Path) -> str:
    """The suffix of `path` when it is one of the two formats."""
    if path.suffix not in {".npz", ".safetensors"}:
        raise typer.BadParameter(f"{path}: the file must end in .safetensors or .npz")
    return path.suffix


def _safetensors():
    """The module safetensors.torch; a sentence when the package is missing."""
    try:
        import safetensors.torch
    except ImportError:
        raise typer.BadParameter(".safetensors files need the package safetensors; or give a .npz file") from None
    return safetensors.torch
