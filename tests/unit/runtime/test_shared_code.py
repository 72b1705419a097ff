"""Code that several roles share: every role does in it what the first one does, told from its PTX."""

import re
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from operator import ne
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from tests.drawn import drawn
from tests.launches import small_call
from tests.ptx_paths import Run, roles
from tests.unit.kernels.sm90_builds import chosen
from warpattn.kernels.sm90 import select
from warpattn.kernels.sm90.prefill.choice import choose
from warpattn.kernels.sm90.prefill.launch import attention_launch, list_launches
from warpattn.machine_code.sass import opcode_counts
from warpattn.masks import Causal, Full, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import DEFAULT_OPTIONS
from warpattn.problem.operands import Operands
from warpattn.runtime import compiler
from warpattn.runtime.compiler import compiled, our_pipeline
from warpattn.runtime.shared_code import NotShared, share_role
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged

STAND_IN = r"mov\.b32 \t%shared_role, {};\n\tmov\.b32 \t%shared_barrier, (\d+);"  # of a warpgroup, in the text
SHAPES = {  # batch, queries, keys, heads, key heads, head dim, mask: warpgroups
    "two": ((16, 1024, 1024, 16, 16, 128, Causal()), 2),
    "three": ((2, 8192, 8192, 32, 32, 64, Causal()), 3),
    "four, of packed heads": ((4, 8192, 8192, 64, 8, 64, SlidingWindow(128)), 4),
}

# Of queries and of pages. Queries of bf16 become fp16, for which a warpgroup's warps exchange numbers.
PAGES = [(torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.float8_e4m3fn), (torch.bfloat16, torch.bfloat16)]


@cache
def launch_of(name: str):
    """The launch of a shape's kernel."""
    (batch, seq_q, seq_k, heads, heads_kv, dim, mask), _ = SHAPES[name]
    choice = chosen(batch, seq_q, seq_k, heads, heads_kv, dim, mask)
    call = small_call("sm90", (dim, dim), choice.config.element, heads=(heads, heads_kv), modifiers=(mask, None))
    return attention_launch(*call, choice)


@cache
def text_of(name: str) -> str:
    """The PTX of a shape's kernel, whose warpgroups share their code."""
    return compiled(launch_of(name)).asm["ptx"]


def events(ptx: str, role: int) -> list[list[str]]:
    """Of a role in the shared code, in runs that take different ways."""
    return [Run(ptx, role, seed, alone=True).events for seed in range(4)]


def as_first(ptx: str, number: int) -> str:
    """The text in which warpgroup `number` enters the shared code with the first one's numbers."""
    first = re.search(STAND_IN.format(0), ptx)
    assert first and len(re.findall(STAND_IN.format(number), ptx)) == 1
    return re.sub(STAND_IN.format(number), first[0], ptx)


@pytest.mark.parametrize("name", drawn(SHAPES, ["two"]))
def test_roles_do_what_the_first_one_does(name):
    """With other numbers of their own and of their barrier, which is all that differs."""
    shared, warpgroups = text_of(name), SHAPES[name][1]
    assert len(roles(shared)) == warpgroups + 3  # one is the first warps', one loads; the dispatch has two more entries
    expected = events(shared, -1)
    assert sum(map(len, expected)) > 100
    for number in range(1, warpgroups):
        assert events(as_first(shared, number), number - 1) == expected
        assert all(map(ne, events(shared, number - 1), expected))
    barriers = [re.findall(STAND_IN.format(number), shared)[0] for number in range(warpgroups)]
    assert len(set(barriers)) == warpgroups


def test_roles_go_back_to_where_they_came_from():
    """A stand-in's warps end with its last events, as they would without the shared code between."""
    shared = text_of("two")
    way = shared.index("bra.uni \t$L__shared_role;")
    without = shared[:way] + shared[way:].replace("$L__shared_role;", "$L__shared_role_1;", 1)
    ends = [Run(text, 0, 1).events for text in (shared, without)]
    names = [[event.split()[0] for event in each] for each in ends]
    assert len(names[1]) < 20 and names[0][-2:] == names[1][-2:] and len(names[0]) > len(names[1]) + 10


def test_a_value_that_is_missing_is_noticed():
    """So the comparison above has eyes: without one of the values that are computed where roles meet. Some are those
    that all warps have from the kernel's first lines."""
    shared = text_of("two")
    lines, expected = shared.splitlines(), events(shared, -1)
    meeting = lines.index("$L__shared_role:")
    begin = next(i for i in range(meeting, len(lines)) if lines[i].endswith(", %shared_role;"))
    missing = ["\n".join(lines[:i] + lines[i + 1 :]) for i in range(meeting + 1, begin)]
    noticed = [any(map(ne, events(as_first(text, 1), 0), expected)) for text in missing]
    assert sum(noticed) > len(noticed) // 2 > 2


