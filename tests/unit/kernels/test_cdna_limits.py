"""What the CDNA kernels refuse before anything is compiled."""

from dataclasses import replace

import pytest
import torch

from warpattn.errors import AttentionError
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.problem import Call, validate
from warpattn.problem.operands import Operands
from warpattn.sequences import Dense


def test_more_positions_than_a_mask_can_count():
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    ready = validate(Call(q, q, q, Dense(), backend="simulate:gfx950"))
    long = replace(ready, problem=replace(ready.problem, seq_k=2**28))
    with pytest.raises(AttentionError, match="268435456 rows or keys; the gfx950 backend takes fewer"):
        launches_of_choice(long, Operands(q, q, q, q, None, None), Dense())


@pytest.mark.parametrize("backend", ["simulate:gfx942", "simulate:gfx950"])
@pytest.mark.parametrize(("dim", "dim_v"), [(257, 64), (264, 64), (64, 264)])
def test_head_dims_are_at_most_256(backend, dim, dim_v):
    q, v = torch.empty(1, 1, 1, dim, dtype=torch.bfloat16), torch.empty(1, 1, 1, dim_v, dtype=torch.bfloat16)
    with pytest.raises(AttentionError, match="takes head dims up to 256"):
        validate(Call(q, q, v, Dense(), backend=backend))


def test_more_elements_than_32_bits_count():
    """Strides go to the kernel in units of 8 elements and offsets are 64 bits: no tensor is too large as a whole."""
    q = torch.empty(1, 70, 2, 64, dtype=torch.bfloat16)
    wide = torch.empty_strided((3, 90, 2, 64), (2**33, 64, 2**32, 1), dtype=torch.bfloat16, device="meta")
    assert wide.stride(0) * 2 > 2**33
    ready = validate(Call(q, q, q, Dense(), backend="simulate:gfx950"))
    (step,) = launches_of_choice(ready, Operands(q, wide, wide, q, None, None), Dense())
    assert step.args["k_ptr"] is wide and step.args["strides"].k == (2**30, 8, 2**29)


def test_strides_that_32_bits_do_not_count_are_refused():
    q = torch.empty(1, 70, 2, 64, dtype=torch.bfloat16)
    wide = torch.empty_strided((3, 90, 2, 64), (2**34, 64, 2**33, 1), dtype=torch.bfloat16, device="meta")
    ready = validate(Call(q, q, q, Dense(), backend="simulate:gfx942"))
    with pytest.raises(AttentionError, match="strides must be below 34359738368 bytes"):
        launches_of_choice(ready, Operands(q, wide, wide, q, None, None), Dense())


def test_keys_that_lie_too_far_apart_are_copied_together():
    """32-bit offsets reach 2 GiB from the first row of a tile."""
    far = torch.empty_strided((1, 90, 2, 64), (0, 2**25, 64, 1), dtype=torch.bfloat16, device="meta")
    q = torch.empty(1, 70, 2, 64, dtype=torch.bfloat16)
    ready = validate(Call(q, q, q, Dense(), backend="simulate:gfx950"))
    (step,) = launches_of_choice(ready, Operands(q, far, far, q, None, None), Dense())
    assert step.args["k_ptr"] is not far and step.args["k_ptr"].stride(1) == 128
