"""Registers and named barriers of roles are read right, and what would wait for ever is named."""

from __future__ import annotations

import re
from functools import cache

import pytest

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpattn.machine_code.roles import RoleCode, read_roles, role_faults
from warpattn.sim import compile_for


@gluon.jit
def meet(out, which: gl.constexpr, THREADS: gl.constexpr):
    gl.store(out + which, 1)
    if which < 2:
        gl.inline_asm("bar.sync 12, " + THREADS + ";")
    gl.barrier()


@gluon.jit
def kernel(out, FIRST: gl.constexpr, SECOND: gl.constexpr, THREADS: gl.constexpr):
    roles: gl.constexpr = (FIRST, SECOND, 40)
    gl.warp_specialize(
        [(meet, (out, 0, THREADS)), (meet, (out, 1, THREADS)), (meet, (out, 2, THREADS)), (meet, (out, 3, THREADS))],
        [4, 4, 1],
        roles,
    )


@cache
def asm(first: int = 168, second: int = 96, threads: int = 256) -> dict[str, str]:
    constants = {"FIRST": first, "SECOND": second, "THREADS": str(threads)}
    return compile_for("sm90", kernel, {"out": "*i32"}, constants, machine_code=True).asm


def test_roles_registers_and_barriers():
    found = read_roles(asm())
    assert found is not None
    first, *others = found.roles
    assert found.at_launch == 128 and found.outside <= 256 and found.waiting * 3 + found.outside <= 4 * 128
    assert first.registers == 4 * 128 - 168 - 96 - 40, "what the others leave"
    assert others[1:] == [RoleCode(4, 96, frozenset({(3, 128)})), RoleCode(1, 40, frozenset())]
    assert (others[0].warps, others[0].registers) == (4, 168)
    assert (12, 256) in first.barriers and (12, 256) in others[0].barriers
    assert role_faults(asm()) == []


def test_registers_that_there_are_not():
    """The compiler leaves registers as they are where the first role would have none; and code that asks for more."""
    (fault,) = role_faults(asm(256, 256))
    assert fault == "roles ask for 256, 256, 40 registers a thread, and the compiler gives them none of their own"
    llir, count = re.subn(r"(setmaxnreg\.\w+\.sync\.aligned\.u32\(i32) 96\)", r"\1 104)", asm()["llir"])
    (fault,) = role_faults(asm() | {"llir": llir})
    assert count == 1
    assert fault == "4 warpgroups have 512 registers a thread at launch, and need 520 while roles run"


def test_barriers_that_count_other_threads():
    assert role_faults(asm(threads=384)) == ["named barrier 12 counts 384 threads, and roles of 256 use it"]
    llir = asm()["llir"].replace("bar.sync 12, 256", "bar.sync 3, 256")
    assert role_faults(asm() | {"llir": llir}) == ["named barrier 3 counts other threads from place to place"]


def test_a_kernel_whose_warps_do_the_same():
    @gluon.jit
    def plain(out):
        gl.store(out, 1)

    assert read_roles(compile_for("sm90", plain, {"out": "*i32"}, machine_code=True).asm) is None
