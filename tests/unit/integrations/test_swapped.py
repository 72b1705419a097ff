"""torch's scaled_dot_product_attention swapped for a block: in torch's layers, compiled, checkpointed, mapped."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import warpattn as wa
from warpattn.integrations import torch_sdpa
from warpattn.integrations.torch_sdpa import scaled_dot_product_attention, swapped


def test_swapped_in_for_a_block_only():
    from torch.nn.functional import scaled_dot_product_attention as imported_before

    q, k, v = (torch.randn(2, 4, 5, 16) for _ in range(3))
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 6, 32)
    expected = layer(x, x, x, need_weights=False)[0]
    with swapped():
        for call in (F.scaled_dot_product_attention, imported_before):
            with pytest.raises(wa.AttentionError, match="dropout_p"):
                call(q, k, v, dropout_p=0.5)
            assert torch.equal(call(q, k, v), scaled_dot_product_attention(q, k, v))
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each call of our attention by `scaled_dot_product_attention`."""
    seen: list[str] = []
    whole = torch_sdpa.attention
    monkeypatch.setattr(torch_sdpa, "attention", lambda *x, **named: seen.append("dense") or whole(*x, **named))
    return seen


LAYERS = {
    "attention": lambda: torch.nn.MultiheadAttention(32, 4, batch_first=True),
    "encoder": lambda: torch.nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
    "decoder": lambda: torch.nn.TransformerDecoderLayer(32, 4, 16, dropout=0.0, batch_first=True),
}


def encoder_layer(dropout: float = 0.0) -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(32, 4, 16, dropout=dropout, batch_first=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_torchs_layers_run_ours_within_the_block(name, training, ours):
    """The evaluation of an encoder, too: torch's fast path is off where a mode looks."""
    layer, x = LAYERS[name]().train(training), torch.randn(2, 6, 32)
    given = {"attention": (x, x, x, None, False), "encoder": (x,), "decoder": (x, x)}[name]
    with torch.set_grad_enabled(training):
        expected = layer(*given)
        assert not ours
        with swapped():
            found = layer(*given)
    assert len(ours) == {"attention": 1, "encoder": 2, "decoder": 2}[name]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("first", ["device", "block"])
def test_a_layer_runs_ours_under_a_default_device(first, ours):
    """Which is a mode of torch's as well, around the block or within it."""
    layer, x = LAYERS["attention"](), torch.randn(2, 6, 32)
    outer, inner = (torch.device("cpu"), swapped()) if first == "device" else (swapped(), torch.device("cpu"))
    with outer, inner:
        layer(x, x, x, need_weights=False)
    assert len(ours) == 1


def test_torchs_layers_have_no_dropout_within_the_block():
    layer, x = encoder_layer(0.1), torch.randn(2, 6, 32)
    with swapped():
        layer.eval()(x)
        with pytest.raises(wa.AttentionError, match=r"dropout_p is 0.1; there is no dropout"):
            layer.train()(x)


@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_layer_runs_ours_within_the_block(inside, ours):
    layer, x = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)

    def run(x):
        with swapped() if inside else nullcontext():
            return layer(x, x, x, need_weights=False)[0]

    torch._dynamo.reset()
    names = []
    fn = torch.compile(run, fullgraph=True, backend=lambda graph, _: names.append(str(graph.graph)) or graph)
    with nullcontext() if inside else swapped():
        found = fn(x)
    assert len(names) == 1 and "scaled_dot_product_attention" not in names[0]
    torch.testing.assert_close(found, layer(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_a_function_that_enters_the_block(reentrant, ours):
    layer, x = LAYERS["attention"](), torch.randn(2, 6, 32, requires_grad=True)

    def run(x):
        with swapped():
            return layer(x, x, x, need_weights=False)[0]

    checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()
    assert len(ours) == 2
    (expected,) = torch.autograd.grad(layer(x, x, x, need_weights=False)[0].square().sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_a_block_within_a_checkpoint_ends_there(ours):
    """When it runs again, too: calls after the block are torch's."""
    x = torch.randn(1, 2, 6, 8, requires_grad=True)

    def run(x):
        with swapped():
            x = F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(x, x, x).sin()

    checkpoint(run, x, use_reentrant=False).square().sum().backward()
    assert len(ours) == 2


def keep_products(context, op, *args, **kwargs):
    """A policy of selective checkpointing."""
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, keep_products)
OPTIONS = {"plain": {}, "to its end": {"early_stop": False}, "selective": {"context_fn": SELECTIVE}}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("name", "function"),
    [*((name, "function") for name in OPTIONS), ("plain", "layer"), ("plain", "nested"), ("to its end", "nested")],
)
def test_a_checkpoint_within_the_block_is_swapped_when_it_runs_again(name, function, inside, ours):
    """In backward, which torch runs without the block's mode, or after the block."""
    layer, x, w = LAYERS["attention"](), torch.randn(2, 6, 32, requires_grad=True), torch.randn(32, 32) / 6
    again = partial(checkpoint, use_reentrant=False, **OPTIONS[name])
    calls = {
        "function": lambda x: F.scaled_dot_product_attention(x @ w, x, x.sin()),
        "layer": lambda x: layer(x, x, x, need_weights=False)[0],
        "nested": lambda x: again(calls["layer"], x.sin()).cos(),
    }
    with swapped():
        loss = again(calls[function], x).square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert len(ours) == 2
    (expected,) = torch.autograd.grad(calls[function](x).square().sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("inside", [True, False])
def test_a_reentrant_checkpoint_runs_torchs_function_again(inside, ours):
    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    with swapped():
        loss = checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=True).square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert len(ours) == 1
    (expected,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).square().sum(), x)
    torch.testing.assert_close(x.grad, expected)


