"""flash-attn 3 and 4 by their own names, and how modules are put in place and taken away again."""

import importlib.util
import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import warpattn as wa
from tests.unit.integrations.flash_attn import flash_attn_truth as truth
from warpattn.integrations import flash_attn
from warpattn.integrations.flash_attn import version2, version3, version4

B, SQ, SK, H, HKV, D, DV = 2, 7, 11, 4, 2, 16, 8
CU_Q = torch.tensor([0, 3, 7, 7], dtype=torch.int32)
CU_K = torch.tensor([0, 5, 9, 11], dtype=torch.int32)
USED_Q, USED_K = (torch.tensor(x, dtype=torch.int32) for x in ([2, 4, 0], [3, 4, 1]))
MODULES = {name for modules in flash_attn.MODULES.values() for name in modules}


@pytest.fixture
def _all_installed():
    for version in (2, 3, 4):
        flash_attn.install(version)
    yield
    flash_attn.uninstall()


def dense():
    return torch.randn(B, SQ, H, D), torch.randn(B, SK, HKV, D), torch.randn(B, SK, HKV, DV)


def rows():
    return torch.randn(7, H, D), torch.randn(11, HKV, D), torch.randn(11, HKV, DV)


@pytest.mark.usefixtures("_all_installed")
def test_version_3():
    from flash_attn_interface import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

    q, k, v = dense()
    out, lse = flash_attn_func(q, k, v, 0.4, True, softcap=0.9, attention_chunk=3, return_attn_probs=True)
    meaning = {"keep": lambda i, j: (j <= i) & (i // 3 == j // 3), "softcap": 0.9, "scale": 0.4}
    expected, expected_lse = truth.batch(q, k, v, **meaning)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert isinstance(flash_attn_func(q, k, v), torch.Tensor)
    qkv = torch.randn(B, SQ, 3, H, D)
    expected = flash_attn_func(*qkv.unbind(2), window_size=(2, 1))
    assert torch.equal(flash_attn_qkvpacked_func(qkv, window_size=(2, 1)), expected)
    grouped = torch.randn(B, SQ, H + 2 * HKV, D)
    expected = flash_attn_func(*grouped.split([H, HKV, HKV], 2))
    assert torch.equal(flash_attn_qkvpacked_func(grouped, num_heads_q=H), expected)
    for heads in (None, 3, 8):
        with pytest.raises(wa.AttentionError, match=f"^num_heads_q is {heads}"):
            flash_attn_qkvpacked_func(grouped, num_heads_q=heads)
    q, k, v = rows()
    out, lse = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 4, 5, None, None, 0.4, True, return_attn_probs=True)
    expected, expected_lse = truth.ragged(q, k, v, CU_Q, CU_K, keep=truth.causal, scale=0.4)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("used", ["seqused_q", "seqused_k", "both"])
def test_used_lengths(used):
    q, k, v = rows()
    given = {"seqused_q": USED_Q, "seqused_k": USED_K}
    given = given if used == "both" else {used: given[used]}
    out, lse = version3.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 4, 5, causal=True, return_attn_probs=True, **given)
    four, four_lse = version4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, causal=True, return_lse=True, **given
    )
    assert torch.equal(four, out)
    assert torch.equal(four_lse, lse)
    for b in range(3):
        start, queries = int(CU_Q[b]), int(given.get("seqused_q", CU_Q.diff())[b])
        keys = slice(int(CU_K[b]), int(CU_K[b] + given.get("seqused_k", CU_K.diff())[b]))
        mine = slice(start, start + queries)
        expected, expected_lse = truth.attend(q[mine], k[keys], v[keys], truth.causal)
        torch.testing.assert_close(out[mine], expected)
        torch.testing.assert_close(lse[:, mine], expected_lse)
        unused = slice(start + queries, int(CU_Q[b + 1]))
        assert (out[unused] == 0).all()
        assert (lse[:, unused] == -torch.inf).all()