def test_a_launch_is_compiled_with_one_copy():
    kernels = [compiled(replace(launch_of("two"), shared_code=shared)) for shared in (True, False)]
    shared, plain = (opcode_counts(kernel.asm["cubin"])["HGMMA"] for kernel in kernels)
    assert launch_of("two").shared_code and shared == text_of("two").count("wgmma.mma_async") < plain
    assert "%shared" not in kernels[1].asm["ptx"]


def test_code_that_cannot_be_shared_is_compiled_for_every_role(monkeypatch):
    def refuse(ptx):
        if "%shared_role" in ptx:
            raise NotShared("a value from memory")
        return ptx

    with TemporaryDirectory() as folder:
        monkeypatch.setenv("TRITON_CACHE_DIR", folder)
        monkeypatch.setattr(compiler, "share_role", refuse)
        assert "%shared" not in compiled(launch_of("two")).asm["ptx"]


def small(before: str = "", inside: str = "", stand_in: str = "bar.sync \t2, 128;", end: str = "") -> str:
    """A kernel of a role that adds to its thread's number, and a stand-in for it."""
    head = ["{", "\t.reg .pred \t%p<10>;", "\t.reg .b32 \t%r<10>;", "$L__func_begin0:", "JTI0_0:", "\t.branchtargets"]
    begin = ["\t\t$L__BB0_20,", "\t\t$L__BB0_9;", "\tmov.u32 \t%r1, %tid.x;", "\tadd.s32 \t%r2, %r1, 5;", f"\t{before}"]
    begin += ["\tsetp.lt.s32 \t%p9, %r1, 4;", "\t@%p9 bra \t$L__BB0_10;", "\tbrx.idx \t%r1, JTI0_0;", "$L__BB0_10:"]
    role = ["\tmov.u32 %r4, %shared_role;", "\tbar.sync \t0, 128;", f"\t{inside}", "\tst.shared.b32 \t[%r4], %r2;"]
    role += ["\tshared_role.leave;", "\tret;", "$L__BB0_20:", f"\t{stand_in}", "\tshared_role.enter 1;"]
    return "\n".join([*head, *begin, *role, f"\t{end}", "$L__BB0_9:", "\tret;", "$L__func_end0:", "}"]) + "\n"


def test_a_small_role_is_shared():
    shared = share_role(small())
    assert shared.count("st.shared") == 1 and shared.count("%shared_thread") > 2
    assert "and.b32 \t%shared_thread, %shared_thread, 127;" in shared  # of the 128 threads of any warpgroup
    assert events(as_first(shared, 1), 0) == events(shared, -1) != events(shared, 0)
    back = shared.split("$L__shared_role_1:")[1]
    assert "mov.u32 \t%r1, %tid.x;" in back and "add.s32 \t%r2, %r1, 5;" in back  # not the number in a warpgroup


@pytest.mark.parametrize(
    "parts",
    [{"before": "ld.global.b32 \t%r3, [%r1];", "inside": "add.s32 \t%r2, %r2, %r3;"},  # a value from memory
     {"before": "@%p9 mov.b32 \t%r2, 1;"},  # one of two values
     {"before": "$L__BB0_5:\n\t@%p9 bra \t$L__BB0_5;"},  # a loop before the role
     {"before": "mbarrier.test_wait.shared.b64 \t%p3, [%r1], %r2;", "inside": "selp.b32 \t%r5, 1, 0, %p3;"},
     {"inside": "call.uni (retval0), noinline, (param0);"},  # a function may have barriers and memory of its own
     {"inside": "@%p9 brx.idx \t%r1, JTI0_0;"},
     {"inside": "bar.sync \t3, 128;"},  # two barriers
     {"inside": "@%p9 bar.sync \t3, 128;"},
     {"inside": "barrier.cta.arrive \t3, 64;"},  # of all roles
     {"inside": "st.shared.b32 \t[%r1+64], %r4;"},  # to one place for all roles
     {"inside": "{ .reg .pred p; setp.ne.b32 p, %r4, 0; @p st.shared.b32 [%r1], %r2; }"},
     {"inside": "shared_role.leave;"},
     {"inside": "add.s32 \t%r2, %r2, 1;", "end": "st.shared.b32 \t[%r2], %r2;"},  # other roles read what it changes
     {"stand_in": "mov.b32 \t%r2, 7;\n\tbar.sync \t2, 128;", "end": "st.shared.b32 \t[%r1], %r2;"},
     {"before": "mov.b32 \t%r3, 1; mov.b32 \t%r5, 2;", "inside": "add.s32 \t%r2, %r2, %r3;"},
     {"stand_in": ""}],
    ids=["memory", "two values", "loop", "result of a wait", "call", "table", "barriers", "guarded", "other barrier",
         "one place", "assembly", "two ends", "changed", "another value", "in one line",
         "no barrier"],
)  # fmt: skip
def test_roles_that_cannot_be_shared(parts):
    with pytest.raises(NotShared):
        share_role(small(**parts))