def mapped(in_dims, shapes):
    """Tensors with a mapped dimension of 3 at in_dims; None: without one."""
    return [torch.randn(*s[:at], 3, *s[at:]) if at is not None else torch.randn(s) for at, s in
            zip(in_dims, shapes, strict=True)]  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (1, 2, 0, None), (None, 0, 0, 1), (0, None, None, None)], ids=str)
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_vmap(rank, in_dims):
    """Also of keys without the leading dimensions of queries, in blocks, twice, and differentiated outside."""
    lead = (2, 4)[4 - rank :]
    shapes = (*lead, 5, 8), (*lead[1:], 7, 8), (*lead[1:], 7, 6), (5, 7)
    in_dims = tuple(x if x is None else min(x, len(s)) for x, s in zip(in_dims, shapes, strict=True))
    tensors = mapped(in_dims, shapes)
    calls = (scaled_dot_product_attention, F.scaled_dot_product_attention)
    run, theirs = (torch.vmap(call, in_dims) for call in calls)
    torch.testing.assert_close(run(*tensors), theirs(*tensors))
    with swapped():
        torch.testing.assert_close(theirs(*tensors), run(*tensors))
    twice = [torch.randn(2, *x.shape) for x in tensors]
    torch.testing.assert_close(torch.vmap(run, chunk_size=1)(*twice), torch.vmap(theirs)(*twice))
    for found, wanted in zip(*(torch.func.grad(lambda *x, f=f: f(*x).square().sum(), argnums=(0, 1, 2, 3))(*tensors)
                               for f in (run, theirs)), strict=True):  # fmt: skip
        torch.testing.assert_close(found, wanted)


def test_what_vmap_does_not_map():
    x = torch.randn(3, 2, 5, 8)
    with pytest.raises(wa.AttentionError, match=r"- query is a tensor of torch.vmap; it must be"):
        torch.vmap(torch.func.grad(lambda y: scaled_dot_product_attention(y, y, y).sum()))(x)
    with pytest.raises(wa.AttentionError, match=r"^query has shape \(8,\) within torch.vmap; it must be"):
        torch.vmap(scaled_dot_product_attention)(*[x[0, 0]] * 3)
    with pytest.raises(wa.AttentionError, match=r"^attn_mask has shape \(1, 2, 2, 5, 5\)"):
        torch.vmap(lambda y: scaled_dot_product_attention(y, y, y, torch.ones(2, 2, 5, 5).bool()))(x)
