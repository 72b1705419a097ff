"""What Triton compiles for dense prefill on Hopper, and for the transposition of 8-bit values."""

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon import GluonASTSource

from warpattn.problem.operands import Features

from ...nvidia.clipped_rows import tile_box
from ...pieces.signature import ALIGNED, kernel_source
from ..partial_rows import box_heads
from ..signature import attention_source, map_types
from .config import SM90Config
from .context import output_type
from .eight_bit.rings import query_type, stored_type
from .eight_bit.transpose_values import transpose_values_kernel
from .kernel import prefill_kernel


def prefill_source(args: Mapping[str, Any], config: SM90Config, features: Features) -> GluonASTSource:
    """Source of the prefill kernel for a launch with `args`."""

    def maps(rows: int, widths: tuple[int, ...], packed: int, dtype: Any) -> tuple[str, ...]:
        return map_types([tile_box(rows, cols, False, packed) for cols in widths], dtype)

    given = {
        "q_maps": maps(config.rows, config.qk_parts, box_heads(config), query_type(config)),
        "k_maps": maps(config.block_n, config.qk_parts, 1, stored_type(config)),
        "v_maps": maps(config.v_rows, config.v_columns, 1, stored_type(config)),
        "o_maps": maps(config.rows, config.store_parts, box_heads(config), output_type(config)),
    }
    return attention_source(prefill_kernel, args, config, features, given)


def transpose_values_source(args: Mapping[str, Any], cols: int, ragged: bool) -> GluonASTSource:
    """Source of the kernel that transposes 8-bit values whose padded head dim is `cols`."""
    hints = {"values.pointer": ALIGNED, "out_ptr": ALIGNED}
    return kernel_source(transpose_values_kernel, args, {"cols": cols, "ragged": ragged}, hints=hints)
