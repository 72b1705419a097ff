"""The TTGIR parser: types, operations, locations; and the text of every operation as it is expected."""

import pytest

pytest.importorskip("triton")

from tests.sim.machine.operations import golden
from warpattn.sim.errors import SimulationError
from warpattn.sim.ir.locations import Frame, enclosing_function
from warpattn.sim.ir.module import parse_module
from warpattn.sim.ir.valuetypes import parse_type, split_top

TEXT = """
#loc = loc("k.py":3:0)
#loc1 = loc("k.py":5:4)
#loc2 = loc("x"(#loc1))
#loc3 = loc(callsite(#loc2 at #loc))
module attributes {"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 8 : i32, ttg.target = "cuda:90"} {
  tt.func public @k(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"(#loc)), %n: i32 loc("n"(#loc))) {
    %c0 = arith.constant 0 : i32 loc(#loc)
    %r:2 = scf.for %i = %c0 to %n step %c0 iter_args(%a = %c0, %b = %n) -> (i32, i32)  : i32 {
      %s = arith.addi %a, %b : i32 loc(#loc3)
      scf.yield %s, %a : i32, i32 loc(#loc)
    } loc(#loc3)
    %f = arith.sitofp %r#1 : i32 to f32 loc(#loc2)
    tt.store %x, %f : !tt.ptr<f32> loc(#loc)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""


def test_a_module():
    module = parse_module(TEXT)
    assert (module.entry, module.target, module.num_warps, module.num_ctas) == ("k", "cuda:90", 8, 1)
    block = module.functions["k"]
    assert block.arguments == ["%x", "%n"] and [str(t) for t in block.types] == ["!tt.ptr<f32>", "i32"]
    constant, loop, cast, store, end = block.ops
    assert (constant.results, constant.text.strip(), str(constant.type)) == (["%c0"], "0", "i32")
    assert loop.results == ["%r#0", "%r#1"] and [op.name for op in loop.regions[0].ops] == ["arith.addi", "scf.yield"]
    assert loop.regions[0].ops[0].frames == (Frame("k.py", 5), Frame("k.py", 3)) == loop.frames
    assert (str(cast.inputs[0]), str(cast.outputs[0])) == ("i32", "f32")
    assert store.operands == ["%x", "%f"] and end.name == "tt.return"


@pytest.mark.parametrize(
    ("text", "kind", "elem", "shape"),
    [
        ("i1", "scalar", "i1", None),
        ("!tt.ptr<bf16>", "scalar", "ptr", None),
        ("tensor<64x128xf32, #mma>", "tensor", "f32", (64, 128)),
        ("tensor<8x!tt.ptr<f32>, #ttg.slice<{dim = 1, parent = #blocked}>>", "tensor", "ptr", (8,)),
        ("!ttg.memdesc<2x1xi64, #shared1, #smem, mutable>", "memdesc", "i64", (2, 1)),
        ("!tt.tensordesc<1x64xsi32, #shared>", "desc", "i32", (1, 64)),
        ("tensor<4xf8E4M3FN, #b>", "tensor", "f8E4M3FN", (4,)),
        ("!ttg.async.token", "other", "i64", None),
    ],
)
def test_types(text, kind, elem, shape):
    found = parse_type(text)
    assert (found.kind, found.elem, found.shape) == (kind, elem, shape)


def test_splitting_stops_at_brackets():
    assert split_top("tensor<2xi1, #a<{x = [1, 2]}>>, (i32, i64) -> i1, f32") == [
        "tensor<2xi1, #a<{x = [1, 2]}>>", "(i32, i64) -> i1", "f32",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no TTGIR"),
        ("module {\n}", "no function, target"),
        (TEXT.replace("tt.return", "??"), "no operation that is known"),
        (TEXT.replace("    tt.return", "    cf.br ^bb1\n  ^bb1:\n    cf.br ^bb1"), "a loop of branches"),
        (TEXT.replace("    tt.return", "    cf.br ^bb2\n  ^bb1:\n    tt.return"), "there is no block"),
    ],
)
def test_what_is_no_module(text, message):
    with pytest.raises(SimulationError, match=message):
        parse_module(text)


def test_functions_are_found_by_line():
    line = enclosing_function.__wrapped__.__code__.co_firstlineno + 3
    assert enclosing_function(enclosing_function.__wrapped__.__code__.co_filename, line) == "enclosing_function"
    assert enclosing_function("nowhere.py", 3) == ""


def test_triton_prints_every_operation_as_expected():
    """A difference means that Triton changed: see that the parser understands it, then write the file anew."""
    assert golden.lines() == golden.FILE.read_text()
