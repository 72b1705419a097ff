"""Machine code of latent attention on Hopper under a mask: attending again takes nothing from loops over key tiles."""

import re
from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from warpattn.kernels.sm90.mla.config import choose
from warpattn.kernels.sm90.mla.launch import list_launches
from warpattn.machine_code.roles import role_faults
from warpattn.machine_code.sass import disassembled, opcode_counts
from warpattn.masks import Causal
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.operands import Operands
from warpattn.runtime import compiler
from warpattn.sequences.latent import LatentPages
from warpattn.sequences.paged import PagedKV

# Heads; whether latents have 8 bits; of each warpgroup's loop over key tiles the instructions, with a margin of one in
# fifty, and the spilled registers that it reads. Triton 3.9.0.
LOOPS = {
    "few rows, 8 bits": (8, True, [(1925, 8)]),
    "many rows": (128, False, [(222, 0), (626, 0), (222, 0)]),
    "many rows, 8 bits": (128, True, [(222, 0), (222, 1), (628, 0)]),
}
CONVERTING = (1147, 6)  # the same of the loop in which a warpgroup loads and converts latents of 8 bits
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
BACK = re.compile(r"^@\S+ BRA\S* .*?0x([0-9a-f]+)")


@cache
def compiled(heads: int, narrow: bool):
    """The kernel for two tokens of each request over pages of 64 under a causal mask."""
    q, tables = torch.zeros(128, 2, heads, 576).bfloat16(), (torch.zeros(128, 64).int(), torch.zeros(128).int())
    k = torch.zeros(4, 64, 1, 576).bfloat16()
    sequence = PagedKV(k, k[..., :512], *tables)
    if narrow:
        latents = torch.zeros(4, 64, 1, 512).to(torch.float8_e4m3fn)
        sequence = LatentPages(latents, torch.zeros(4, 64, 1, 64).bfloat16(), *tables, scale=torch.ones(4, 64, 1, 4))
    k, v = sequence.k_pages, sequence.v_pages
    checked = validate(Call(q, k, v, sequence, Causal(), backend="simulate:sm90"), read_values=False)
    out, choice = torch.zeros(128, 2, heads, 512).bfloat16(), choose(checked.problem, ARCHS["sm90"])
    return compiler.compiled(list_launches(checked, Operands(q, k, v, out, None, None), sequence, choice)[0])


def loops_with(opcode: str, code: str) -> list[list[str]]:
    """The innermost loops with an `opcode`, each from its first instruction to the branch back."""
    found = [(int(at, 16), text) for at, text in INSTRUCTION.findall(code)]
    number = {at: i for i, (at, _) in enumerate(found)}
    ends: dict[int, int] = {}
    for i, (_, text) in enumerate(found):
        back = BACK.match(text)
        first = number.get(int(back[1], 16), i) if back else i
        if first < i and any(opcode in each for _, each in found[first:i]):
            ends[first] = i
    inner = [a for a in ends if not any(a < b and ends[b] <= ends[a] for b in ends)]
    return [[text for _, text in found[a : ends[a] + 1]] for a in sorted(inner)]


def check_loop(loop: list[str], most: int, spilled: int) -> None:
    assert len(loop) <= most
    assert sum("LDL" in text for text in loop) <= spilled and not any("STL" in text for text in loop)


@pytest.mark.parametrize("name", drawn(LOOPS, ["few rows, 8 bits"]))
def test_loops_over_key_tiles(name):
    heads, narrow, bounds = LOOPS[name]
    kernel = compiled(heads, narrow)
    loops = loops_with("HGMMA", disassembled(kernel.asm["cubin"]))
    assert len(loops) == len(bounds)
    for loop, (most, spilled) in zip(loops, bounds, strict=True):
        check_loop(loop, most, spilled)
    counts = opcode_counts(kernel.asm["cubin"])
    assert counts["HGMMA"] and not counts["HMMA"] and role_faults(kernel.asm) == []


@pytest.mark.full
def test_the_converting_loop():
    loops = loops_with("UTMALDG", disassembled(compiled(128, True).asm["cubin"]))
    (loop,) = [loop for loop in loops if any("F2FP" in text for text in loop)]
    check_loop(loop, *CONVERTING)
