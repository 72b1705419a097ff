"""One copy of a loop that several roles have: every role of the shared text does what it did, told from its PTX."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from operator import ne
from threading import Event
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from tests.drawn import drawn, left_out
from tests.launches import small_call
from tests.ptx_paths import Run, roles
from tests.unit.kernels.sm90_builds import chosen
from warpattn.kernels.sm90.prefill.choice import choose
from warpattn.kernels.sm90.prefill.launch import attention_launch, list_launches
from warpattn.machine_code.sass import opcode_counts
from warpattn.masks import Causal, Full, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.operands import Operands
from warpattn.runtime.compiler import compiled, pipeline_of
from warpattn.runtime.shared_code import share_loops
from warpattn.runtime.shared_code.ptx import END
from warpattn.sequences import Dense

MOVE = re.compile(r"^\tmov\.\w+ \t(%[a-z]+\d+), (%[a-z]+\d+);$")
SHAPES = {  # batch, queries, keys, heads, key heads, head dim, mask: warpgroups
    "two": ((16, 1024, 1024, 16, 16, 128, Causal()), 2),
    "three": ((2, 8192, 8192, 32, 32, 64, Causal()), 3),
    "four, of packed heads": ((4, 8192, 8192, 64, 8, 64, SlidingWindow(128)), 4),
}


@cache
def launch_of(name: str):
    """The launch of a shape's kernel."""
    (batch, seq_q, seq_k, heads, heads_kv, dim, mask), _ = SHAPES[name]
    choice = chosen(batch, seq_q, seq_k, heads, heads_kv, dim, mask)
    call = small_call("sm90", (dim, dim), choice.config.element, heads=(heads, heads_kv), modifiers=(mask, None))
    return attention_launch(*call, choice)


@cache
def texts(name: str) -> tuple[str, str]:
    """The PTX of a shape's kernel as Triton makes it, and with one copy of its loop."""
    plain = compiled(replace(launch_of(name), shared_code=False)).asm["ptx"]
    return plain, share_loops(plain)


def events(ptx: str) -> Iterator[list[str]]:
    """Of every role, in runs that take different ways."""
    return (Run(ptx, role, seed).events for role in roles(ptx) for seed in range(4))


@pytest.mark.parametrize("name", drawn(SHAPES, ["two"]))
def test_roles_do_what_they_did(name):
    plain, shared = texts(name)
    warpgroups = SHAPES[name][1]
    assert len(roles(plain)) == warpgroups + 3  # one is the first warps', one loads; the dispatch has two more entries
    products = [text.count("wgmma.mma_async") for text in (plain, shared)]
    assert shared.count("%shared_role, 128;") >= 3 and products[1] < products[0]
    before, after = list(events(plain)), list(events(shared))
    assert before == after and sum(map(len, before)) > 500


@pytest.mark.parametrize(("every", "least"), [(50, 1), left_out((9, 5))])
def test_a_value_that_is_another_is_noticed(every, least):
    """So the comparison above has eyes: what a copy moves into the loop, and its role's number."""
    plain, shared = texts("two")
    expected, lines = list(events(plain)), shared.splitlines()
    enter = lines.index("$L__shared_enter:")
    moves = [i for i, line in enumerate(lines[:enter]) if MOVE.match(line)]
    number = next(i for i, line in enumerate(lines) if re.match(r"\tmov\.b32 \t%shared_role, [1-9]", line))
    missing = ["\n".join(lines[:i] + lines[i + 1 :]) for i in (*moves[::every], number)]
    noticed = [any(map(ne, events(text), expected)) for text in missing]
    assert noticed[-1] and sum(noticed) > least  # registers that a loop writes before it reads them are moved, too


def test_a_launch_is_compiled_with_one_copy():
    kernel, (plain, shared) = compiled(launch_of("two")), texts("two")
    made = kernel.asm["ptx"].split(END)[0]  # behind it are names of files, which Triton keeps of another clone
    assert launch_of("two").shared_code and made == shared.split(END)[0]
    products = opcode_counts(kernel.asm["cubin"])["HGMMA"]
    assert products == shared.count("wgmma.mma_async") < plain.count("wgmma.mma_async")


def small(barriers: tuple[str, str], second: str = "add.s32 \t%r{y}, %r{x}, 1;", length: int = 320) -> str:
    """A kernel of two roles with a loop each: register %r1 counts in the first, %r2 in the second."""
    body = []
    for role, (barrier, register) in enumerate(zip(barriers, (1, 2), strict=True)):
        form = second if role else "add.s32 \t%r{y}, %r{x}, 1;"
        sums = [f"\t{form.format(x=register, y=register)}"] * length
        body += [f"$L__BB0_{role + 1}0:", f"\tmov.b32 \t%r{register}, {7 + role};", f"$L__BB0_{role + 1}1:"]
        body += [f"\tbar.sync \t{barrier}, 128;", *sums, f"\tsetp.lt.s32 \t%p{register}, %r{register}, %r9;"]
        body += [f"\t@%p{register} bra \t$L__BB0_{role + 1}1;"]
        body += [f"$L__BB0_{role + 1}2:", f"\tst.shared.b32 \t[%r9], %r{register};", "\tret;"]
    begin = ["JTI0_0:", "\t.branchtargets", "\t\t$L__BB0_20,", "\t\t$L__BB0_20;", "\tmov.u32 \t%r9, %tid.x;"]
    begin += ["\tsetp.lt.s32 \t%p9, %r9, 4;", "\t@!%p9 bra \t$L__BB0_9;", "\tbra.uni \t$L__BB0_10;", "$L__BB0_9:"]
    head = ["{", "\t.reg .pred \t%p<10>;", "\t.reg .b32 \t%r<10>;", "$L__func_begin0:"]
    return "\n".join([*head, *begin, "\tbrx.idx \t%r9, JTI0_0;", *body, "$L__func_end0:", "}"]) + "\n"