def test_combined_parts_are_the_whole():
    q, k, v = dense()
    parts = [version3.flash_attn_func(q, k[:, i], v[:, i], return_attn_probs=True)
             for i in (slice(0, 4), slice(4, 9), slice(9, 11))]  # fmt: skip
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])  # (splits, batch, seq, heads)
    lses[1, 0, 0] = -torch.inf
    outs[1, 0, 0] = torch.nan  # nothing was seen there: never read
    out, lse = version3.flash_attn_combine(outs, lses)
    whole, whole_lse = version3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert out[0, 0].isfinite().all()
    torch.testing.assert_close(out[1], whole[1])
    torch.testing.assert_close(out[0, 1:], whole[0, 1:])
    torch.testing.assert_close(lse[1], whole_lse[1].T)
    given = torch.full(whole.shape, torch.nan, dtype=torch.bfloat16)
    assert version3.flash_attn_combine(outs, lses, out=given)[0] is given
    assert torch.equal(given, out.bfloat16())
    assert torch.equal(version3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0], out.half())
    out, lse = version3.flash_attn_combine(outs, torch.full_like(lses, -torch.inf))
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -torch.inf).all()
    with pytest.raises(wa.AttentionError, match="lse_partial has shape"):
        version3.flash_attn_combine(outs, lses[..., 0])


@pytest.mark.parametrize("lse", [1e30, -1e30, float(torch.finfo(torch.float32).min)])
def test_parts_of_one_extreme_lse_count_alike(lse):
    outs = torch.randn(4, 2, 3, 5, 8)
    merged, whole = version3.flash_attn_combine(outs, torch.full(outs.shape[:-1], lse))
    torch.testing.assert_close(merged, outs.mean(0))
    assert (whole == lse).all()


def test_scheduler_metadata_is_accepted_where_it_is_made_for():
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    metadata = version3.get_scheduler_metadata(
        2, 1, 8, H, HKV, D, lengths, torch.bfloat16, causal=True, page_size=4, num_splits=2
    )
    assert metadata.dtype == torch.int32
    q, k, v = torch.randn(2, 1, H, D), torch.randn(2, 8, HKV, D), torch.randn(2, 8, HKV, D)
    out = version3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, scheduler_metadata=metadata)
    for b, n in enumerate((3, 5)):
        torch.testing.assert_close(out[b], truth.attend(q[b], k[b, :n], v[b, :n])[0])


@pytest.mark.usefixtures("_all_installed")
def test_version_4_results_are_tuples_and_windows_may_be_none():
    from flash_attn.cute import flash_attn_func

    q, k, v = dense()
    for window, keep in (
        ((None, None), truth.everything), ((-1, -1), truth.everything), ((2, None), truth.window(2, 100)),
        ((None, 1), truth.window(100, 1)), ((3, 0), truth.window(3, 0)),
    ):  # fmt: skip
        out, none = flash_attn_func(q, k, v, window_size=window)
        assert none is None
        torch.testing.assert_close(out, truth.batch(q, k, v, keep)[0])
    for dtype in (torch.bfloat16, torch.float32):
        sink = torch.randn(H).to(dtype)
        out, lse = flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
        expected, expected_lse = truth.batch(q, k, v, truth.causal, sinks=sink)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
    with pytest.raises(wa.AttentionError, match=r"^learnable_sink has shape"):
        flash_attn_func(q, k, v, learnable_sink=torch.zeros(3))


