"""Triton's cache tells kernels of a backward apart by the source text of what an architecture adds to them."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

EDITED = SimpleNamespace(cache_key="edited")


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_an_edited_function_is_another_kernel(arch: str) -> None:
    code = import_module(f"warpattn.kernels.{arch}.backward.kernel").DEVICE_CODE
    products = code.products
    changed = [
        replace(products, layout="another"), replace(products, memory=EDITED), replace(products, multiply=EDITED),
    ]  # fmt: skip
    edited = [replace(code, make_rings=EDITED), replace(code, start_roles=EDITED)]
    edited += [replace(code, products=other) for other in changed]
    assert len({x.cache_key for x in (products, *changed)}) == 4
    assert len({x.cache_key for x in (code, *edited)}) == 6