@pytest.mark.parametrize(
    ("sizes", "mask", "shared"),
    [((4, 4096, 4096, 16, 16, 128), Causal(), True), ((1, 16384, 16384, 16, 16, 128), Causal(), False),
     ((1, 16384, 16384, 16, 16, 128), SlidingWindow(512), True), ((4, 4096, 4096, 16, 16, 128), Full(), False),
     ((4, 4096, 4096, 16, 16, 72), Full(), True), ((4, 4096, 4096, 8, 8, 256), Causal(), False)],
    ids=["causal", "long", "window", "full", "full, 72", "wide"],
)  # fmt: skip
def test_which_launches_share(sizes, mask, shared):
    batch, _, seq_k, heads, heads_kv, dim = sizes
    q, k = (torch.empty(1, dtype=torch.bfloat16).expand(batch, seq_k, h, dim) for h in (heads, heads_kv))
    checked = validate(Call(q, k, k, Dense(), mask, backend="simulate:sm90"))
    x, choice = Operands(q, k, k, torch.empty_like(q), None, None), choose(checked.problem, ARCHS["sm90"])
    launch: Any = list_launches(checked, x, Dense(), choice)[0]
    assert launch.shared_code == launch.key[-1] == shared


def test_text_without_numbers_of_source_lines():
    """As Triton writes it with TRITON_DISABLE_LINE_INFO=1."""
    text = small(("0", "2"))
    bare = re.sub(r"\$L__func_\w+:\n", "", text)
    assert share_loops(bare) == re.sub(r"\$L__func_\w+:\n", "", share_loops(text)) != bare


def test_a_pipeline_with_one_copy_leaves_others_alone():
    """Triton's hook is that of the process: a user's is called, another thread's kernels stay as they are."""
    from triton import knobs

    asked: list[str] = []

    def users(backend=None, stages=None, *given) -> Any:
        asked.append("key" if stages is None else "stages")
        return "user", "digest"

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = users
        with pipeline_of(launch_of("two")):
            hook: Any = knobs.runtime.add_stages_inspection_hook
            stages = {"ptx": lambda text, metadata: text}
            there = ThreadPoolExecutor(1).submit(lambda: (hook(), hook(None, stages, None))).result()
            assert there[0] == ("user", "digest") and stages["ptx"](small(("0", "2")), {}) == small(("0", "2"))
            keys = [hook()[0]]
            hook(None, stages, None)
            assert stages["ptx"](small(("0", "2")), {}) == share_loops(small(("0", "2")))
        assert knobs.runtime.add_stages_inspection_hook is users and asked == ["key", "stages"] * 2
        with pipeline_of(replace(launch_of("two"), shared_code=False)):
            hook = knobs.runtime.add_stages_inspection_hook
            keys.append(hook()[0])
            hook(None, stages := {"ptx": users}, None)
            assert stages == {"ptx": users}
        assert all(key.startswith("user") for key in keys) and len({"user", *keys}) == 3


def test_pipelines_of_two_threads_leave_no_hook():
    """The second one begins while the first is at work, and what it finds is what it leaves."""
    from triton import knobs

    before, begun, end = knobs.runtime.add_stages_inspection_hook, Event(), Event()

    def first():
        with pipeline_of(launch_of("two")):
            begun.set()
            end.wait(60)

    def second():
        begun.wait(60)
        with pipeline_of(launch_of("two")):
            pass

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(first), threads.submit(second)]
        begun.wait(60)
        wait(running, timeout=0.2)  # the second one is where it would take the first one's hook for the user's
        end.set()
        for one in running:
            one.result()
    assert knobs.runtime.add_stages_inspection_hook is before


def test_small_loops_become_one():
    text = small(("0", "2"))
    shared = share_loops(text)
    assert shared.count("add.s32") == 320 and text.count("add.s32") == 640
    assert [Run(shared, role, 1).events for role in (-1, 0)] == [Run(text, role, 1).events for role in (-1, 0)]
    assert Run(text, 0, 1).events != Run(text, -1, 1).events


@pytest.mark.parametrize(
    "text",
    [small(("0", "2"), "add.s32 \t%r{y}, %r{x}, 2;"),  # another constant
     small(("0", "2"), "sub.s32 \t%r{y}, %r{x}, 1;"),  # another operation
     small(("0", "2"), "add.s32 \t%r{y}, %r9, 1;"),  # a register of another use
     small(("0", "0")),  # one barrier for two roles
     small(("0", "2"), length=40)],  # not worth it
    ids=["constant", "operation", "register", "barrier", "short"],
)  # fmt: skip
def test_loops_that_differ_stay(text):
    assert share_loops(text) == text


def test_an_empty_function_has_no_loops():
    text = "{\n$L__func_begin0:\n\tret;\n$L__func_end0:\n}\n"
    assert share_loops(text) == text
