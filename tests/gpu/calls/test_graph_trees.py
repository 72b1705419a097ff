"""The first calls of a process, inside of `torch.compile(mode="reduce-overhead")`: graphs own what is made there."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CHILD = """
import sys
import torch
import warpattn as wa

kind = sys.argv[1]
torch.manual_seed(0)
rows = 2048 if kind == "prefill" else 1
q = torch.randn(2, rows, 8, 128, device="cuda").bfloat16()
if kind == "pages":
    pages = torch.randn(2, 512, 16, 2, 128, device="cuda").bfloat16()
    table, lengths = torch.arange(512, device="cuda").int().view(2, 256), torch.tensor([4000, 900], device="cuda").int()
    kv = wa.PagedKV(*pages, table, lengths)

    def attend(q, *_):
        return wa.attention_paged(q, kv, mask=wa.Causal())
else:
    kv = torch.randn(2, 2, max(rows, 4096), 2, 128, device="cuda").bfloat16()

    def attend(q, kv=kv, backend="auto"):
        return wa.attention(q, *kv, mask=wa.Causal(), backend=backend)

compiled = torch.compile(lambda q: 2 * attend(q), fullgraph=True, mode="reduce-overhead")
for _ in range(5):  # run once, recorded, replayed
    torch.compiler.cudagraph_mark_step_begin()
    out = compiled(q).clone()
    eager = 2 * attend(q)  # beside it, on the usual stream
    expected = 2 * attend(q.float(), kv.float(), "reference") if kind != "pages" else eager.float()
    assert torch.equal(out, eager), (out - eager).abs().max()
    assert (out.float() - expected).abs().max() < 0.05
    q.normal_()
print("right")
"""


@pytest.mark.parametrize("kind", ["prefill", "decode", "pages"])
def test_the_first_calls_of_a_process(kind):
    command = [sys.executable, "-W", "ignore", "-c", CHILD, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stdout + done.stderr[-3000:]