@pytest.mark.parametrize(
    "inside",
    ["mad.lo.u32 \t%r5, %r4, 64, %r1;\n\tst.shared.b32 \t[%r5+64], %r2;",
     "{ .reg .b32 at; mad.lo.u32 at, %r4, 64, %r1; mov.b32 %r5, at; }\n\tst.shared.b32 [%r5], 0;",
     "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%r1, {%r1, %r2}], [%r1];",  # reads shared memory
     "bar.sync \t%r4, 256;", "bar.warp.sync 0xffffffff;"],
    ids=["sum", "assembly", "reads", "own barrier", "warp"],
)  # fmt: skip
def test_places_of_each_role(inside):
    assert "$L__shared_role:" in share_role(small(inside=inside))


@pytest.mark.parametrize(("dtype", "stored"), drawn(PAGES, PAGES[:1]))
def test_kernels_of_paged_keys_share(dtype, stored):
    """Also where bf16 queries become fp16, for which a warpgroup's warps exchange their largest ones."""
    q = torch.empty(601, 32, 128, dtype=dtype)
    pages = torch.empty(4, 16, 8, 128).to(stored)
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(8)) if stored.itemsize == 1 else {}
    kv = PagedKV(pages, pages, torch.zeros(4, 200).int(), torch.tensor([3000, 1, 0, 0]).int(), **scales)
    sequence = PagedRagged(kv, Ragged(torch.tensor([0, 600, 601, 601, 601]).int()))
    checked = validate(Call(q, pages, pages, sequence, Causal(), return_lse=True, backend="simulate:sm90"))
    x = Operands(q, pages, pages, torch.empty_like(q), torch.empty(checked.lse_shape), None)
    launches = select.list_launches(checked, x, sequence, DEFAULT_OPTIONS)
    (launch,) = [launch for launch in launches if launch.name == "sm90.prefill_varlen"]
    assert launch.shared_code and "%shared_role" in compiled(launch).asm["ptx"]


def test_values_that_the_role_writes_first_may_be_anything():
    """What was in their registers before is not read."""
    before, inside = "ld.global.b32 \t%r3, [%r1];", "mov.b32 \t%r3, 1;\n\tadd.s32 \t%r2, %r2, %r3;"
    assert "ld.global" not in share_role(small(before, inside)).split("$L__shared_role:")[1]


@pytest.mark.parametrize(
    ("before", "inside"),
    [("mov.b32 \t%r3, 7;", "add.s32 \t%r3, %r3, 1;"), ("mov.b32 \t%r3, 7;", "wgmma.mma_async \t{%r3}, %r1, %r1, 1;"),
     ("mov.b32 \t%r3, 7;", "@%p9 mov.b32 \t%r3, 1;"),
     ("shfl.sync.idx.b32 \t%r3, %r1, 0, 31, -1;", "add.s32 \t%r5, %r3, 1;")],
    ids=["sum", "product", "guarded", "lanes"],
)  # fmt: skip
def test_values_from_before_are_computed_where_roles_meet(before, inside):
    """Also those that the role changes."""
    assert before in share_role(small(before, inside)).split("$L__shared_role:")[1].split("%shared_role;")[0]


def test_text_without_numbers_of_source_lines():
    """As Triton writes it with TRITON_DISABLE_LINE_INFO=1."""
    text = small()
    bare = re.sub(r"\$L__func_\w+:\n", "", text)
    assert share_role(bare) == re.sub(r"\$L__func_\w+:\n", "", share_role(text)) != bare


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


def test_our_pipeline_leaves_others_alone():
    """Triton's hook is that of the process: a user's is called, another thread's kernels stay as they are."""
    from triton import knobs

    asked: list[str] = []

    def users(backend=None, stages=None, *given) -> Any:
        asked.append("key" if stages is None else "stages")
        return "user", "digest"

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = users
        with our_pipeline():
            hook: Any = knobs.runtime.add_stages_inspection_hook
            stages = {"ptx": lambda text, metadata: text}
            there = ThreadPoolExecutor(1).submit(lambda: (hook(), hook(None, stages, None))).result()
            assert there[0] == ("user", "digest") and stages["ptx"](small(), {}) == small()
            key = hook()[0]
            hook(None, stages, None)
            assert stages["ptx"](small(), {}) == share_role(small())
            hook(None, stages := {"amdgcn": users}, None)
            assert stages == {"amdgcn": users}
        assert knobs.runtime.add_stages_inspection_hook is users
        assert asked == ["key", "stages", "key", "stages", "stages"]
        assert key.startswith("user") and key != "user"


def test_pipelines_of_two_threads_leave_no_hook():
    """The second one begins while the first is at work, and what it finds is what it leaves."""
    from triton import knobs

    before, begun, end = knobs.runtime.add_stages_inspection_hook, Event(), Event()

    def first():
        with our_pipeline():
            begun.set()
            end.wait(60)

    def second():
        begun.wait(60)
        with our_pipeline():
            pass

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(first), threads.submit(second)]
        begun.wait(60)
        wait(running, timeout=0.2)  # the second one is where it would take the first one's hook for the user's
        end.set()
        for one in running:
            one.result()
    assert knobs.runtime.add_stages_inspection_hook is before
