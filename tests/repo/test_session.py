"""What a test session is made of: kernels compiled once, and cases drawn from a matrix."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.drawn import drawn, each_once
from tests.kernels import TREES, stored
from tests.launches import small_call
from warpattn.problem.arch import triton_target
from warpattn.runtime.launches import list_launches
from warpattn.sim import compile as compilation


@dataclass
class Source:
    """As much of Triton's source of a kernel as names it."""

    text: str = "def kernel"
    constants: dict[Any, Any] = field(default_factory=dict)
    signature: dict[str, str] = field(default_factory=lambda: {"x": "*fp32"})
    attrs: dict[Any, Any] = field(default_factory=dict)
    name: str = "kernel"

    @property
    def fn(self) -> SimpleNamespace:
        return SimpleNamespace(cache_key=self.text)


class Function(SimpleNamespace):
    """A device function: all look alike, and differ in the key of their source text."""

    def __repr__(self) -> str:
        return "function"


def compiler(folder: Path) -> tuple[list[Source], Any]:
    """The sources that were compiled, and a compiler that keeps its results in a folder."""
    compiled: list[Source] = []

    def compile_kernel(source: Source, target: str, options: dict[str, Any]) -> SimpleNamespace:
        compiled.append(source)
        return SimpleNamespace(asm={"ttgir": f"{source.text} {options}"})

    return compiled, stored(compile_kernel, lambda name, asm: (name, asm["ttgir"]), folder)


def test_a_kernel_is_compiled_once_for_all_workers(tmp_path: Path) -> None:
    compiled, first = compiler(tmp_path)
    _, second = compiler(tmp_path)
    results = [to_ttgir(Source(), "sm90", {"num_warps": 4}) for to_ttgir in (first, first, second)]
    assert results == [("kernel", "def kernel {'num_warps': 4}")] * 3
    assert len(compiled) == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("source", "target", "warps"),
    [
        (Source(text="def other"), "sm90", 4),
        (Source(constants={(0,): 1}), "sm90", 4),
        (Source(constants={(0,): (Function(cache_key="a"),)}), "sm90", 4),
        (Source(signature={"x": "*fp16"}), "sm90", 4),
        (Source(attrs={(0,): 16}), "sm90", 4),
        (Source(), "sm100", 4),
        (Source(), "sm90", 8),
    ],
)
def test_other_kernels_are_compiled(source: Source, target: str, warps: int, tmp_path: Path) -> None:
    compiled, to_ttgir = compiler(tmp_path)
    for known in (Source(), Source(constants={(0,): (Function(cache_key="b"),)})):
        to_ttgir(known, "sm90", {"num_warps": 4})
    to_ttgir(source, target, {"num_warps": warps})
    assert len(compiled) == 3


def test_syntax_trees_stay_as_they_were_parsed() -> None:
    """Compiling a kernel changes nothing in the trees that the next one is compiled from."""
    pytest.importorskip("triton")
    small = small_call("sm90", (64, 64))
    launch = list_launches(small.checked, small.x, small.sequence)[0]
    to_ttgir = compilation.to_ttgir.__wrapped__
    code = [to_ttgir(launch.source(), triton_target("sm90"), dict(launch.options)).asm["ttgir"] for _ in range(2)]
    assert code[0] == code[1]
    assert len(TREES) > 50
    for text, tree in TREES.items():
        assert ast.dump(tree, include_attributes=True) == ast.dump(ast.parse(text), include_attributes=True)


def test_what_is_not_drawn_is_left_to_the_full_run() -> None:
    first, second, third = drawn([(1, "a"), (2, "b"), (3, "c")], [(1, "a"), (3, "c")])
    assert (first, third) == ((1, "a"), (3, "c"))
    assert second.values == (2, "b") and [mark.name for mark in second.marks] == ["full"]
    assert drawn({"a": 1, "b": 2}, ["a", "b"]) == ["a", "b"]
    with pytest.raises(AssertionError, match=r"no such cases: \['c'\]"):
        drawn(["a"], ["c"])


def test_every_value_of_every_axis_is_drawn() -> None:
    rows = each_once((1, 2, 3), "ab")
    assert rows == [(1, "a"), (2, "b"), (3, "a")]
