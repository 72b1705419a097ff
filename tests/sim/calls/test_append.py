"""append_paged: torch against a loop in plain Python, the kernel in the simulator against torch, and bad input."""


import pytest
import torch

pytest.importorskip("triton")

from warpattn.errors import AttentionError
from warpattn.kernels.cache.launch import NewRows, append_launches
from warpattn.problem.arch import ARCHS
from warpattn.runtime.simulate import Options, run_launch
from warpattn.sequences import PagedKV
from warpattn.serving.append import append_paged
from warpattn.sim.machine.registry import ACTING
from warpattn.sim.machine.registry import TABLE as OPERATIONS
from warpattn.sim.simulate import linked

LENGTHS = (5, 0, 9, 16, 2)
TABLE = [[3, 8, 99, 99], [99, 99, 99, 99], [1, 5, 7, 99], [0, 2, 4, 6], [9, 99, 99, 99]]


def inputs(tokens: int = 3, dim: int = 16, dim_v: int = 16, dtype: torch.dtype = torch.float32, heads: int = 3):
    """(cache of pages of 4 full of NaN, k_new, v_new)."""
    torch.manual_seed(0)
    pages = [torch.full((10, 4, heads, d), float("nan"), dtype=dtype) for d in (dim, dim_v)]
    kv = PagedKV(*pages, torch.tensor(TABLE, dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32))
    new = [torch.randn(len(LENGTHS), tokens, heads, d).to(dtype) for d in (dim, dim_v)]
    return kv, *new


