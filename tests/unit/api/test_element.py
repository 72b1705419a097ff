"""The one table of element types against torch and Triton."""

import pytest
import torch

from warpattn.problem.backends import KERNEL_DTYPES
from warpattn.problem.element import ELEMENTS, Element, element_of

triton_dtype = pytest.importorskip("triton.language", exc_type=ImportError).dtype


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_sizes_are_those_of_torch_and_names_those_of_triton(element: Element) -> None:
    assert element.bytes == torch.empty((), dtype=element.dtype).element_size()
    name = {"i1": "int1", "u8": "uint8"}.get(element.name, element.name.replace("i", "int"))
    assert triton_dtype(name).primitive_bitwidth == (1 if element.dtype is torch.bool else 8 * element.bytes)
    assert element_of(element.dtype) is element


def test_kernels_take_elements_of_the_table() -> None:
    assert [element_of(dtype).name for dtype in KERNEL_DTYPES] == ["fp16", "bf16"]
