"""What Triton compiles to append new keys and values to a cache."""

from __future__ import annotations

from triton.experimental.gluon import GluonASTSource

from warpattn.problem.arch import TARGETS

from .config import AppendConfig, AppendShape, ColumnScaledRows, Rows, ScaledRows, Table
from .kernel import append_kernel, append_slots_kernel

KERNELS = {"append": append_kernel, "append_slots": append_slots_kernel}
ALIGNED = [["tt.divisibility", 16]]


def append_source(name: str, types: dict[str, str], config: AppendConfig, arch: str) -> GluonASTSource:
    """The kernel of a name with the types of its parameters and its constants, for an architecture. types: names of
    the elements of "new" tokens, "pages", "angles", "slots" and "positions"."""
    kernel = KERNELS[name]
    rows, angles = Rows(f"*{types['new']}", "i64", "i64", "i64"), Table(f"*{types['angles']}", "i64")
    constants = {"config": config, "lanes": TARGETS[arch].lanes, "trigger_dependents": arch == "sm90"}
    tensors = ("k_pages", "v_pages", "k_new", "v_new")
    pages = {}
    if config.eight_bit is not None:
        scaled = ScaledRows(f"*{types['pages']}", *["i64"] * 3, "*fp32", *["i64"] * 3)
        pages = {
            name: ColumnScaledRows(*scaled, "i64") if isinstance(per, int) else scaled
            for name, per in zip(("k_pages", "v_pages"), config.eight_bit.scales, strict=True)
        }
    known = {
        **dict.fromkeys(tensors, rows), **pages,
        "table": Table("*i32", "i64"), "lengths": "*i32",
        "slots": f"*{types.get('slots', 'i64')}", "positions": f"*{types.get('positions', 'i64')}",
        "cos": angles, "sin": angles, "shape": AppendShape(*["i32"] * 6), **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    signature = {name: known[name] for name in kernel.arg_names}
    vectors = tensors if config.run > 1 else ()
    hints = {(kernel.arg_names.index(name), 0): ALIGNED for name in vectors}
    return GluonASTSource(kernel, signature, constants, hints)
