"""Types of a kernel's parameters follow from the arguments of its launch."""

from typing import Any, NamedTuple

import torch

from warpattn.problem.argument_types import Int64, argument_types


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
