"""What a problem decides of the tiles of NVIDIA's backward kernels, by hand."""

from dataclasses import replace

import pytest

from tests.unit.kernels.backward.builds import long_problem
from warpattn.kernels.nvidia.backward.tiles import MOST_TOGETHER, padded_columns, problem_fields
from warpattn.kernels.sm90.backward.config import choose_config

KEYS = 128  # of a tile


@pytest.mark.parametrize(
    ("mask", "tiles", "more", "deterministic", "rotates"),
    [
        ("full", MOST_TOGETHER, 0, True, True), ("full", MOST_TOGETHER, 1, True, False),
        ("full", MOST_TOGETHER, 1, False, True), ("causal", 1, 0, False, False), ("causal", 1, 0, True, False),
    ],
)  # fmt: skip
def test_ctas_go_round_where_none_waits_in_vain(
    mask: str, tiles: int, more: int, deterministic: bool, rotates: bool
) -> None:
    """In a fixed order they wait for each other in a circle: all of a head must run at once. Masks leave tiles out."""
    problem = replace(long_problem(64, mask), seq_k=tiles * KEYS + more)
    assert problem_fields(problem, KEYS, deterministic)["rotate"] == rotates
    assert not problem_fields(replace(problem, kind="ragged"), KEYS, deterministic)["rotate"]


@pytest.mark.parametrize(
    ("mask", "group", "deterministic", "together", "mirrored"),
    [
        ("causal", 2, False, True, False), ("causal", 1, False, False, False), ("causal", 2, True, True, True),
        ("causal", 6, True, True, True), ("causal", 7, True, True, False), ("causal", 1, True, True, True),
        ("full", 2, False, False, False), ("window", 2, False, False, False), ("window", 1, True, False, False),
    ],
)  # fmt: skip
def test_heads_of_a_group_are_side_by_side_where_last_rows_see_all_keys(
    mask: str, group: int, deterministic: bool, together: bool, mirrored: bool
) -> None:
    """In a fixed order single heads, too; up to 384 columns in laps whose CTAs arrive one after the other."""
    problem = long_problem(64, mask, group=group)
    fields, ragged = (problem_fields(replace(problem, kind=kind), KEYS, deterministic) for kind in ("dense", "ragged"))
    assert (fields["side_by_side"], fields["mirrored"]) == (together, mirrored)
    assert (ragged["side_by_side"], ragged["mirrored"]) == (together and group > 1, False)


@pytest.mark.parametrize(
    ("dims", "mask", "group", "copies"),
    [
        ((128, 128), "full", 1, 1), ((128, 128), "causal", 2, 1), ((128, 128), "causal", 4, 2),
        ((64, 64), "full", 1, 2), ((64, 64), "causal", 1, 2), ((64, 64), "window", 1, 2),
        ((256, 256), "full", 1, 2), ((256, 256), "causal", 8, 2), ((192, 128), "causal", 1, 1),
    ],
)  # fmt: skip
def test_ctas_share_two_sums_of_dq_where_they_arrive_faster_than_turns_pass(
    dims: tuple[int, int], mask: str, group: int, copies: int
) -> None:
    """128 keys are two tiles of 64 queries, one of 128; 64 keys are one. Large groups all begin at one tile."""
    problem = long_problem(dims[0], mask, dims[1], group)
    found = [choose_config(problem, deterministic)[0].dq_copies for deterministic in (False, True)]
    assert found == [1, copies]


def test_columns_are_a_power_of_two() -> None:
    assert [padded_columns(dim) for dim in (8, 32, 64, 72, 128, 136)] == [64, 64, 64, 128, 128, 256]


@pytest.mark.parametrize(
    ("dims", "wide", "reduces"),
    [((64, 64), False, True), ((128, 128), False, True), ((192, 128), True, False), ((128, 136), True, True)],
)
def test_ctas_have_fewer_keys_above_128_columns(dims: tuple[int, int], wide: bool, reduces: bool) -> None:
    """A role of its own adds dQ unless the attending warpgroups do."""
    config, _ = choose_config(long_problem(dims[0], dim_v=dims[1]))
    assert (config.wide, config.reduces) == (wide, reduces)
