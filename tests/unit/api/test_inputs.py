"""Tensors and numbers that users pass: understood, or refused in one sentence, the same for every argument."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import warpattn as wa
from warpattn.inputs import is_tensor, kind_of, number, tensor_fault
from warpattn.serving import DecodePlan

B, S, H, D = 2, 16, 2, 16
BACKENDS = ["reference", "simulate:sm90"]


class Wrapped(torch.Tensor):
    """A subclass that changes what torch's functions do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Dispatched(torch.Tensor):
    """One that changes what they do below autograd."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Named(torch.Tensor):
    """A subclass that only has a name."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (B, S, H, D))).to(torch.float16)


def nested(x: torch.Tensor, layout: torch.layout = torch.jagged) -> torch.Tensor:
    with pytest.warns(UserWarning, match="prototype") if layout == torch.strided else pytest.MonkeyPatch.context():
        return torch.nested.nested_tensor([x[0], x[1]], layout=layout)


def imaginary(x: torch.Tensor) -> torch.Tensor:
    """-x, whose memory holds x."""
    return torch.complex(torch.zeros_like(x, dtype=torch.float32), x.float()).conj().imag


NO_TENSORS = {
    "numpy": (lambda x: x.numpy(), "is a ndarray"),
    "list": (lambda x: x.tolist(), "is a list"),
    "sparse": (lambda x: x.to_sparse(), "has layout torch.sparse_coo"),
    "jagged": (nested, "is a nested tensor"),
    "meta": (lambda x: x.to("meta"), "is on the device meta .for shapes use torch's FakeTensorMode"),
    "subclass": (lambda x: x.as_subclass(Wrapped), "is a Wrapped"),
    "dispatching": (lambda x: torch.Tensor._make_subclass(Dispatched, x), "is a Dispatched"),
    "negative": (imaginary, "has its negative bit set"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "out"])
@pytest.mark.parametrize("kind", NO_TENSORS)
def test_what_is_no_tensor_is_refused_everywhere(backend, name, kind):
    change, words = NO_TENSORS[kind]
    call = {"q": normal(), "k": normal(), "v": normal(), "sinks": normal(H), "out": normal()}
    if not (kind == "jagged" and name == "sinks"):
        call[name] = change(call[name])
        with pytest.raises(wa.AttentionError, match=f"{name} {words}"):
            wa.attention(**call, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize("name", ["block_table", "lengths"])
def test_tables_and_lengths_are_tensors(backend, kind, name):
    if kind == "negative":
        return  # ints have no such bit
    change, words = NO_TENSORS[kind]
    table, lengths = torch.zeros(B, S // 4, dtype=torch.int32), torch.full((B,), 3, dtype=torch.int32)
    tensors = {"block_table": table, "lengths": lengths}
    if not (kind == "jagged" and name == "lengths"):
        tensors[name] = change(tensors[name])
        with pytest.raises(wa.AttentionError, match=f"kv.{name} {words}"):
            wa.attention_paged(normal(), wa.PagedKV(normal(3, 4, H, D), normal(3, 4, H, D), **tensors), backend=backend)


@pytest.mark.parametrize("kind", ["numpy", "list", "sparse", "meta", "subclass", "negative"])
def test_captured_tensors_are_tensors(kind):
    change, _ = NO_TENSORS[kind]
    slopes, bias, ids = torch.randn(H), torch.randn(S, S), torch.zeros(S, dtype=torch.int32)
    makers = {
        "slopes": lambda: wa.ALiBi(change(slopes)),
        "bias": lambda: wa.Bias(change(bias)),
        "mask": lambda: wa.Materialized(change(bias[None])),
        "t": lambda: wa.CustomScore(lambda s, b, h, q, k, t: s + t[k], t=change(bias[0])),
    }
    if kind != "negative":
        makers |= {"ids": lambda: wa.Document(change(ids)), "valid_lengths": lambda: wa.Padding(change(ids[:B]))}
    for name, make in makers.items():
        with pytest.raises(wa.AttentionError, match=name):
            make()


def test_a_mask_that_torch_means_otherwise_is_no_matrix():
    with pytest.raises(wa.AttentionError, match="mask is a CausalBias"):
        wa.Materialized(causal_lower_right(S, S)[None].as_subclass(type(causal_lower_right(S, S))))


def test_a_closure_is_asked_too():
    hidden = torch.zeros(S).to_sparse()
    from warpattn.integrations.flex import flex_attention

    q = normal().transpose(1, 2)
    with pytest.raises(wa.AttentionError, match=r"a captured tensor has layout torch\.sparse_coo"):
        flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + hidden[j])


def test_plain_subclasses_and_parameters_are_tensors():
    x = normal()
    wanted = wa.attention(x, x, x)
    assert torch.equal(wa.attention(x.as_subclass(Named), x, x).as_subclass(torch.Tensor), wanted)
    assert torch.equal(wa.attention(torch.nn.Parameter(x, requires_grad=False), x, x), wanted)
    assert is_tensor(x) and tensor_fault(x) is None


def test_a_nested_tensor_of_the_older_layout():
    with pytest.raises(wa.AttentionError, match="q is a nested tensor"):
        wa.attention(nested(normal(), torch.strided), normal(), normal())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transform_of_torch_func(backend):
    x = normal(3, 1, S, H, D)

    def call(q):
        return wa.attention(q, q, q, backend=backend).sum()

    for batched in (torch.vmap(call), torch.vmap(torch.func.grad(call))):
        with pytest.raises(wa.AttentionError, match=r"q is a tensor of torch\.vmap"):
            batched(x)
    with pytest.raises(wa.AttentionError, match=r"q is a tensor of torch\.func\.functionalize"):
        torch.func.functionalize(call)(x[0])


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (3, 3), (0.5, 0.5), (np.float32(0.5), 0.5), (np.int64(3), 3), (np.array(0.5), 0.5), (torch.tensor(3), 3),
        (torch.tensor(0.5, dtype=torch.float64), 0.5), (Fraction(1, 2), 0.5), (10**400, None), (-(10**400), None),
        (True, None), (np.bool_(True), None), (torch.tensor(True), None), ("1", None), (torch.ones(1), None),
        (1j, None), (torch.tensor(1j), None), (np.ones(1), None), (None, None),
    ],
    ids=kind_of,
)  # fmt: skip
def test_numbers(value, meaning):
    found = number(value)
    assert found == meaning and type(found) is type(meaning)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_any_kind_give_the_same(backend):
    q, k, v = normal(), normal(), normal()

    def call(scale, cap, window):
        mask, score = wa.SlidingWindow(window), wa.SoftCap(cap)
        return wa.attention(q, k, v, mask=mask, score=score, scale=scale, backend=backend)

    wanted = call(0.25, 2.0, 5)
    for make in (torch.tensor, np.float32, np.array):
        assert torch.equal(call(make(0.25), make(2.0), 5), wanted)
    for make in (torch.tensor, np.int64, np.uint8):
        assert torch.equal(call(0.25, make(2), make(5)), wanted)