def test_version_4_functions():
    q, k, v = dense()
    table, scale = torch.randn(H, SK), 0.5
    plain = lambda b, h, row, key: key <= row  # noqa: E731
    out, _ = version4.flash_attn_func(q, k, v, mask_mod=plain)
    torch.testing.assert_close(out, truth.batch(q, k, v, lambda i, j: j <= i - (SK - SQ))[0])
    for mod in (
        lambda b, h, row, key, info, aux: key <= row + info.seqlen_k - info.seqlen_q,
        lambda b, h, row, key, info, aux, numbers: key <= row + numbers[0] + 0 * aux[0][h, key].int(),
        wa.Causal(),
    ):
        out, _ = version4.flash_attn_func(q, k, v, mask_mod=mod, aux_tensors=[table], aux_scalars=(SK - SQ,))
        torch.testing.assert_close(out, truth.batch(q, k, v, truth.causal)[0])
    for mod in (
        lambda s, b, h, row, key, aux: s + aux[0][h, key],
        lambda s, b, h, row, key, info, aux: s + aux[0][h, key],
        lambda s, b, h, row, key, info, aux, numbers: s + aux[0][h, key] * numbers[0],
        wa.Bias(table[:, None]),
    ):
        out, _ = version4.flash_attn_func(q, k, v, score_mod=mod, aux_tensors=[table], aux_scalars=(1.0,))
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=table[:, None].expand(H, SQ, SK), enable_gqa=True
        )
        torch.testing.assert_close(out, expected.transpose(1, 2))
    table.requires_grad_()
    out, _ = version4.flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j, aux: s * aux[0][h, j],
                                      aux_tensors=[table], softmax_scale=scale)  # fmt: skip
    (gradient,) = torch.autograd.grad(out.sum(), table)
    assert gradient.isfinite().all()
    assert (gradient != 0).any()


@pytest.mark.parametrize("batched", [True, False])
def test_version_4_pages(batched):
    table = torch.tensor([[5, 2], [0, 3]], dtype=torch.int32)
    pages_k, pages_v = torch.randn(6, 4, HKV, D), torch.randn(6, 4, HKV, DV)
    lengths = torch.tensor([5, 8], dtype=torch.int32)
    q = torch.randn(2, 3, H, D)
    starts = {} if batched else {"cu_seqlens_q": torch.tensor([0, 3, 6], dtype=torch.int32), "max_seqlen_q": 3}
    out, lse = version4.flash_attn_varlen_func(
        q if batched else q.flatten(0, 1), pages_k, pages_v, seqused_k=lengths, page_table=table, causal=True,
        return_lse=True, **starts,
    )  # fmt: skip
    out, lse = (out, lse) if batched else (out.unflatten(0, (2, 3)), lse.unflatten(1, (2, 3)).transpose(0, 1))
    for b, n in enumerate((5, 8)):
        k, v = (x[table[b].long()].flatten(0, 1)[:n] for x in (pages_k, pages_v))
        expected, expected_lse = truth.attend(q[b], k, v, truth.causal)
        torch.testing.assert_close(out[b], expected)
        torch.testing.assert_close(lse[b], expected_lse)
    with pytest.raises(wa.AttentionError, match="lengths of the paged sequences are missing"):
        version4.flash_attn_varlen_func(q, pages_k, pages_v, page_table=table)


def test_version_4_batches_without_offsets():
    q, k, v = dense()
    used = torch.tensor([4, 9], dtype=torch.int32)
    out, _ = version4.flash_attn_varlen_func(q, k, v, seqused_k=used)
    for b, n in enumerate((4, 9)):
        torch.testing.assert_close(out[b], truth.attend(q[b], k[b, :n], v[b, :n])[0])


def test_version_4_ragged_options():
    q, k, v = rows()
    sinks, table = torch.randn(H), torch.randn(H, SK)
    starts = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 4, "max_seqlen_k": 5}
    out, lse = version4.flash_attn_varlen_func(
        q, k, v, **starts, window_size=(2, 1), learnable_sink=sinks, softcap=0.9, softmax_scale=0.3, return_lse=True
    )
    meaning = {"keep": truth.window(2, 1), "sinks": sinks, "softcap": 0.9, "scale": 0.3}
    expected, expected_lse = truth.ragged(q, k, v, CU_Q, CU_K, **meaning)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    out, none = version4.flash_attn_varlen_func(
        q, k, v, **starts, aux_tensors=[table], aux_scalars=(2.0,),
        mask_mod=lambda b, h, i, j, info, aux: j <= i + info.seqlen_k - info.seqlen_q,
        score_mod=lambda s, b, h, i, j, info, aux, numbers: s + aux[0][h, j] * numbers[0] * (b + 1),
    )  # fmt: skip
    assert none is None
    for b in range(3):
        mine, keys = slice(int(CU_Q[b]), int(CU_Q[b + 1])), slice(int(CU_K[b]), int(CU_K[b + 1]))
        count, size = mine.stop - mine.start, keys.stop - keys.start
        bias = (table[:, :size] * 2.0 * (b + 1))[:, None].expand(H, count, size)
        hidden = ~torch.ones(count, size).tril(size - count).bool()
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q[mine], k[keys], v[keys])), bias.masked_fill(hidden, -torch.inf),
            enable_gqa=True,
        )  # fmt: skip
        torch.testing.assert_close(out[mine], expected.transpose(0, 1))


