"""Types of a kernel's parameters follow from the arguments of its launch."""

from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from tests.random_calls import draw
from warpattn.errors import AttentionError
from warpattn.problem import Call, validate
from warpattn.problem.argument_types import Int64, argument_types
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime.launches import list_launches
from warpattn.sequences import Dense

CAPTURED = ("mask_args", "score_args")  # keys of masks and scores say their types


class Rows(NamedTuple):
    pointer: Any
    stride: Int64
    count: Any


class Nested(NamedTuple):
    rows: Rows
    map: Any


def test_types_of_values():
    x = torch.zeros(2, dtype=torch.bfloat16)
    args = {"q": x, "flags": x.bool(), "lse": None, "scale": 0.5, "shape": (3, 4), "nothing": ()}
    expected = {"q": "*bf16", "flags": "*i8", "lse": "*fp32", "scale": "fp32", "shape": ("i32", "i32"), "nothing": ()}
    assert argument_types(args) == expected


def test_a_field_has_64_bits_if_it_says_so_whatever_its_value():
    (rows,) = argument_types({"rows": Rows(torch.zeros(1), 1, 2**31 - 1)}).values()
    assert rows == Rows("*fp32", "i64", "i32") and type(rows) is Rows


def test_given_types_replace_those_of_values():
    rows = Rows(None, 0, 0)
    args = {"maps": (torch.zeros(1),), "k": (Nested(rows, torch.zeros(1)), Nested(rows, torch.zeros(1)))}
    found = argument_types(args, {"maps": ("tensordesc<a>",), "k.1.map": "tensordesc<b>", "other": "i8"})
    assert found["maps"] == ("tensordesc<a>",)
    assert [each.map for each in found["k"]] == ["*fp32", "tensordesc<b>"]


@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx942"])
def test_launches_with_one_key_have_the_same_types(arch: str) -> None:
    """A kernel is compiled for the first launch with its key and serves all others: what is None in one and a tensor in
    the next, a scale without a fraction, or sinks of another dtype must not make other types."""
    found: dict[tuple[str, str], set[str]] = {}
    dtypes = (None, torch.float32, torch.bfloat16)
    for seed, sinks, has_lse, scale in product(range(8), dtypes, (False, True), (None, 2)):
        x = draw(arch, seed).case.build()
        x = replace(x, sinks=None if sinks is None else torch.zeros(x.q.shape[-2], dtype=sinks))
        call = Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, scale, has_lse, None, f"simulate:{arch}")
        with suppress(AttentionError):  # sinks of a dtype that is not that of q
            ready = validate(call, read_values=False)
            out = x.q.new_empty((*x.q.shape[:-1], ready.problem.dim_v), dtype=ready.problem.dtype)
            lse = torch.empty(ready.lse_shape) if has_lse else None
            operands = fitted(Operands(x.q, x.k, x.v, out, lse, x.sinks))
            for launch in list_launches(ready, operands, x.sequence) if out.numel() and ready.problem.seq_k else ():
                types = argument_types({name: x for name, x in launch.args.items() if name not in CAPTURED})
                found.setdefault((launch.name, repr(launch.key)), set()).add(repr(types))
    assert len(found) > 20 and all(len(types) == 1 for types in found.values())


def test_an_lse_of_another_dtype_is_refused() -> None:
    """Its kernel would be kept under the key of the right one."""
    q = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    ready = validate(Call(q, q, q, Dense(), return_lse=True, backend="simulate:sm90"))
    with pytest.raises(TypeError, match="the LSE of a launch is of fp32, not bfloat16"):
        list_launches(ready, Operands(q, q, q, q, q.new_empty(ready.lse_shape), None), Dense())


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_launches_of_a_backward_with_one_key_have_the_same_types(arch: str) -> None:
    pytest.importorskip("triton")
    from tests.sim.backward import Case, captured_launch, launches, operands
    from warpattn.scores import ALiBi

    found: dict[tuple[str, str], set[str]] = {}
    for lengths, sinks, wanted, dlse, fixed in product(((), ((5, 9), (3, 4))), *[(False, True)] * 4):
        for scale in (None, 1):
            case = Case(5, 9, sinks=sinks, dlse=dlse, scale=scale, deterministic=fixed, lengths=lengths, arch=arch)
            inputs = case.inputs()
            results = {"out": inputs["dout"], "lse": torch.zeros(inputs["dout"].shape[:-1]).movedim(-1, -2)}
            x = operands(case, inputs, results)
            captured = captured_launch(replace(case, score=ALiBi(torch.ones(1))))
            for launch in (*launches(case, x if wanted else x._replace(dsinks=None), inputs), captured):
                types = argument_types({name: x for name, x in launch.args.items() if name not in CAPTURED})
                found.setdefault((launch.name, repr(launch.key)), set()).add(repr(types))
    assert len(found) == 34 and all(len(types) == 1 for types in found.values())
