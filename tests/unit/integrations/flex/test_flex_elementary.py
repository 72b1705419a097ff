"""torch's functions of numbers in FlexAttention's functions: values, special values and derivatives beside torch's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nn
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.integrations.flex import elementary
from warpattn.integrations.flex.symbols import run
from warpattn.language import expr
from warpattn.language.derivative import differentiate
from warpattn.language.evaluate import evaluate

GRID = torch.cat([torch.linspace(-9.3, 9.4, 1871), torch.tensor([0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 100.25, -100.25])])
SPECIAL = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-38, 2.0**23, 1e6 + 0.5, -7e7])
POSITIVE = ("log", "log2", "log10", "sqrt", "rsqrt", "power", "negative power")
# Where torch has another value at an infinity, a NaN or a number beyond 10^7: these sines are tested below.
OTHERS = ("sin", "cos", "tan", "power", "negative power", "power of a symbol", "atan2", "xlogy", "gelu", "hardswish",
          "heaviside")  # fmt: skip
SLOPES = {"erf": 1e-5, "erfc": 1e-5, "gelu": 1e-5, "atan2": 1e-5, "sin": 1e-6, "cos": 1e-6}  # of approximations
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "frac": torch.frac,
    "fmod": lambda x: torch.fmod(x, 1.5),
    "sign": torch.sign,
    "heaviside": lambda x: torch.heaviside(x, x * 0.0 + 0.25),
    "isfinite": lambda x: torch.where(torch.isfinite(x), 2.0, 1.0),
    "nan_to_num": torch.nan_to_num,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": lambda x: torch.log1p(x.abs()),
    "logaddexp": lambda x: torch.logaddexp(x, 2 * x),
    "logit": lambda x: torch.logit(x * 0.004 + 0.5),
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "power": lambda x: x**1.3,
    "negative power": lambda x: x**-0.3,
    "power of a symbol": lambda x: x ** torch.floor(x * 0.3) + x.abs() ** (x * 0.5) + 0.9 ** x.abs(),
    "hypot": lambda x: torch.hypot(x, x + 1.0),
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": lambda x: torch.tan(x * 0.1),
    "tanh": torch.tanh,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "copysign": lambda x: torch.copysign(x * 2.0, 1.0 - x),
    "xlogy": lambda x: torch.xlogy(x - 0.5, x * x + 0.5),
    "atan": torch.atan,
    "atan2": lambda x: torch.atan2(x, 1.0 - x) + torch.atan2(x * x - 3.0, x),
    "erf": torch.erf,
    "erfc": torch.special.erfc,
    "sigmoid": torch.special.expit,
    "log_sigmoid": nn.logsigmoid,
    "softplus": lambda x: nn.softplus(x, 2.0, 5.0),
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu tanh": lambda x: nn.gelu(x, approximate="tanh"),
    "elu": lambda x: nn.elu(x, 0.7),
    "celu": lambda x: nn.celu(x, 0.7),
    "selu": nn.selu,
    "relu": torch.relu,
    "relu6": nn.relu6,
    "leaky_relu": lambda x: nn.leaky_relu(x, 0.2),
    "hardtanh": lambda x: nn.hardtanh(x, -1.5, 2.0),
    "hardsigmoid": nn.hardsigmoid,
    "hardswish": nn.hardswish,
    "softsign": nn.softsign,
    "threshold": lambda x: nn.threshold(x, 0.1, 20.0),
    "reciprocal": torch.reciprocal,
    "lerp": lambda x: torch.lerp(x, 2 * x, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "round to decimals": lambda x: torch.round(x, decimals=1) + torch.round(x * 40.0, decimals=-1),
    "isclose": lambda x: torch.where(torch.isclose(x, torch.round(x), rtol=0.01), x, 2.0 * x),
    "signbit": lambda x: torch.where(torch.signbit(x), x, 2.0 * x),
    "isposinf": lambda x: torch.where(torch.isposinf(x), 1.0, 2.0 * x),
    "isneginf": lambda x: torch.where(torch.isneginf(x), 1.0, 2.0 * x),
    "logaddexp2": lambda x: torch.logaddexp2(x, 2 * x),
    "asinh": torch.asinh,
    "acosh": lambda x: torch.acosh(x.abs() + 1.5),
    "atanh": lambda x: torch.atanh(x * 0.09),
    "asin": lambda x: torch.asin(x * 0.09),
    "acos": lambda x: torch.acos(x * 0.09),
    "float_power": lambda x: torch.float_power(x, 3).to(x.dtype),
    "mish": nn.mish,
    "softshrink": lambda x: nn.softshrink(x, 0.7),
    "hardshrink": lambda x: nn.hardshrink(x, 0.7),
    "tanhshrink": nn.tanhshrink,
    "prelu": lambda x: nn.prelu(x, x.new_tensor(0.3)),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1.0),
}


def test_every_function_has_a_test():
    assert {name for name in TORCH if " " not in name} >= elementary.FUNCTIONS.keys()


def recorded(fn: Callable[[Tensor], Tensor]) -> expr.Program:
    return expr.trace(lambda: run(fn, expr.symbol("s", "float")))


def close(found: Tensor, wanted: Tensor, error: float = 0.0) -> None:
    torch.testing.assert_close(found.expand_as(wanted), wanted, atol=2e-6 + error, rtol=4e-6, equal_nan=True)


@pytest.mark.parametrize("name", TORCH)
def test_values_are_torchs(name):
    x = GRID[GRID > 0] if name in POSITIVE else GRID
    program = recorded(TORCH[name])
    close(evaluate(program.outputs[0], {"s": x}, program.tensors), TORCH[name](x))


@pytest.mark.parametrize("name", [name for name in TORCH if name not in ("heaviside", "isfinite")])
def test_derivatives_are_torchs(name):
    x = (GRID[GRID > 0] if name in POSITIVE else GRID).clone().requires_grad_()
    (slope,) = torch.autograd.grad(TORCH[name](x).sum(), x)
    program = recorded(TORCH[name])
    made = differentiate(program.outputs[0], program.tensors)
    close(evaluate(made.slope, {"s": x.detach()}, made.tensors), slope, SLOPES.get(name, 0.0))


@pytest.mark.parametrize("name", [name for name in TORCH if name not in OTHERS])
def test_special_values_are_torchs(name):
    program = recorded(TORCH[name])
    close(evaluate(program.outputs[0], {"s": SPECIAL}, program.tensors), TORCH[name](SPECIAL))


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sines_of_large_numbers(name):
    program = recorded(TORCH[name])
    x = torch.cat([torch.linspace(-1e5, 1e5, 9999), 10 ** torch.linspace(5.0, 38.0, 999)])
    error = (evaluate(program.outputs[0], {"s": x}, program.tensors).double() - TORCH[name](x.double())).abs()
    rounding = torch.where(x.abs() > 1e5, x.abs() * 2.0**-22, 0.0)  # of the argument
    assert (error <= 4e-7 + rounding.clamp(max=2.0)).all()
    assert evaluate(program.outputs[0], {"s": torch.tensor([math.inf, math.nan])}, program.tensors).isnan().all()


def test_gelu_has_two_forms():
    with pytest.raises(AttentionError, match="approximate is 'sigmoid'; it must be 'none' or 'tanh'"):
        recorded(lambda x: nn.gelu(x, approximate="sigmoid"))
