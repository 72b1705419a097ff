"""Every wait for groups of copies, stores or products, of every shipped kernel: looser, it is missed, or reviewed here.

The kernels are those that calls launch in the simulator. Which of them have no such wait is listed, so that a kernel
that gets one is looked at. Backwards in a fixed order are in test_sm90_backward_knockout.py and
test_sm100_backward_knockout.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.cases import Case
from tests.full import test_sm90_knockout
from tests.random_calls import attend
from tests.sim import backward
from tests.sim.calls import test_append_slots, test_merge
from tests.sim.knocking import knocked_out, reviewed
from tests.sim.sm90 import mla
from tests.sim.sm90.decode import Decode, tensors
from tests.sim.sm100 import test_pair
from warpattn.runtime import simulate as runtime
from warpattn.runtime.simulate import Options, run_launch
from warpattn.sim import Report, loosen_waits, simulate
from warpattn.sim.saved import SavedMemory
from warpattn.sim.simulate import ttgir_of

pytestmark = pytest.mark.full

COUNTED = re.compile(r"\b(ttg\.async_wait|ttng\.warp_group_dot_wait|ttng\.async_tma_store_wait)\b")
WITHOUT = {
    "append_kernel", "combine_kernel", "decode_combine_kernel", "finish_kernel", "key_tiles_kernel",
    "merge_kernel", "order_kernel", "prepare_kernel", "transpose_values_kernel",
}  # fmt: skip
E4M3 = torch.float8_e4m3fn
COVERED = ("ttng.warp_group_dot_wait", "dp, dv, p = wait_value_scores(", "the wait of dK behind it covers dV, too")
SPECIAL = 20  # an early key, which most tiles meet


@dataclass(frozen=True)
class Launched:
    """A launch of a call, and the memory that it found."""

    kernel: Any
    grid: Any
    args: Mapping[str, Any]
    memory: SavedMemory

    @property
    def waits(self) -> int:
        """How many waits count groups."""
        return len(COUNTED.findall(ttgir_of(self.kernel)))


def launched(call: Callable[[], object]) -> dict[str, Launched]:
    """The first launch of each kernel of a call."""
    found: dict[str, Launched] = {}

    def note(kernel: Any, grid: Any, args: Mapping[str, Any], *order: Any, **options: Any) -> Report:
        found.setdefault(ttgir_of(kernel), Launched(kernel, grid, args, SavedMemory(args.values())))
        return simulate(kernel, grid, args, *order, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "simulate", note)
        call()
    return found


def of_case(**changes: Any) -> Callable[..., object]:
    """A call of random tensors. `special`: with a NaN."""
    base = Case(batch=1, seq_q=300, seq_k=300, heads_q=2, heads_kv=1, dim=128, dtype=torch.bfloat16, mask="causal")
    case = replace(base, **changes)

    def call(arch: str, special: bool = False) -> None:
        x = case.build()
        if special and isinstance(x.sequence, wa.PagedKV):
            page, row = divmod(SPECIAL, case.page_size)
            x.sequence.v_pages[x.sequence.block_table[0, page], row] = torch.nan
        elif special:
            (x.v if case.kind == "ragged" else x.v[0])[SPECIAL] = torch.nan
        attend(x, f"simulate:{arch}")

    return call


def latent(lengths: tuple[int, ...], page: int) -> Callable[[str], object]:
    """Latent attention; with many lengths some CTA has had an odd number of key tiles when a sequence begins."""

    def call(arch: str) -> None:
        case = mla.Latent(lengths, page=page, tokens=2, mask=wa.Causal())
        x, tail = mla.tensors(case), {"mask": case.mask, "scale": mla.SCALE, "backend": f"simulate:{arch}"}
        if page:
            wa.attention_paged(x.q, x.sequence, **tail)
        else:
            wa.attention(x.q, x.k, x.v, **tail)

    return call


def eight_bit(tokens: int, per: str) -> Callable[[str], object]:
    """Pages of e4m3, a decode step or a prompt."""

    def call(arch: str) -> None:
        scales = {"stored": E4M3, "per": (per, per)}
        q, _, sequence, _ = tensors(Decode((150, 500), 16, tokens=tokens, dim=128, heads=4, heads_kv=2, **scales))
        wa.attention_paged(q, sequence, backend=f"simulate:{arch}")

    return call


def eight_bit_products(arch: str, special: bool = False) -> None:
    """q, k and v of e4m3, multiplied as they are."""
    torch.manual_seed(0)
    q, k, v = (wa.quantize(torch.randn(1, 300, heads, 128)) for heads in (2, 1, 1))
    if special:
        v.values[0, SPECIAL] = torch.nan
    wa.attention(q, k, v, mask=wa.Causal(), backend=f"simulate:{arch}")


def gradients(**changes: Any) -> Callable[[str], object]:
    """The backward; a persistent CTA takes several key tiles."""
    case = replace(backward.Case(300, 300, mask=wa.Causal(), heads=2, long=True), **changes)
    return lambda arch: backward.simulated(replace(case, arch=arch), programs=2)


def dense_launch(case: test_sm90_knockout.Case) -> Callable[..., object]:
    """A launch of Hopper's prefill in one CTA."""

    def call(arch: str, special: bool = False) -> None:
        keys = range(SPECIAL, case.keys, 400) if special else range(0)
        run_launch(replace(case, special=keys).launch(), Options(programs=1))

    return call