EVERY = [(module, name) for module in (version2, version3, version4) for name in module.__all__]


@pytest.mark.parametrize(("module", "name"), EVERY, ids=lambda x: x if isinstance(x, str) else x.__name__[-1])
def test_every_argument_is_read_refused_or_a_hint(module, name, monkeypatch):
    """What the function asks for, when it is followed into what it calls."""
    function = getattr(module, name)
    text = inspect.getsource(inspect.unwrap(function))
    helpers = ["_tail", "_trained", "_result", "_dense", "_extra", "_keeps_lse"] + ["_scaled"] * ("_scaled(" in text)
    text += "".join(inspect.getsource(getattr(module, helper)) for helper in helpers if hasattr(module, helper))
    if "kvcache" in name:
        text += inspect.getsource(sys.modules["warpattn.integrations.flash_attn.cache"])
    read = {argument for argument in inspect.signature(function).parameters if f"given.{argument}" in text}
    assert not function.refused & function.hints
    assert read | function.refused | function.hints == set(inspect.signature(function).parameters)
    assert not function.refused & read


REFUSED = [(module, name, argument) for module, name in EVERY for argument in sorted(getattr(module, name).refused)]


@pytest.mark.parametrize(("module", "name", "argument"), REFUSED, ids=str)
def test_every_refused_argument_is_named(module, name, argument):
    function = getattr(module, name)
    parameters = inspect.signature(function).parameters
    given = {p.name: torch.zeros(1, 1, 1, 1) for p in parameters.values() if p.default is p.empty}
    with pytest.raises(wa.AttentionError, match=f"^{argument} is a torch.float32 tensor of shape"):
        function(**given, **{argument: torch.ones(2)})


HINTS = [(module, name, argument) for module, name in EVERY for argument in sorted(getattr(module, name).hints)
         if name in ("flash_attn_func", "flash_attn_varlen_func")]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "argument"), HINTS, ids=str)
def test_hints_change_nothing(module, name, argument):
    tensors = dense() if name == "flash_attn_func" else rows()
    tensors = (*tensors[:2], tensors[1]) if module is version2 else tensors
    starts = {} if name == "flash_attn_func" else {
        "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 4, "max_seqlen_k": 5
    }  # fmt: skip
    results = [getattr(module, name)(*tensors, **starts, **hint) for hint in ({}, {argument: 1})]
    outs = [result[0] if isinstance(result, tuple) else result for result in results]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask_mod": lambda b, h, i, j: i > j, "causal": True}, "^mask_mod is given with causal"),
        ({"score_mod": lambda s, b, h, i, j: s, "softcap": 1.0}, "^score_mod is given with softcap"),
        ({"mask_mod": lambda b, h: h > b}, "^mask_mod takes 2 arguments"),
        ({"score_mod": 3}, "^score_mod is 3"),
        ({"score_mod": lambda s, b, h, i, j, aux: torch.lgamma(s)}, "lgamma has no translation"),
    ],
)
def test_functions_of_version_4_that_do_not_fit(given, message):
    with pytest.raises(wa.AttentionError, match=message):
        version4.flash_attn_func(*dense(), **given)


def test_dense_attention_in_compiled_graphs():
    q = torch.randn(1, 8, 2, D)
    calls = (
        lambda q: version2.flash_attn_func(q, q, q, causal=True, window_size=(3, 0), softcap=3.0),
        lambda q: version3.flash_attn_func(q, q, q, causal=True, attention_chunk=4),
        lambda q: version4.flash_attn_func(q, q, q, causal=True, return_lse=True)[1],
    )
    with torch.no_grad():
        for call in calls:
            assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(q), call(q))


