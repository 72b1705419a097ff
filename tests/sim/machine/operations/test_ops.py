"""Each operation of the simulator against NumPy or torch, on small kernels."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.builds import poison, run
from tests.sim.machine.kernels import plain as kernels

RNG = np.random.default_rng(0)
UNARY = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin,
    "abs": np.abs, "floor": np.floor, "erf": np.vectorize(math.erf), "neg": np.negative,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip
FLOAT = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
    "lt": lambda a, b: (a < b).astype(a.dtype), "where": lambda a, b: np.where(a >= b, a, -b),
    "fma": lambda a, b: (np.float64(a) * b + a).astype(a.dtype),
}  # fmt: skip
INTEGER = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": lambda a, b: np.trunc(a / b).astype(a.dtype),
    "mod": lambda a, b: np.fmod(a, b), "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "min": np.minimum, "max": np.maximum, "lt": lambda a, b: (a < b).astype(a.dtype),
}  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    x = (RNG.random(128) * 4 + 0.1).astype(np.float32)
    out = poison(128)
    assert run(kernels.unary_kernel, (2,), {"x": x, "out": out}, {"N": 64, "OP": op}).clean
    np.testing.assert_allclose(out, UNARY[op](x), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("op", FLOAT)
def test_binary_of_floats(op):
    x, y = (RNG.standard_normal(100).astype(np.float32) for _ in range(2))
    out = poison(100)
    assert run(kernels.binary_kernel, (2,), {"x": x, "y": y, "out": out, "n": 100}, {"N": 64, "OP": op}).clean
    np.testing.assert_allclose(out, FLOAT[op](x, y), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.int64])
@pytest.mark.parametrize("op", INTEGER)
def test_binary_of_integers(op, dtype):
    info = np.iinfo(dtype)
    x, y = (RNG.integers(info.min // 2**8, info.max // 2**8 + 2, 100).astype(dtype) for _ in range(2))
    x[:4], y[:4] = (info.max, info.min + 1, 7, -7), (info.max, 3, -2, 2)
    y[y == 0] = 3
    out = poison(100, dtype)
    assert run(kernels.binary_kernel, (2,), {"x": x, "y": y, "out": out, "n": 100}, {"N": 64, "OP": op}).clean
    with np.errstate(over="ignore"):
        exact = dtype is np.int64 and op in ("floordiv", "mod")
        expected = INTEGER[op](x, y)
        if exact:
            expected = np.array(
                [
                    math.trunc(abs(int(a)) // abs(int(b))) * (1 if (a < 0) == (b < 0) else -1)
                    for a, b in zip(x, y, strict=True)
                ]
            )
            expected = expected if op == "floordiv" else x - expected * y
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("op", ["shl", "shr", "floordiv", "mod", "max", "lt"])
def test_unsigned(op):
    x = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    y = RNG.integers(1, 31, 64, dtype=np.uint32)
    x[0], y[0] = 2**31 + 5, 1
    out = poison(64, np.uint32)
    assert run(kernels.binary_kernel, (1,), {"x": x, "y": y, "out": out, "n": 64}, {"N": 64, "OP": op}).clean
    numpy = {"shl": np.left_shift, "shr": np.right_shift, "floordiv": np.floor_divide, "mod": np.mod, "max": np.maximum}
    np.testing.assert_array_equal(out, (x < y).astype(np.uint32) if op == "lt" else numpy[op](x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_rounding(dtype):
    """Every conversion rounds to the nearest, ties to even, like torch."""
    x = torch.cat(
        [torch.randn(1000), torch.randn(1000) * 1e-3, torch.randn(40) * 100, torch.tensor([0.0, -0.0, 1.0, 3.0])]
    )
    halves = torch.arange(0, 4, 2.0**-10)
    x = torch.cat([x, halves])[:4096]
    x = torch.nn.functional.pad(x, (0, 8192 - len(x)))
    out = torch.zeros(8192, dtype=dtype)
    assert run(kernels.unary_kernel, (2,), {"x": x, "out": out}, {"N": 4096, "OP": "cast"}).clean
    assert torch.equal(out.float(), x.to(dtype).float())
    back = torch.full((8192,), float("nan"))
    assert run(kernels.unary_kernel, (2,), {"x": out, "out": back}, {"N": 4096, "OP": "cast"}).clean
    assert torch.equal(back, out.float())


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_floats_become_integers(dtype):
    """Rounded towards zero; a NaN is 0, and what an integer cannot hold the last one that it can."""
    finite = np.float32([0, -0.9, 2.9, -2.9, 4e9, 2**31, -(2**31), 5e18, -5e18, 1e19, 3e38, -3e38, 1])
    x, info, out = np.append(finite, np.float32([math.inf, -math.inf, math.nan])), np.iinfo(dtype), poison(16, dtype)
    assert run(kernels.unary_kernel, (1,), {"x": x, "out": out}, {"N": 16, "OP": "cast"}).clean
    assert out.tolist() == [min(max(int(each), info.min), info.max) for each in finite] + [info.max, info.min, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["add", "mul", "sub"])
def test_narrow_arithmetic(op, dtype):
    x, y = (torch.randn(64).to(dtype) for _ in range(2))
    out = torch.full((64,), float("nan"), dtype=dtype)
    assert run(kernels.binary_kernel, (1,), {"x": x, "y": y, "out": out, "n": 64}, {"N": 64, "OP": op}).clean
    assert torch.equal(out, {"add": x + y, "mul": x * y, "sub": x - y}[op])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["sum", "max", "min", "xor", "argmax"])
def test_reductions(op, axis):
    x = RNG.integers(-99, 99, (8, 32)).astype(np.int32 if op == "xor" else np.float32)
    out, index = poison(x.shape[1 - axis], x.dtype), poison(x.shape[1 - axis], np.int32)
    constants = {"M": 8, "N": 32, "OP": op, "AXIS": axis}
    assert run(kernels.reduce_kernel, (1,), {"x": x, "out": out, "index": index}, constants).clean
    numpy = {"sum": np.sum, "max": np.max, "min": np.min, "xor": np.bitwise_xor.reduce, "argmax": np.max}
    np.testing.assert_array_equal(out, numpy[op](x, axis=axis))
    if op == "argmax":
        np.testing.assert_array_equal(index, x.argmax(axis))


def test_reduction_to_a_scalar():
    x, out = RNG.standard_normal(128).astype(np.float32), poison(1)
    assert run(kernels.scalar_reduce_kernel, (1,), {"x": x, "out": out}, {"N": 128}).clean
    np.testing.assert_allclose(out[0], x.sum(), rtol=1e-5)


@pytest.mark.parametrize("op", ["cumsum", "cumprod", "reverse", "pairs"])
def test_scans(op):
    x, y = (RNG.uniform(0.5, 1.5, 32).astype(np.float32) for _ in range(2))
    out = poison(32)
    assert run(kernels.scan_kernel, (1,), {"x": x, "y": y, "out": out}, {"N": 32, "OP": op}).clean
    carried, linear = 0.0, []
    for a, b in zip(x, y, strict=True):
        carried = a * carried + b
        linear.append(carried)
    expected = {"cumsum": np.cumsum(x), "cumprod": np.cumprod(x), "reverse": np.cumsum(x[::-1])[::-1], "pairs": linear}
    np.testing.assert_allclose(out, expected[op], rtol=1e-5)


@pytest.mark.parametrize("op", ["trans", "join", "split", "gather", "flip", "sort"])
def test_shapes(op):
    x, out = RNG.standard_normal((8, 16)).astype(np.float32), poison((8, 16))
    assert run(kernels.shape_kernel, (1,), {"x": x, "out": out}, {"OP": op}).clean
    expected = {
        "trans": x.T.reshape(8, 16), "join": np.stack((x, x + 1), -1).reshape(8, 16, 2)[..., 0],
        "split": x.reshape(8, 8, 2)[..., ::-1].reshape(8, 16), "gather": x[:, ::-1], "flip": x[:, ::-1],
        "sort": np.sort(x, 1),
    }  # fmt: skip
    np.testing.assert_array_equal(out, expected[op])


def test_histogram():
    x, out = RNG.integers(0, 16, 128).astype(np.int32), poison(16, np.int32)
    assert run(kernels.histogram_kernel, (1,), {"x": x, "out": out}).clean
    np.testing.assert_array_equal(out, np.bincount(x, minlength=16))


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random", "adversarial"])
@pytest.mark.parametrize(
    ("dtype", "block"), [(torch.bfloat16, 64), (torch.float16, 64), (torch.float32, 16), (torch.float8_e5m2, 64)]
)
def test_matmul_as_triton_pipelines_it(dtype, block, schedule):
    """wgmma from shared memory with cp.async in commit groups, and mma.sync for the small tile."""
    a, b = torch.randn(2 * block, 128).to(dtype), torch.randn(128, 64).to(dtype)
    out = torch.full((2 * block, 64), float("nan"))
    constants = {"N": 64, "K": 128, "BLOCK": block}
    assert run(kernels.matmul_kernel, (2,), {"a": a, "b": b, "c": out}, constants, schedule=schedule).clean
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-2, atol=5e-2 if dtype == torch.float32 else 1e-3)


ATOMIC = {
    "add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and,
    "xor": np.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("op", ATOMIC)
def test_atomics_of_integers(op, dtype):
    """Numbers on both sides of what a signed integer holds: unsigned ones are compared as such."""
    info = np.iinfo(dtype)
    x = RNG.integers(info.min, info.max, (4, 8), dtype, endpoint=True)
    out = RNG.integers(info.min, info.max, 4, dtype, endpoint=True)
    expected = ATOMIC[op].reduce(np.concatenate([x.reshape(-1, 4), out[None]]), 0, dtype)
    assert run(kernels.atomic_kernel, (4,), {"out": out, "x": x}, {"N": 8, "OP": op}, schedule="random").clean
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("op", ["add", "max", "min"])
def test_atomics_of_floats(op):
    """Triton makes comparisons of floats from those of integers, which differ by the sign."""
    x, out = np.float32([[-3, 5, -7, 0.5], [2, -4, -8, -0.25]]), np.float32([-2, -5, -6, 0])
    expected = ATOMIC[op].reduce(np.concatenate([x, out[None]]), 0)
    assert run(kernels.atomic_kernel, (2,), {"out": out, "x": x}, {"N": 4, "OP": op}, schedule="random").clean
    np.testing.assert_array_equal(out, expected)


def test_exchanges():
    x, out = np.zeros((4, 8), np.int32), poison(4, np.int32)
    assert run(kernels.atomic_kernel, (4,), {"out": out, "x": x}, {"N": 8, "OP": "xchg"}, schedule="random").clean
    np.testing.assert_array_equal(out, np.arange(4))


@pytest.mark.parametrize("seed", range(5))
def test_a_spin_lock_makes_programs_take_turns(seed):
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    report = run(kernels.lock_kernel, (6,), {"lock": lock, "total": total}, {"N": 8}, schedule="random", seed=seed)
    assert report.clean, report
    assert total[0] == 15


def test_loops_and_branches():
    x, out = np.array([1, 6, 27, 97], np.int32), poison(4, np.int32)
    assert run(kernels.loop_kernel, (4,), {"x": x, "out": out, "n": 3}).clean
    np.testing.assert_array_equal(out, np.array([0, 8, 111, 118]) + 3)


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_descriptors_made_in_the_kernel_clip(schedule):
    x = RNG.standard_normal((50, 32)).astype(np.float32)
    out = poison((50, 32))
    args = {"x": x, "out": out, "M": 50, "N": 32}
    assert run(kernels.device_descriptor_kernel, (2,), args, {"B": 32}, schedule=schedule).clean
    np.testing.assert_array_equal(out, 2 * x)
