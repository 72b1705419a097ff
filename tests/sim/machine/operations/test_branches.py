"""Early returns, and other operations that other people's kernels have."""

import pytest
import torch

pytest.importorskip("triton")

from tests.sim.machine.kernels import branch as kernels
from warpattn.sim import SimulationError, compile_for, simulate
from warpattn.sim.host.launches import launches


def _chosen(x: float, way: int) -> float:
    return x if way == 0 else x + 1 if way == 1 else 2 * x if x > 5 else -x


@pytest.mark.parametrize("arch", ["sm90", "gfx950"])
def test_kernels_and_their_functions_return_early(arch: str) -> None:
    x, out = torch.arange(8.0) + 1, torch.full((8,), -7.0)
    with launches(arch) as runs:
        kernels.returning_kernel[(8,)](x, out, 6)
    assert runs.clean, runs
    for program, value in enumerate(x[:6].tolist()):
        for way in range(3):
            value = _chosen(value, way + program)
        assert out[program] == (value * 3 if program == 2 else value + program)
    assert (out[6:] == -7).all()


def test_a_function_of_each_element_has_returns() -> None:
    x, i = torch.randn(32), torch.arange(32)
    with launches("sm90") as runs:
        kernels.mapping_kernel[(1,)](x, out := torch.empty(32), N=32)
    assert runs.clean
    torch.testing.assert_close(out, torch.where(x > 0, torch.where(i > 9, x, 2 * x) + i, -x + i + 1))


@pytest.mark.parametrize("wanted", [1, 0])
def test_a_role_returns_before_it_arrives(wanted: int) -> None:
    compiled = compile_for("sm90", kernels.role_kernel, {"out": "*i32", "wanted": "i32"}, num_warps=4)
    found = simulate(compiled, (1,), {"out": torch.zeros(1).int(), "wanted": wanted}).findings
    assert [finding.kind for finding in found] == ([] if wanted else ["Deadlock"])
    assert wanted or ("_raise (line" in found[0].message and "which has ended" in found[0].message)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_towards_zero_and_high_halves(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, wide = torch.randn(64) * 100, torch.randint(-(2**62), 2**62, (64,))
    cut, high = torch.empty(64, dtype=dtype), torch.empty_like(wide)
    with launches("sm90") as runs:
        kernels.rounding_kernel[(1,)](x, cut, wide, high, N=64)
    assert runs.clean and (cut.float().abs() <= x.abs()).all()
    grown = torch.nextafter(cut, torch.full_like(cut, float("inf")) * x.sign().to(dtype)).float()
    assert (grown.abs() > x.abs()).all()
    unsigned = [value % 2**64 for value in wide.tolist()]
    assert [value % 2**64 for value in high.tolist()] == [u * ((u + 12345) % 2**64) >> 64 for u in unsigned]


def test_a_kernel_asks_for_the_time_and_its_multiprocessor() -> None:
    with launches("sm90") as runs:
        kernels.waiting_kernel[(3,)](out := torch.zeros(3, dtype=torch.int32))
    assert runs.clean and out.tolist() == [0, 1, 2]


@pytest.mark.parametrize("arch", ["sm100", "gfx942"])
def test_scaled_products_of_few_blocks(arch: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(size).to(torch.float8_e4m3fn) for size in ((128, 64), (64, 128)))
    scales = [torch.randint(124, 130, (128, 2), dtype=torch.uint8) for _ in range(2)]
    with launches(arch, schedules="lazy") as runs:
        kernels.scaled_kernel[(1,)](a, b, *scales, out := torch.empty(128, 128), M=128, K=64)
    wide = [torch.exp2(scale.float() - 127).repeat_interleave(32, 1) for scale in scales]
    torch.testing.assert_close(out, (a.float() * wide[0]) @ (b.float() * wide[1].T), atol=1e-2, rtol=1e-2)
    assert runs.clean


@pytest.mark.parametrize("dtype", ["fp32", "i32"])
def test_sums_in_any_order_are_a_race_where_the_order_is_to_be_fixed(dtype: str) -> None:
    """Of floats: integers come out the same."""
    compiled = compile_for("sm90", kernels.sum_kernel, {"out": f"*{dtype}", "x": f"*{dtype}"}, {"N": 16})
    x = torch.ones(16, dtype=torch.float32 if dtype == "fp32" else torch.int32)
    args = {"out": torch.zeros_like(x), "x": x}
    assert simulate(compiled, (2,), args).clean
    found = simulate(compiled, (2,), args, fixed_order=True).findings
    assert [finding.kind for finding in found] == (["Race"] if dtype == "fp32" else [])
    assert dtype == "i32" or "adds to 1 element of out" in found[0].message


def _voted(kind: str, num_warps: int = 4) -> torch.Tensor:
    x, out = torch.ones(128, 4).float(), torch.zeros(128, 4)
    x[40] = 2.0
    with launches("sm90") as runs:
        kernels.voting_kernel[(1,)](x, out, N=4, KIND=kind, num_warps=num_warps)
    assert runs.clean, runs
    return out


@pytest.mark.parametrize("kind", ["rows", "barrier", "loop", "layout", "inside"])
def test_a_branch_of_one_warp_needs_no_other_warp(kind: str) -> None:
    """A vote of a warp decides, maybe by way of a loop; the branch has a maximum over rows of all warps, a barrier, or
    a layout that gives rows to other warps, maybe in a branch inside it."""
    with pytest.raises(SimulationError, match=r"branch\.py:\d+: one warp may be here without the others of its role"):
        _voted(kind)


@pytest.mark.parametrize("kind", ["none", "columns", "outside"])
def test_a_branch_of_one_warp_may_do_what_a_warp_can(kind: str) -> None:
    out = _voted(kind)
    assert (out[40] == (8.0 if kind == "columns" else 4.0)).all()
