"""What the CDNA kernels refuse before anything is compiled."""

from dataclasses import replace

import pytest
import torch

from warpattn.check import AttentionError
from warpattn.kernels.cdna.steps import steps
from warpattn.operands import Operands
from warpattn.problem import Call, examine
from warpattn.sequences import Dense


def test_more_positions_than_a_mask_can_count():
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    ready = examine(Call(q, q, q, Dense(), backend="simulate:gfx950"))
    long = replace(ready, problem=replace(ready.problem, seq_k=2**28))
    with pytest.raises(AttentionError, match="268435456 rows or keys; the gfx950 backend takes fewer"):
        steps(long, Operands(q, q, q, q, None, None), Dense())
