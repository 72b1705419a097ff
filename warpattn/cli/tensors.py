"""Reads q, k, v from files or draws them, and writes results to files (.safetensors or .npz)."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpattn.cli.spelling import Shape
from warpattn.errors import AttentionError
from warpattn.problem.backends import LATENT
from warpattn.quantized import EIGHT_BIT, quantize
from warpattn.sequences import Dense

FORMATS = (".safetensors", ".npz")
NAMES = ("q", "k", "v")
WITHOUT_NPZ = (torch.bfloat16, *EIGHT_BIT)  # NumPy has none of them
FOUR_BITS = getattr(torch, "float4_e2m1fn_x2", None)  # torch cannot convert it


def load(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Load the tensors q, k and v of a .safetensors or .npz file, on the CPU."""
    found = read(path, NAMES)
    for name, x in found.items():
        if x.is_complex() or x.dtype == FOUR_BITS:
            raise AttentionError(f"{path}: {name} has dtype {x.dtype}; it must be real numbers of at least 8 bits")
        if not x.numel():
            raise AttentionError(f"{path}: {name} has shape {tuple(x.shape)}; it must have at least one element")
    return found["q"], found["k"], found["v"]


def read(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Load the named tensors of a .safetensors or .npz file, on the CPU; raises AttentionError if that fails."""
    check_format(path)
    if not is_file(path):
        raise AttentionError(f"{path} is not a file; give a .safetensors or .npz file that holds q, k and v")
    wanted = tuple(names)
    found = _read_safetensors(path, wanted) if path.suffix == ".safetensors" else _read_npz(path, wanted)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise AttentionError(f"{path} has no {' and no '.join(missing)}; it must hold {', '.join(wanted)}")
    return found


def _read_npz(path: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Load arrays of numbers in this machine's byte order; never loads pickled objects."""
    try:
        with zipfile.ZipFile(path):
            pass  # np.load returns something else for other formats
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names if name in file.files}
    except Exception as error:  # zipfile, decompressors and NumPy's parser raise many kinds
        raise AttentionError(f"{path} cannot be read as .npz; {_first_line(error)}") from None
    return {name: _tensor(f"{path}: {name}", array) for name, array in arrays.items()}


def _tensor(what: str, array: Any) -> Tensor:
    """Make a tensor that shares the array's memory."""
    rule = "it must be numbers that torch has, in this machine's byte order"
    if not isinstance(array, np.ndarray):
        raise AttentionError(f"{what} is no array; {rule}")
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        raise AttentionError(f"{what} has dtype {array.dtype.str!r}; {rule}") from None


def _read_safetensors(path: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    safetensors = _safetensors()
    try:
        found = safetensors.load_file(path)
    except Exception as error:  # its own class, OSError, ValueError or KeyError
        raise AttentionError(f"{path} cannot be read as .safetensors; {_first_line(error)}") from None
    return {name: found[name] for name in names if name in found}


def random(shape: Shape, seed: int, dtype: torch.dtype | None = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Draw normally distributed q, k, v of a shape on the CPU, in fp32: the same numbers for every dtype.

    With head dims of latent attention, v is a view of k, as its kernels require.
    """
    require_memory(shape)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sizes, generator=generator).to(dtype) for sizes in shape.tensors[:3])
    return q, k, k[..., : shape.dim_v] if (shape.dim_qk, shape.dim_v) == LATENT else v


def in_eight_bits(wide: Iterable[Tensor], dtype: torch.dtype) -> tuple[Dense, tuple[Tensor, ...]]:
    """Quantise q, k and v to 8 bits; return their scales as a `Dense`, and their values."""
    q, k, v = (quantize(x, dtype) for x in wide)
    return Dense(k.scale, v.scale, q.scale), (q.values, k.values, v.values)


def random_like_out(q: Tensor, v: Tensor, seed: int) -> Tensor:
    """Draw a normally distributed gradient of the output of q and v, in q's dtype and on its device."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn((*q.shape[:-1], v.shape[-1]), generator=generator).to(q.device, q.dtype)


def require_memory(shape: Shape, each: int = 4, what: str = "its q, k, v and out take", advice: str = "") -> None:
    """Raise AttentionError if q, k, v and out with `each` bytes an element (4: fp32) exceed the machine's memory."""
    needed = each * sum(torch.Size(sizes).numel() for sizes in shape.tensors)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        rule = f"this machine has {there / 2**30:.1f} GiB of memory{advice}"
        raise AttentionError(f"shape is {shape}; {what} {needed / 2**30:,.1f} GiB, {rule}")


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write named tensors; .npz has no bf16 and no 8 bits, which are written as fp32."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    if check_format(path) == ".npz":
        arrays = {name: (x.float() if x.dtype in WITHOUT_NPZ else x).numpy() for name, x in tensors.items()}
        with writing(path):
            np.savez(path, allow_pickle=False, **arrays)
    else:
        content = _safetensors().save(tensors)
        with writing(path):
            path.write_bytes(content)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise AttentionError instead of OSError if `path` cannot be written; a new file is removed again."""
    new = False
    try:
        new = not path.exists()
        yield
    except OSError as error:
        if new:
            with suppress(OSError):
                path.unlink()
        raise AttentionError(f"{path} cannot be written; {_first_line(error)}") from None


def is_file(path: Path) -> bool:
    """Whether there is such a file; False for a name that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def check_format(path: Path) -> str:
    """Return the suffix of `path`; raises AttentionError if it is no known format, or its package is missing."""
    if path.suffix not in FORMATS:
        raise AttentionError(f"{path} ends in {path.suffix!r}; it must end in .safetensors or .npz")
    if path.suffix == ".safetensors":
        _safetensors()
    return path.suffix


def check_writable(path: Path, source: Path | None = None) -> None:
    """Raise AttentionError, before any work, if `path` cannot be written or would overwrite `source`."""
    with writing(path):
        there = path.exists()  # an OSError for a name that is too long
    if source is not None and there and is_file(source) and path.samefile(source):
        raise AttentionError(f"{path} is the input; write the result to another file")
    if not path.parent.is_dir():
        raise AttentionError(f"{path} cannot be written; there is no folder {path.parent}")
    if there and not path.is_file():
        raise AttentionError(f"{path} cannot be written; it is no file")
    if not os.access(path if there else path.parent, os.W_OK if there else os.W_OK | os.X_OK):
        raise AttentionError(f"{path} cannot be written; this user may not write there")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _safetensors() -> Any:
    """Import safetensors.torch; raises AttentionError if the package is missing."""
    try:
        import safetensors.torch
    except ImportError:
        raise AttentionError(".safetensors files need the package safetensors; or give a .npz file") from None
    return safetensors.torch