def tables(columns: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(16)[:, None] * 0.7 ** torch.arange(columns)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def by_hand(kv: PagedKV, k_new, v_new, angles=None, interleaved: bool = False):
    """The expected pages, element by element."""
    k_pages, v_pages = kv.k_pages.clone(), kv.v_pages.clone()
    tokens = k_new.shape[1]
    for b, length in enumerate(LENGTHS):
        for t in range(tokens):
            position = length - tokens + t
            if position < 0:
                continue
            page, row = TABLE[b][position // 4], position % 4
            k = k_new[b, t].float()
            if angles is not None:
                half = angles[0].shape[1]
                turned = k.clone()
                for i in range(half):
                    c, s = (float(x[position, i]) for x in angles)
                    first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                    turned[:, first] = k[:, first] * c - k[:, second] * s
                    turned[:, second] = k[:, second] * c + k[:, first] * s
                k = turned
            k_pages[page, row], v_pages[page, row] = k.to(k_pages.dtype), v_new[b, t]
    return k_pages, v_pages


def same(actual: torch.Tensor, expected: torch.Tensor, exact: bool) -> bool:
    tolerance = 0.0 if exact else 2e-6 if actual.dtype == torch.float32 else 2e-2
    return torch.allclose(actual.float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_plain(tokens):
    kv, k_new, v_new = inputs(tokens, dim_v=24)
    expected = by_hand(kv, k_new, v_new)
    assert append_paged(kv.k_pages, kv.v_pages, kv.block_table, kv.lengths, k_new, v_new) is None
    assert same(kv.k_pages, expected[0], True) and same(kv.v_pages, expected[1], True)
    assert not kv.k_pages[8, 0].isnan().any() and kv.k_pages[9, 2:].isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [1, 6, 8])
def test_rotated(columns, interleaved):
    kv, k_new, v_new = inputs()
    angles = tables(columns)
    expected = by_hand(kv, k_new, v_new, angles, interleaved)
    cos, sin = angles
    append_paged(*_flat(kv), k_new, v_new, cos=cos, sin=sin, interleaved=interleaved)
    assert same(kv.k_pages, expected[0], False) and same(kv.v_pages, expected[1], True)


CASES = [(torch.float32, 16, 16, 0, False), (torch.bfloat16, 64, 40, 24, False), (torch.float16, 24, 8, 12, True),
         (torch.bfloat16, 128, 128, 64, True)]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("schedule", ["eager", "adversarial"])
@pytest.mark.parametrize(("dtype", "dim", "dim_v", "columns", "interleaved"), CASES)
def test_kernel(dtype, dim, dim_v, columns, interleaved, schedule, arch):
    kv, k_new, v_new = inputs(3, dim, dim_v, dtype, heads=11)
    angles = tables(columns) if columns else None
    expected = by_hand(kv, k_new, v_new, angles, interleaved)
    (step,) = append_launches(arch, kv, NewRows(k_new, v_new, angles, interleaved))
    report = run_launch(step, Options(schedule))
    assert report.clean, report
    assert same(kv.k_pages, expected[0], columns == 0) and same(kv.v_pages, expected[1], True)


@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_writes_nothing_to_pages_that_are_not_there(arch):
    kv, k_new, v_new = inputs(2)
    kv.block_table[:] = torch.tensor([[-1, 10, 2**30, 2**30]])
    kv.lengths[:] = torch.tensor([5, 8, 3, 40, 1])
    (step,) = append_launches(arch, kv, NewRows(k_new, v_new, None, False))
    report = run_launch(step, Options("eager"))
    assert report.clean, report
    assert kv.k_pages.isnan().all() and kv.v_pages.isnan().all()


@pytest.mark.parametrize("arch", ARCHS)
def test_on_hopper_attention_may_come_early(arch, monkeypatch):
    """Every program lets it before it reads or writes anything."""
    events = []

    def leaving(op):
        return lambda role: events.append("leave")

    def loading(op):
        load = build(op)
        return lambda role, *operands: events.append("load") or load(role, *operands)

    kind, build = OPERATIONS["tt.load"]
    monkeypatch.setitem(OPERATIONS, "tt.load", (kind, loading))
    monkeypatch.setitem(OPERATIONS, "tt.grid_dependency_launch_dependents", (ACTING, leaving))
    kv, k_new, v_new = inputs(1)
    (step,) = append_launches(arch, kv, NewRows(k_new, v_new, None, False))
    linked.cache_clear()
    run_launch(step, Options("eager"))
    linked.cache_clear()
    assert events.count("leave") == (step.grid[0] if arch == "sm90" else 0)
    assert (events[0] == "leave") == (arch == "sm90")


def test_tensors_without_values_are_refused():
    kv, k_new, v_new = (x.to("meta") for x in (inputs()[0].k_pages, *inputs()[1:]))
    table, lengths = (x.to("meta") for x in (inputs()[0].block_table, inputs()[0].lengths))
    with pytest.raises(AttentionError, match="k_new is on the device meta"):
        append_paged(kv, kv.clone(), table, lengths, k_new, v_new)


def _flat(kv: PagedKV):
    return kv.k_pages, kv.v_pages, kv.block_table, kv.lengths


BAD = {
    "k_new is a list": lambda a: a | {"k_new": []},
    "k_new has shape": lambda a: a | {"k_new": a["k_new"][0]},
    "v_new has batch 4": lambda a: a | {"v_new": a["v_new"][:4]},
    "v_new has 2 tokens": lambda a: a | {"v_new": a["v_new"][:, :2]},
    "k_pages has 2 heads": lambda a: a | {"k_pages": a["k_pages"][:, :, :2]},
    "v_pages has head_dim 8": lambda a: a | {"v_pages": a["v_pages"][..., :8]},
    "v_pages has 9 pages": lambda a: a | {"v_pages": a["v_pages"][:9]},
    "v_pages has dtype": lambda a: a | {"v_pages": a["v_pages"].half()},
    "lengths has dtype": lambda a: a | {"lengths": a["lengths"].long()},
    "lengths[0] is 17": lambda a: a | {"lengths": a["lengths"] + 12},
    "lengths[1] is -1": lambda a: a | {"lengths": a["lengths"] - 1},
    "block_table[0, 0] is 77": lambda a: a | {"block_table": torch.full_like(a["block_table"], 77)},
    "row 0 of page 3 gets the tokens of sequences 0 and 1": lambda a: a | {
        "block_table": a["block_table"][:1].repeat(5, 1), "lengths": torch.full_like(a["lengths"], 1)
    },
    "sin is None": lambda a: a | {"cos": tables(4)[0]},
    "cos has 9 columns": lambda a: a | dict(zip(("cos", "sin"), tables(9), strict=True)),
    "cos has 3 rows": lambda a: a | {"cos": tables(4)[0][:3], "sin": tables(4)[1][:3]},
    "k_pages has strides": lambda a: a | {"k_pages": a["k_pages"].transpose(0, 3).contiguous().transpose(0, 3)},
    "interleaved is 'yes'": lambda a: a | {"interleaved": "yes"},
    "k_new requires a gradient": lambda a: a | {"k_new": a["k_new"].requires_grad_()},
}


@pytest.mark.parametrize("start", BAD)
def test_bad_input(start):
    kv, k_new, v_new = inputs()
    good = dict(zip(("k_pages", "v_pages", "block_table", "lengths"), _flat(kv), strict=True))
    with pytest.raises(AttentionError) as raised:
        append_paged(**BAD[start](good | {"k_new": k_new, "v_new": v_new}))
    assert any(reason.startswith(start) for reason in raised.value.reasons), raised.value
    assert kv.k_pages.isnan().all(), "nothing is written before the rules hold"