@pytest.mark.parametrize("value", [10**400, 10**5000, True, "1", torch.ones(1), torch.tensor(torch.inf)], ids=kind_of)
def test_what_is_no_finite_number_is_one_sentence(value):
    for name, attempt in {
        "scale": lambda: wa.attention(normal(), normal(), normal(), scale=value),
        "cap": lambda: wa.SoftCap(value),
        "window": lambda: wa.SlidingWindow(value),
        "size": lambda: wa.Chunked(value),
        "length": lambda: wa.Prefix(value if not isinstance(value, torch.Tensor) else value.double()),
    }.items():
        with pytest.raises(wa.AttentionError, match=f"^{name} is ") as caught:
            attempt()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_that_requires_a_gradient_is_refused(backend):
    """It gets none: the gradient would end there without a word."""
    learned, x = torch.tensor(0.5, requires_grad=True), normal()
    values = wa.quantize(x)
    narrow = wa.Quantized(values.values, values.scale.clone().requires_grad_())
    calls = {
        "scale": lambda: wa.attention(x, x, x, scale=learned, backend=backend),
        "cap": lambda: wa.attention(x, x, x, score=wa.SoftCap(learned), backend=backend),
        "k.scale": lambda: wa.attention(x, narrow, values, backend=backend),
    }
    for name, call in calls.items():
        with torch.no_grad():
            assert call().isfinite().all()
        if (name, backend) == ("k.scale", "reference"):
            assert call().requires_grad  # that one has a gradient
            continue
        with pytest.raises(wa.AttentionError, match=rf"^{name} (is a .* that )?requires a gradient; "):
            call()


def test_bounds_of_ragged_batches_are_numbers():
    cu = torch.tensor([0, 4, S], dtype=torch.int32)
    x = normal()[0]
    wanted = wa.attention_varlen(x, x, x, wa.Ragged(cu, None, 12, 12))
    for bound in (np.int64(12), torch.tensor(12)):
        assert torch.equal(wa.attention_varlen(x, x, x, wa.Ragged(cu, None, bound, bound)), wanted)


def test_values_are_printed_short():
    assert kind_of(np.ones((100, 100))) == "a NumPy array of shape (100, 100)"
    assert kind_of(10**5000) == "an int" and len(kind_of([1] * 1000)) < 140


USER_ERRORS = {
    "constant division": (lambda s, b, h, q, k: 1 / 0, "ZeroDivisionError"),
    "key": (lambda s, b, h, q, k: {}[1], "KeyError"),
    "torch function": (lambda s, b, h, q, k: torch.nn.functional.relu(s), "relu got a symbol"),
    "softplus": (lambda s, b, h, q, k: torch.nn.functional.softplus(s), "softplus got a symbol"),
    "tensor of a symbol": (lambda s, b, h, q, k: torch.tensor([s]), "test_inputs.py"),
    "array of a symbol": (lambda s, b, h, q, k: np.asarray([1.0])[k] + s, "test_inputs.py"),
    "large int": (lambda s, b, h, q, k: s + 10**400, "ints have at most 64 bits"),
    "large comparison": (lambda s, b, h, q, k: wa.to_float(k < 2**70), "ints have at most 64 bits"),
    "none": (lambda s, b, h, q, k: None, "returned None"),
    "random": (lambda s, b, h, q, k: s + torch.rand(()), "a whole tensor"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", USER_ERRORS)
def test_what_a_function_may_not_do_is_one_error(backend, name):
    fn, words = USER_ERRORS[name]
    with pytest.raises(wa.AttentionError, match=words):
        wa.attention(normal(), normal(), normal(), score=wa.CustomScore(fn), backend=backend)


def test_plans_ask_as_calls_do():
    x = normal()
    plan = DecodePlan(x, (x, x))
    for kind, (change, words) in NO_TENSORS.items():
        if kind != "negative":
            with pytest.raises(wa.AttentionError, match=f"q {words}"):
                plan(change(x), (x, x))
