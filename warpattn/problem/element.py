"""Types of tensor elements: one table for plans, kernels' signatures, tile sizes in bytes and error messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Element:
    """One type: Triton's name for it, torch's dtype, and its size."""

    name: str
    dtype: torch.dtype
    bytes: int

    @property
    def pointer(self) -> str:
        """A pointer to such elements in a kernel's signature. Bools are bytes in memory."""
        return "*i8" if self.dtype is torch.bool else f"*{self.name}"


FP8 = Element("fp8e4nv", torch.float8_e4m3fn, 1)
FP16 = Element("fp16", torch.float16, 2)
BF16 = Element("bf16", torch.bfloat16, 2)
FP32 = Element("fp32", torch.float32, 4)
ELEMENTS = (
    Element("i1", torch.bool, 1),
    Element("u8", torch.uint8, 1),
    Element("i8", torch.int8, 1),
    Element("i16", torch.int16, 2),
    Element("i32", torch.int32, 4),
    Element("i64", torch.int64, 8),
    FP16,
    BF16,
    FP32,
    Element("fp64", torch.float64, 8),
)
EIGHT_BIT_ELEMENTS = (  # of keys and values; nothing else that kernels read has them
    FP8,
    Element("fp8e5", torch.float8_e5m2, 1),
    Element("fp8e4b8", torch.float8_e4m3fnuz, 1),
    Element("fp8e5b16", torch.float8_e5m2fnuz, 1),
)
ELEMENT_OF = {element.dtype: element for element in ELEMENTS + EIGHT_BIT_ELEMENTS}
BYTES_OF = {element.name: element.bytes for element in ELEMENT_OF.values()}  # by Triton's name


def element_of(dtype: torch.dtype) -> Element:
    """The element of a torch dtype; KeyError for one that no kernel reads."""
    return ELEMENT_OF[dtype]
