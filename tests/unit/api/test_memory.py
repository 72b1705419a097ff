"""Results and caches that share memory with what is read, or with themselves: refused where shapes and strides tell."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import warpattn as wa
from warpattn.problem.memory import apart, extent, overlap, overlaps_itself
from warpattn.serving import append_paged, append_slots

B, S, H, D = 1, 8, 2, 16
SHARED = "must not share memory"


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (B, S, H, D))).to(torch.float16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def places(x: torch.Tensor) -> list[int]:
    """The address of every element."""
    steps = itertools.product(*map(range, x.shape))
    return [x.data_ptr() + x.element_size() * sum(map(int.__mul__, at, x.stride())) for at in steps]


@st.composite
def views(draw):
    """A small view of 64 elements."""
    rank = draw(st.integers(1, 3))
    shape = [draw(st.integers(0, 3)) for _ in range(rank)]
    strides = [draw(st.integers(0, 9)) for _ in range(rank)]
    return shape, strides, draw(st.integers(0, 9))


@given(views(), views())
def test_overlaps_are_those_of_the_elements(first, second):
    memory = torch.zeros(64, dtype=torch.int32)
    a, b = memory.as_strided(*first), memory.as_strided(*second)
    assert overlap(a, b) == bool(set(places(a)) & set(places(b)))
    listed = places(a)
    assert overlaps_itself(a) or len(set(listed)) == len(listed)
    assert not listed or extent(a) == max(listed) - a.data_ptr() + 4
    if apart((a.data_ptr(), extent(a)), (b.data_ptr(),), (extent(b),)):
        assert not overlap(a, b)


@pytest.mark.parametrize("backend", ["reference", "simulate:sm90"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_is_no_operand(backend, name):
    call = {"q": normal(), "k": normal(), "v": normal()}
    for out in (call[name], call[name].view(B, S, H, D)):
        with pytest.raises(wa.AttentionError, match=f"out starts at .* {SHARED} with {name}"):
            wa.attention(**call, out=out, backend=backend)
    rows = normal(B, 2 * S, H, D)
    call[name] = rows[:, :S]
    with pytest.raises(wa.AttentionError, match=SHARED):
        wa.attention(**call, out=rows[:, S - 1 : 2 * S - 1], backend=backend)
    assert wa.attention(**call, out=rows[:, S:], backend=backend).isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "simulate:sm90"])
def test_one_buffer_for_all_is_fine(backend):
    packed = normal(B, S, 4, H, D)
    q, k, v, out = packed.unbind(2)
    wanted = wa.attention(q, k, v, backend=backend)
    assert torch.equal(wa.attention(q, k, v, out=out, backend=backend), wanted)


def test_out_has_a_place_for_each_element():
    q = normal()
    for strides in ((S * D, D, D, 1), (0, H * D, D, 1), (S * H * D, H * D, D, 0)):
        out = torch.zeros(4 * B * S * H * D, dtype=q.dtype).as_strided((B + 1, S, H, D), strides)
        wide = q.expand(B + 1, S, H, D)
        with pytest.raises(wa.AttentionError, match="own place in memory"):
            wa.attention(wide, wide, wide, out=out)


def test_plans_refuse_an_output_that_is_an_operand():
    q, k, v = normal(), normal(), normal()
    plan = wa.DecodePlan(q, (k, v))
    for name, x in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(wa.AttentionError, match=f"out shares memory with {name}"):
            plan(q, (k, v), x)
    assert torch.equal(plan(q, (k, v), normal()), wa.attention(q, k, v))


def test_plans_refuse_their_own_output_as_an_operand():
    q, k, v = normal(), normal(), normal()
    plan = wa.DecodePlan(q, (k, v))
    result = plan(q, (k, v))
    for name, operands in (("q", (result, k, v)), ("k", (q, result, v)), ("v", (q, k, result))):
        with pytest.raises(wa.AttentionError, match=f"the plan's own output shares memory with {name}"):
            plan(operands[0], operands[1:])
    assert torch.equal(plan(result.clone(), (k, v)), wa.attention(wa.attention(q, k, v), k, v))


def test_an_output_on_meta_is_none_of_the_cpu():
    q, k, v = normal(), normal(), normal()
    with pytest.raises(wa.AttentionError, match=r"^out is on the device meta .*; out must have values$"):
        wa.DecodePlan(q, (k, v))(q, (k, v), q.to("meta"))


def cache() -> dict[str, torch.Tensor]:
    return {
        "k_pages": normal(3, 4, H, D), "v_pages": normal(3, 4, H, D), "block_table": ints(0, 1)[:, None],
        "lengths": ints(2, 2), "k_new": normal(2, 1, H, D), "v_new": normal(2, 1, H, D),
    }  # fmt: skip


def test_two_new_tokens_in_one_place():
    call = cache() | {"block_table": ints(1, 1)[:, None]}
    with pytest.raises(wa.AttentionError, match="row 1 of page 1 gets the tokens of sequences 0 and 1"):
        append_paged(**call)
    append_paged(**(call | {"lengths": ints(2, 3)}))  # one page, two places
    assert torch.equal(call["k_pages"][1, 1:3], call["k_new"][:, 0])


def test_pages_that_share_memory():
    call, memory = cache(), normal(3, 4, H, 2 * D)
    for changes, words in (
        ({"k_pages": normal(1, 4, H, D).expand(3, -1, -1, -1)}, "k_pages has shape"),
        ({"v_pages": normal(3 * 4 * H * D).as_strided((3, 4, H, D), (H * D, H * D, D, 1))}, "v_pages has shape"),
        ({"v_pages": call["k_pages"]}, "k_pages start at"),
        ({"k_new": call["k_pages"][:2, :1]}, "k_pages starts at"),
    ):
        with pytest.raises(wa.AttentionError, match=words):
            append_paged(**(call | changes))
    append_paged(**(call | {"k_pages": memory[..., :D], "v_pages": memory[..., D:]}))
    assert torch.equal(memory[0, 1, :, :D], call["k_new"][0, 0])


def test_scales_that_are_written_share_no_memory():
    new, scales = cache(), torch.ones(2, 3, 4, H)
    pages = {name: new[name].to(torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    own, one = {"k_scale": scales[0], "v_scale": scales[1]}, {"k_scale": scales[0], "v_scale": scales[0]}
    for changes, words in (
        (one, "k_scale is written and must not share memory with v_scale"),
        ({"k_scale": torch.ones(3, 4, 1).expand(-1, -1, H)}, "each of its elements must have its own place"),
        ({"k_scale": torch.ones(3, 4, H, requires_grad=True)}, "k_scale requires a gradient; new tokens' scales"),
        ({"v_scale": pages["k_pages"].view(torch.float32)[..., 0]}, "must not share memory with k_pages"),
    ):
        with pytest.raises(wa.AttentionError, match=words):
            append_paged(**(new | pages | own | changes))
    append_paged(**(new | pages | own))
    assert scales[:, 0, 1].ne(1).all()


def test_latent_values_are_columns_of_the_keys():
    pages, new = normal(3, 4, 1, 24), normal(2, 1, 1, 24)
    append_paged(**(cache() | {"k_pages": pages, "v_pages": pages[..., :D], "k_new": new, "v_new": new[..., :D]}))
    assert torch.equal(pages[0, 1], new[0, 0])


def test_latent_values_that_are_not_columns_of_the_keys():
    """Two writes of one place, of which the later one would stay: without the rotation, or with the values' scale."""
    pages, new, angles = normal(3, 4, 1, 24), normal(2, 1, 1, 24), normal(2, 8, 4)
    call = cache() | {"k_pages": pages, "v_pages": pages[..., :D], "k_new": new, "v_new": new[..., :D]}
    before = pages.clone()
    with pytest.raises(wa.AttentionError, match="first columns of k_pages and cos is given"):
        append_paged(**call, cos=angles[0], sin=angles[1])
    new, named = new[:, 0], {"positions": ints(1, 2), "cos": angles[0], "sin": angles[1]}
    with pytest.raises(wa.AttentionError, match="first columns of k_pages and cos is given"):
        append_slots(new, new[..., :D], pages, pages[..., :D], ints(1, -1), **named)
    assert torch.equal(pages, before)
    narrow = torch.zeros(3, 4, 1, 24).to(torch.float8_e4m3fn)
    call |= {"k_pages": narrow, "v_pages": narrow[..., :D]}
    half, one = torch.tensor(0.5), torch.ones(3, 4, 1)
    others = ((half, None), (None, half), (half, half * 2), (half, torch.ones(1)), (one, one.clone()), (half, one))
    for scales in others:
        with pytest.raises(wa.AttentionError, match="first columns of k_pages and have another scale"):
            append_paged(**call, **dict(zip(("k_scale", "v_scale"), scales, strict=True)))
    assert not narrow.float().any()
    append_paged(**call, k_scale=half, v_scale=torch.tensor([0.5]))
    assert torch.equal(narrow[0, 1].float(), wa.quantize(call["k_new"][0], scale=half).values[0].float())