PAGED = {"kind": "paged", "batch": 2, "lens_k": (300, 200)}
STEP = {**PAGED, "seq_q": 1, "heads_q": 8, "lens_k": (300, 600)}
RAGGED = {"kind": "ragged", "batch": 2, "lens_q": (200, 130), "lens_k": (300, 200)}
EVERYWHERE: dict[str, Callable[..., object]] = {
    "64": of_case(dim=64),
    "96": of_case(dim=96, mask="none"),
    "128": of_case(),
    "decode": of_case(seq_q=1, seq_k=600, heads_q=8),
    "few": of_case(seq_q=9, seq_k=600, heads_q=8),
    "ragged": of_case(**RAGGED),
    "prompt over pages": of_case(seq_q=150, page_size=64, **PAGED),
    "prompt over small pages": of_case(seq_q=150, page_size=16, **PAGED),
    "pages": of_case(page_size=64, **STEP),
    "odd pages": of_case(page_size=3, **STEP),
    "latent": latent((130,) * 7, 0),
    "latent pages": latent((330, 200, 40, 130, 70, 64, 10), 64),
    "append": test_append_slots.test_kernel_of_one_tensor,
    "merge": lambda arch: test_merge.test_kernel("dense", arch),
}
HOPPER: dict[str, Callable[..., object]] = {
    "256": of_case(dim=256),
    "192": of_case(dim=192, mask="window-future"),  # slots are loaded again
    "split": dense_launch(test_sm90_knockout.Case(wa.Causal(), 2, 300, 1100)),
    "recompute": dense_launch(test_sm90_knockout.Case(wa.Padding(torch.tensor([300])), 1, 400, 320)),
    "8 bits, products": eight_bit_products,
    "8 bits, prompt": eight_bit(70, "head"),
    "8 bits": eight_bit(1, "head"),
    "8 bits, tokens": eight_bit(1, "token"),
    "backward 256": gradients(dim=256),
}
NVIDIA: dict[str, Callable[..., object]] = {
    "backward 64": gradients(),
    "backward 128": gradients(dim=128),
    "backward, ragged": gradients(lengths=((100, 200), (200, 100))),
    "512": of_case(dim=512),
    "512 decode": of_case(seq_q=1, seq_k=600, heads_q=8, dim=512),
    "512 odd pages": of_case(**{**STEP, "lens_k": (150, 70)}, page_size=3, dim=512),
}
PROMPTS = {"64", "128", "ragged", "prompt over pages", "prompt over small pages"}
AGAIN = {  # compute tiles with NaN again
    "sm90": {*PROMPTS, "192", "256", "512", "split", "recompute", "8 bits, products"},
    "sm100": {*PROMPTS, "decode", "few", "pages", "odd pages"},
}
CALLS = [
    *((arch, name) for arch in ("sm90", "sm100", "gfx942", "gfx950") for name in EVERYWHERE),
    *((arch, name) for arch in ("sm90", "sm100") for name in NVIDIA),
    *(("sm90", name) for name in HOPPER),
    ("sm100", "pair"),
]


@pytest.mark.parametrize(("arch", "name"), CALLS)
def test_looser_waits_are_missed(arch: str, name: str) -> None:
    call = {**EVERYWHERE, **NVIDIA, **HOPPER, "pair": lambda arch: test_pair.run(test_pair.CASES["causal"])}[name]
    again = [partial(call, arch, special=True)] if name in AGAIN.get(arch, ()) else []
    found = [launched(once) for once in (partial(call, arch), *again)]
    for kernel, launch in found[0].items():
        launches = [launch, *(more[kernel] for more in found[1:])]

        def once(module: Any, schedule: str, launches: list[Launched] = launches) -> Report:
            for launch in launches:
                launch.memory.restore()
                report = simulate(module, launch.grid, launch.args, schedule, step_limit=200_000, first_finding=True)
                if not report.clean:
                    break
            return report

        if launch.waits:
            results = knocked_out(launch.kernel, once, reviewed([COVERED]), change=loosen_waits)
            assert len(results) == 3 * launch.waits
        else:
            cdna = arch == "gfx942" or (arch == "gfx950" and name.startswith("latent"))  # copies through registers
            assert launch.kernel.name in WITHOUT or cdna, f"{launch.kernel.name} waits for nothing"