def test_modules_are_installed_and_taken_away():
    assert not MODULES & set(sys.modules)
    real = ModuleType("flash_attn")
    sys.modules["flash_attn"] = real
    try:
        flash_attn.install(4)
        assert sys.modules["flash_attn"] is real
        assert real.cute.flash_attn_func is version4.flash_attn_func
        flash_attn.install(2)
        flash_attn.install(3)
        assert set(sys.modules) >= MODULES
        import flash_attn as theirs

        assert theirs is not real
        assert theirs.cute is sys.modules["flash_attn.cute"]
        assert theirs.__version__ == "2.8.3+warpattn"
        assert theirs.flash_attn_interface.flash_attn_func is theirs.flash_attn_func is version2.flash_attn_func
        assert importlib.util.find_spec("flash_attn.bert_padding").origin == "warpattn"
        flash_attn.uninstall()
        assert sys.modules["flash_attn"] is real
        assert not hasattr(real, "cute")
        assert set(sys.modules) & MODULES == {"flash_attn"}
    finally:
        sys.modules.pop("flash_attn", None)
        flash_attn.uninstall()
    flash_attn.uninstall()  # nothing left to undo
    with pytest.raises(wa.AttentionError, match=r"^version is 5; it must be one of 2, 3, 4"):
        flash_attn.install(5)


PROGRAM = """
import sys
import torch
{first}
import flash_attn
import flash_attn.cute
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func
from flash_attn.cute import flash_attn_func as newest
import flash_attn_interface
from flash_attn_3.flash_attn_interface import flash_attn_with_kvcache

q, k, v = (torch.randn(1, 6, 2, 16, dtype=torch.bfloat16) for _ in range(3))
out = flash_attn_func(q, k, v, dropout_p=0.0, causal=True)
assert torch.equal(out, newest(q, k, v, causal=True)[0])
assert torch.equal(out, flash_attn_interface.flash_attn_func(q, k, v, causal=True))
cu = torch.tensor([0, 6], dtype=torch.int32)
assert torch.equal(out[0], flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 6, 6, causal=True))
assert torch.equal(out, flash_attn_with_kvcache(q, k, v, causal=True))
"""


def test_a_program_for_flash_attn_runs_unmodified():
    first = "from warpattn.integrations import flash_attn as ours\nfor v in (4, 3, 2): ours.install(v)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(first=first)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": None}, "^q is None; it must be a tensor of rank 4, without cu_seqlens_q"),
        ({"q": torch.ones(3, 2, 8)}, r"^q is a torch.float32 tensor of shape \(3, 2, 8\); it must be a"),
        ({"k": torch.ones(3, 2, 8)}, "^k is .* rank 4, without cu_seqlens_k"),
        ({"v": torch.ones(3, 2, 8)}, "^v is .* rank 4, without cu_seqlens_k"),
        ({"cu_seqlens_q": 3}, r"^cu_seqlens_q is 3; it must be a tensor of rank 1, \(batch \+ 1\)"),
        ({"seqused_k": [1]}, r"^seqused_k is \[1\]; it must be a tensor of rank 1, \(batch\)"),
        ({"cu_seqlens_k": CU_K, "seqused_k": CU_K}, "^seqused_k has 4 elements; cu_seqlens_k has offsets of 3 seq"),
        ({"max_seqlen_k": 1.5}, "^max_seqlen_k is 1.5; it must be an int"),
        ({"causal": "x"}, "^causal is 'x'; it must be True or False"),
        ({"causal": torch.ones(2)}, r"^causal is a torch.float32 tensor of shape \(2,\); it must be True or False"),
        ({"gather_kv_indices": torch.ones(2).numpy()}, "^gather_kv_indices is a NumPy array of shape .*; keys are not"),
    ],
)
def test_what_is_no_batch_length_or_flag(changed, words):
    x = torch.ones(1, 3, 2, 8)
    with pytest.raises(wa.AttentionError, match=words):
        version4.flash_attn_varlen_func(**({"q": x, "k": x, "v": x} | changed))
