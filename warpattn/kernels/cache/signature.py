"""What Triton compiles to append new keys and values to a cache."""

from triton.experimental.gluon import GluonASTSource

from warpattn.problem.arch import TARGETS

from .config import AppendShape, Rotation, Rows, Table
from .kernel import append_kernel


def append_source(dtype: str, table_dtype: str, dims: tuple[int, int], rotation: Rotation | None, arch: str):
    """The kernel with the types of its parameters and its constants, for an architecture."""
    tensor, angles = Rows(f"*{dtype}", "i64", "i64", "i64"), Table(f"*{table_dtype}", "i64")
    constants = {"dims": dims, "rotation": rotation, "lanes": TARGETS[arch][2], "trigger_dependents": arch == "sm90"}
    signature = {
        "k_pages": tensor, "v_pages": tensor, "k_new": tensor, "v_new": tensor, "table": Table("*i32", "i64"),
        "lengths": "*i32", "cos": angles, "sin": angles, "shape": AppendShape(*["i32"] * 5),
        **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    return GluonASTSource(append_kernel, signature, constants)
