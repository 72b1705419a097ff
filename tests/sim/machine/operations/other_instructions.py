"""Instructions for tinygrad's emulator: those that it lacks, and one whose result it puts into other rows.

    ds_read_b64_tr_b16       16 lanes read a 4 x 16 tile of two-byte elements and get it transposed     gfx950
    v_permlane32_swap_b32    the upper lanes of one register for the lower ones of another              gfx950
    v_permlane16_swap_b32    the same with rows of 16 lanes, odd ones for even ones                     gfx950
    v_mfma_f32_32x32x8/16    register r of lane l is row 8 (r / 4) + 4 (l / 32) + r % 4                 both

After AMD's documents of the instruction sets of CDNA 3 and CDNA 4. They work on the emulator's registers and LDS.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

LANES = 64
VECTOR, ZERO = 256, 128  # numbers of operands: vector registers from here on; the constant 0
LDS_WORDS = 16_384
_SWAP = re.compile(r"V_PERMLANE(16|32)_SWAP_B32")
_PRODUCT = re.compile(r"V_MFMA_F32_32X32X(8|16)_B?F16")


class Machine:
    """Registers and LDS of a wave, by the addresses that the emulator passes."""

    def __init__(self, *addresses: Any) -> None:
        scalar, vector, _, lds, _, _ = (address.value for address in addresses)
        self.scalars = _words(scalar, 300)
        self.vectors = _words(vector, VECTOR * LANES).reshape(VECTOR, LANES)
        self._lds = lds

    def lds(self, starts: np.ndarray) -> np.ndarray:
        """Eight bytes from each address, as four elements [lanes, 4]."""
        memory = np.ctypeslib.as_array((ctypes.c_uint16 * (2 * LDS_WORDS)).from_address(self._lds))
        return memory[starts[:, None] // 2 + np.arange(4)]

    def skip(self, size: int) -> None:
        """Go on behind an instruction of `size` bytes."""
        at = self.scalars[PROGRAM_COUNTER : PROGRAM_COUNTER + 2].view(np.uint64)
        at += np.uint64(size)


PROGRAM_COUNTER = 256  # its place among the emulator's scalar registers


def _words(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))


def supplied(instruction: Any, name: str) -> tuple[Any, Any] | None:
    """What the emulator takes for a compiled instruction; None for those that it has itself."""
    run: Callable[[Machine], None]
    if name == "DS_READ_B64_TR_B16":
        run = lambda machine: _transposing_read(instruction, machine)  # noqa: E731
    elif swap := _SWAP.match(name):
        run = lambda machine: _swap(instruction, int(swap.group(1)), machine)  # noqa: E731
    elif _PRODUCT.match(name):
        run = lambda machine: _product(instruction, name, machine)  # noqa: E731
    else:
        return None

    def step(*addresses: Any) -> None:
        machine = Machine(*addresses)
        run(machine)
        machine.skip(instruction.size())

    return SimpleNamespace(arg=SimpleNamespace(globals=list(range(6)))), SimpleNamespace(fxn=step)


def _transposing_read(instruction: Any, machine: Machine) -> None:
    """Lane l of 16 brings elements 4 (l % 4) to 4 (l % 4) + 3 of row l / 4, and gets column l."""
    offset = int(instruction.offset1) << 8 | int(instruction.offset0)
    starts = machine.vectors[_vector(instruction.addr)].astype(np.int64) + offset
    tiles = machine.lds(starts).reshape(LANES // 16, 4, 16)
    columns = np.ascontiguousarray(tiles.transpose(0, 2, 1)).reshape(LANES, 4)
    first = _vector(instruction.vdst)
    machine.vectors[first : first + 2] = columns.view(np.uint32).T


def _swap(instruction: Any, width: int, machine: Machine) -> None:
    """Rows of `width` lanes: odd rows of the first register change places with even rows of the second."""
    first, second = (machine.vectors[_vector(x)].reshape(-1, 2, width) for x in (instruction.vdst, instruction.src0))
    odd = first[:, 1].copy()
    first[:, 1] = second[:, 0]
    second[:, 0] = odd


def _product(instruction: Any, name: str, machine: Machine) -> None:
    """Lane l brings row (of A) or column (of B) l % 32, and of it the half l / 32 of the depth."""
    if int(instruction.acc) or int(instruction.acc_cd):
        raise NotImplementedError("products with accumulation registers")
    depth = int(_PRODUCT.match(name).group(1))
    a, b = (_operand(machine, source, depth, name) for source in (instruction.src0, instruction.src1))
    rows = np.array([[8 * (r // 4) + 4 * (lane // 32) + r % 4 for lane in range(LANES)] for r in range(16)])
    columns = np.arange(LANES) % 32
    before = instruction.src2.offset
    if before != ZERO and before < VECTOR:
        raise NotImplementedError("products added to a constant or a scalar")
    total = 0.0 if before == ZERO else machine.vectors[before - VECTOR : before - VECTOR + 16].view(np.float32)
    first = _vector(instruction.vdst)
    machine.vectors[first : first + 16] = ((a @ b.T)[rows, columns] + total).astype(np.float32).view(np.uint32)


def _operand(machine: Machine, source: Any, depth: int, name: str) -> np.ndarray:
    """A [32, depth], or B transposed."""
    first = _vector(source)
    halves = np.ascontiguousarray(machine.vectors[first : first + depth // 4].T).view(np.uint16)  # [lanes, depth / 2]
    if "BF16" in name:
        values = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = halves.view(np.float16).astype(np.float32)
    return values.reshape(2, 32, depth // 2).transpose(1, 0, 2).reshape(32, depth)


def _vector(register: Any) -> int:
    return register.offset - VECTOR
