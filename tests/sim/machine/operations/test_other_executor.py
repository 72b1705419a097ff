"""The code objects themselves, run by an executor that this project did not write: tinygrad's emulator of CDNA.

Optional: it is no package but part of tinygrad's tests, and compiles what it executes with clang. With a checkout,

    PYTHONPATH=<tinygrad> python -m pytest tests/sim/machine/operations/test_other_executor.py

Last run with tinygrad at commit a9069c177a. It takes one wave after the other from barrier to barrier and finishes
every copy at once, so it says nothing about waits; it says that the machine code computes attention. What it cannot
execute stands in docs/kernels/cdna.md.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("test.mockgpu.amd.emu", reason="needs a checkout of tinygrad", exc_type=ImportError)

from test.mockgpu.amd import emu
from tinygrad.device import BufferSpec
from tinygrad.runtime.support.elf import elf_loader

from tests.sim.cdna.calls import Case, decode_choice, error, outputs, prefill_choice, ready_of
from tests.sim.machine.operations.other_instructions import supplied
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.masks import Causal
from warpattn.problem import Call
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.reference import reference
from warpattn.runtime import compiler, hip
from warpattn.runtime.bound_launches import LoadedKernel, argument

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which(os.environ.get("CC", "clang")), reason="tinygrad compiles with clang"),
    pytest.mark.filterwarnings("ignore"),
]
PAGE = 4096
LDS_SHIFT, LDS_BITS, LDS_UNIT = 15, 0x1FF, 512  # of compute_pgm_rsrc2
SCALARS_BEFORE = ((0, 4), (1, 2), (2, 2))  # (bit of the descriptor, registers) of what precedes the arguments' address


class Memory:
    """Memory whose addresses begin at 0: lanes that load out of bounds read there in the emulator."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self._end = PAGE

    @property
    def base(self) -> int:
        return self.bytes.ctypes.data

    def put(self, content: bytes) -> int:
        """Address of a copy of `content`, with a page of zeros after it."""
        start, self._end = self._end, (self._end + len(content) + 2 * PAGE) // PAGE * PAGE
        self.bytes[start : start + len(content)] = np.frombuffer(content, np.uint8)
        return start

    def get(self, start: int, length: int) -> bytes:
        return self.bytes[start : start + length].tobytes()


@pytest.fixture(name="memory")
def _memory(monkeypatch) -> Memory:
    memory = Memory(1 << 24)
    buffer, decode = emu.Buffer, emu._decode_at

    def based(device: str, size: int, dtype: Any, options: Any = None, **others: Any) -> Any:
        whole = options is not None and options.external_ptr == 0
        return buffer(device, size, dtype, options=BufferSpec(external_ptr=memory.base) if whole else options, **others)

    def decoded(at: int, arch: str) -> Any:
        found = emu.decode_inst(memory.get(at, 16), arch)
        made = supplied(found, emu._op_name(found))
        return decode(at + memory.base, arch) if made is None else (made, found)

    monkeypatch.setattr(emu, "Buffer", based)
    monkeypatch.setattr(emu, "_decode_at", decoded)
    return memory


def execute(step: Launch, memory: Memory) -> None:
    """Run a step's code object; tensors are written as a launch would."""
    made = compiler.artifact_of(step)
    packed = hip.Parameters(LoadedKernel.of(made, 0, 1).kinds)
    tensors = []
    for i, parameter in enumerate(made.parameters):
        value = argument(step.args, parameter.name)
        if isinstance(value, torch.Tensor):
            tensors.append((value, memory.put(value.view(-1).view(torch.uint8).numpy().tobytes())))
        packed.cells[i].value = tensors[-1][1] if isinstance(value, torch.Tensor) else value or 0
    size = ctypes.c_size_t.from_address(packed.table[3]).value
    arguments = memory.put(ctypes.string_at(packed.table[1], size).ljust(512, b"\0"))
    image, sections, _ = elf_loader(made.cubin)
    descriptor = next(section.header.sh_addr for section in sections if section.name == ".rodata")
    image = bytes(image)
    (entry,) = struct.unpack_from("<q", image, descriptor + 16)
    (resources,) = struct.unpack_from("<I", image, descriptor + 52)
    (properties,) = struct.unpack_from("<H", image, descriptor + 56)
    before = sum(count for bit, count in SCALARS_BEFORE if properties >> bit & 1)
    resources = resources & ~(LDS_BITS << LDS_SHIFT) | -(-made.shared // LDS_UNIT) << LDS_SHIFT
    code = memory.put(image) + descriptor + entry
    scalars = [0] * before + [arguments, 0] + [0] * 10
    grid = (*step.grid, 1, 1)[:3]
    emu.run_asm(code, 0, *grid, made.threads, 1, 1, arguments, resources, 0, "cdna", scalars)
    for tensor, start in tensors:
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(torch.frombuffer(bytearray(memory.get(start, flat.numel())), dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["registers", "lds", "ring"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_prefill(kind, arch, memory):
    """Causal, two heads that share their keys, lengths that are no multiples of a tile."""
    call = Case(seq_q=40, seq_k=70, mask=Causal()).call()
    compare(call, arch, prefill_choice(call, arch, kind), memory)


@pytest.mark.parametrize("kind", ["registers", "lds", "ring"])
def test_prefill_by_its_own_instructions(kind, memory, monkeypatch):
    """With 16 x 16 MFMA on gfx942 it needs nothing from `other_instructions`."""
    monkeypatch.setattr("tests.sim.test_other_executor.supplied", lambda *_: None)
    call = Case(seq_q=40, seq_k=70, mask=Causal()).call()
    compare(call, "gfx942", prefill_choice(call, "gfx942", kind, instr=16), memory)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_decode(arch, memory):
    """One token of four heads that share their keys, in two partitions that a second kernel adds."""
    call = Case(seq_q=1, seq_k=300, heads=4, sinks=True).call()
    compare(call, arch, decode_choice(call, arch, partitions=2), memory)


def compare(call: Call, arch: str, choice: Choice, memory: Memory) -> None:
    """Output and LSE of the code objects against the reference."""
    ready = ready_of(call, arch)
    out, lse = outputs(call, ready)
    operands = fitted(Operands(call.q, call.k, call.v, out, lse, call.sinks))
    for step in launches_of_choice(ready, operands, call.sequence, choice):
        execute(step, memory)
    exact, exact_lse = reference(call.q, call.k, call.v, mask=call.mask, sinks=call.sinks)
    assert exact.abs().max() > 0.1
    assert error(operands.out.float(), exact) < 0.02
    assert error(lse, exact_lse) < 1e-3
