"""What Triton compiles for one config, mask and score of dense prefill on Hopper."""

from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program
from warpattn.problem.element import FP8
from warpattn.problem.scales import scale_types

from ...nvidia.arguments import int32_fields, strided_types
from ...nvidia.boxes import tile_box
from ..arguments import PrefillShape, SplitShape, TransposeShape
from ..signature import ALIGNED, Features, attention_source, map_types
from .config import SM90Config
from .context import output_type, query_type, stored_type
from .kernel import prefill_kernel
from .transpose_values import transpose_values_kernel


def prefill_source(
    config: SM90Config, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool
) -> GluonASTSource:
    """The kernel with the types of its parameters and its constants."""

    def descriptors(rows: int, widths: tuple[int, ...], packed: int, dtype: Any) -> tuple[str, ...]:
        return map_types([tile_box(rows, cols, False, packed) for cols in widths], dtype)

    signature = {
        "q_maps": descriptors(config.rows, config.qk_parts, config.packed, query_type(config)),
        "k_maps": descriptors(config.block_n, config.qk_parts, 1, stored_type(config)),
        "v_maps": descriptors(config.v_rows, config.v_columns, 1, stored_type(config)),
        "o_maps": descriptors(config.rows, config.store_parts, config.packed, output_type(config)),
        "counter_ptr": "*i32",
        "scale": scale_types(config.eight_bit),
        "shape": int32_fields(SplitShape if config.split else PrefillShape),
    }
    return attention_source(prefill_kernel, config, Features(mask, score, has_sinks, has_lse, True), signature)


def transpose_values_source(cols: int, ragged: bool) -> GluonASTSource:
    """The kernel that transposes 8-bit values whose padded head dim is `cols`."""
    constants = {"cols": cols, "ragged": ragged}
    signature = {
        "values": strided_types(FP8.pointer), "out_ptr": FP8.pointer, "cu_ptr": "*i32",
        "shape": int32_fields(TransposeShape), **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    return GluonASTSource(transpose_values_kernel, signature, constants, {(0, 0): ALIGNED, (1,): ALIGNED})
