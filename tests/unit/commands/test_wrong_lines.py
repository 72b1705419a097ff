"""Command lines that cannot be: one sentence (argument, value, rule), exit status 1, before any work."""

import io
import os
import re
import sys
import zipfile

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from warpattn.cli import compile as compile_command
from warpattn.cli import effort, independent, run, simulate, tensors
from warpattn.cli.app import app
from warpattn.errors import AttentionError
from warpattn.masks import Causal, SlidingWindow
from warpattn.reference import reference
from warpattn.scores import SoftCap

COMMANDS = ("plan", "compile", "simulate")


def refusal(*arguments: object) -> str:
    """What a command says that it refuses: only that, and on standard error."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    return result.stderr


@pytest.fixture(autouse=True)
def _no_work(monkeypatch):
    """Nothing here gets as far as computing or compiling."""

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(run, "attention", begun)
    monkeypatch.setattr(tensors.torch, "randn", begun)
    monkeypatch.setattr("warpattn.runtime.kernel_cache.require_triton", begun)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shape", "1x1024x8x520"), "q has head_dim 520; the sm90 backend takes head dims up to 512"),
        (("--shape", "1x1024x8x264", "--kv-dtype", "fp8"), "with 8 bits the sm90 backend takes at most 256"),
        (("--arch", "sm100", "--shape", "1x1024x8x520"), "head_dim 520; the sm100 backend takes head dims up to"),
        (("--arch", "gfx942", "--shape", "1x1024x8x264"), "head_dim 264; the gfx942 backend takes"),
        (("--shape", "1x64x6/4x64"), "q has 6 heads and k has 4; the query heads must be a multiple"),
        (("--shape", "1x17x128x576/512"), "q has 17 tokens a sequence; with head dims 576 and 512"),
        (("--dtype", "fp32"), "dtype is 'fp32'; kernels take fp16 or bf16"),
    ],
)
def test_what_no_kernel_has(command, options, words):
    assert words in refusal(command, *options)


@pytest.mark.parametrize("command", [*COMMANDS, "run", "doctor"])
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("-1x128x2x64", "batch is -1; it must be 1 .. 2147483647"),
        ("1x128x0x64", "the number of query heads is 0; it must be 1"),
        ("1x128/x2x64", "write batch x sequence"),
        ("1x99999999999x2x64", "the number of queries is 99999999999; it must be 1 .. 2147483647"),
        ("2000000000x2000000000x2x64", "a tensor of 512000000000000000000 elements; it may have at most"),
    ],
)
def test_sizes_that_no_tensor_has(command, shape, words):
    text = refusal(command, "--shape", shape)
    assert f"shape is {shape!r}" in text
    assert words in text


@pytest.mark.parametrize(
    ("command", "words"),
    [("run", "its q, k, v and out take 7,812.5 GiB"), ("simulate", "simulating it takes about 105,468.8 GiB")],
)
def test_more_than_the_memory(command, words):
    text = refusal(command, "--shape", "64x1000000x64x128")
    assert f"shape is 64x1000000/1000000x64/64x128/128; {words}" in text
    assert "this machine has" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--backward",), "this takes about 7 hours, 7 runs of 3e+11 multiply-adds; fewer"),
        (("--schedules", "eager"), "this takes about 20 minutes, 1 run of 1e+11 multiply-adds; fewer"),
        (("--schedules", "eager", "--mask", "window:64"), ""),
    ],
)
def test_long_simulations_are_announced(line, words, monkeypatch):
    monkeypatch.setattr(simulate.tensors, "random", lambda *_: sys.exit(3))
    monkeypatch.setattr(simulate.tensors, "require_memory", lambda *_: None)  # of a small machine
    result = CliRunner().invoke(app, ["simulate", "--shape", "4x4096x16x128", *line])
    assert result.exit_code == 3 and not result.stdout
    assert result.stderr.startswith(words) and result.stderr.count("\n") == bool(words)


def test_a_long_time_has_one_unit():
    assert [effort.duration(days * 86400) for days in (0.02, 0.3, 3, 300, 3000)] == [
        "30 minutes", "7 hours", "3 days", "300 days", "8 years"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--seeds", 3, "--schedules", "eager,lazy"), "--seeds is given with --schedules eager,lazy; only the random"),
        (("x.py", "--seed", 0, "--schedule", "eager"), "--seed is given with --schedules eager; only the random"),
        (("x.py", "--kv-dtype", "fp8"), "--kv-dtype is given beside the script 'x.py'; a script has problems of its"),
        (("--shape", "1x2x3x8", "x.py", "--mask", "causal"), "--shape and --mask are given beside the script 'x.py'"),
    ],
)
def test_options_of_a_simulation_without_effect(line, words):
    assert words in refusal("simulate", *line)


@pytest.mark.parametrize("command", ["run", "simulate"])
@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_seeds_that_no_generator_takes(command, seed):
    assert f"seed is {seed}; it must be 0 .. 9223372036854775807" in refusal(command, "--seed", seed)


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_card_that_is_not_there(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert f"device is {device!r}; torch sees 0 CUDA devices here" in refusal("run", "--device", device)


@pytest.mark.parametrize("device", ["meta", "abacus"])
def test_devices_that_nothing_runs_on(device):
    assert f"device is {device!r}; write auto, cpu, cuda or cuda:1" in refusal("run", "--device", device)


def test_keys_and_values_of_8_bits():
    assert "kv-dtype is 'int4'; write fp8" in refusal("run", "--kv-dtype", "int4")
    assert "8-bit keys and values have no backward" in refusal("run", "--kv-dtype", "fp8", "--backward")
    assert "dtype is 'fp4'; kernels take fp16 or bf16, or fp8" in refusal("plan", "--dtype", "fp4")
    assert "dtype is 'fp4'; write fp16, bf16, fp32, fp64 or fp8" in refusal("run", "--dtype", "fp4")
    assert "8-bit q, k and v have no backward" in refusal("plan", "--dtype", "fp8", "--backward")


def test_a_refusal_names_what_was_given(tmp_path):
    assert "--backward and --dtype fp8 are given" in refusal("run", "--dtype", "fp8", "--backward")
    file = tmp_path / "x.npz"
    np.savez(file, **{name: np.zeros((1, 8, 2, 16)) for name in "qkv"})
    assert "error: k is a torch.float64 tensor" in refusal("run", file, "--kv-dtype", "fp8")
    assert "processes is -1; it must be 0 or more" in refusal("tune", "--shape", "1x64x8x64", "--processes", -1)


@pytest.mark.parametrize("name", ["causal:", "full:", "window:", "causal,"])
def test_a_mask_whose_value_is_missing(name):
    assert f"mask is {name!r}; write full" in refusal("plan", "--mask", name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", 3), "--steps is given without --train, to which it belongs"),
        (("--plot", "x.svg"), "--plot is given without --train, to which it belongs"),
        (("--train", "--simulate", "sm90"), "--simulate and --train are given; give one of the two"),
        (("--simulate", "sm90"), "--device and --simulate are given; a simulated layer is fp16 on the CPU"),
        (("--train", "--sentence", "A cat."), "--sentence and --train are given; give one of the two"),
    ],
)
def test_options_of_the_demo_without_effect(options, words):
    assert words in refusal("demo", "--device", "cpu", *options)


@pytest.mark.parametrize("command", ["info", "clear"])
def test_a_cache_without_a_home(command, monkeypatch):
    monkeypatch.setattr("warpattn.runtime.cache_folder.folder", lambda: None)
    assert "there is no home folder; set WARPATTN_CACHE_DIR" in refusal("cache", command)


def test_sizes_are_named_as_users_know_them():
    assert "head_dim is 0; it must be 1" in refusal("run", "--shape", "2x3x4x0")
    assert "the number of key heads is 0" in refusal("plan", "--shape", "2x3x4/0x8")


def test_a_dtype_without_a_name():
    assert "dtype is ''; write fp16" in refusal("run", "--dtype", "")


@pytest.mark.parametrize("line", [("run", "?.npz"), ("run", "--out", "?.npz"), ("simulate", "?.py"),
                                  ("simulate", "--report", "?.html"), ("simulate", "--timeline", "?.svg")])  # fmt: skip
def test_names_that_are_too_long(line):
    assert "aaaaa" in refusal(*(part.replace("?", "a" * 5000) for part in line))


def test_scripts_that_are_no_programs(tmp_path):
    path = tmp_path / "program.py"
    for content, words in (
        (b"x = 1\ny = {", ", line 2: '{' was never closed; it must be a program in Python"),
        (b"\0", ": source code "),
        (b"(" * 100_000, "; it must be a program in Python"),
    ):
        path.write_bytes(content)
        assert words in refusal("simulate", path)


def test_results_that_cannot_be_written(tmp_path, monkeypatch):
    assert "there is no folder" in refusal("run", "--out", tmp_path / "no" / "x.npz")
    (tmp_path / "folder.npz").mkdir()
    assert "it is no file" in refusal("run", "--out", tmp_path / "folder.npz")
    assert "there is no folder" in refusal("simulate", "--timeline", tmp_path / "no" / "x.svg")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "this user may not write there" in refusal("run", "--out", tmp_path / "x.npz")


def test_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"

    def savez(path, *_, **__):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensors.np, "savez", savez)
    with pytest.raises(AttentionError, match=r"x.npz cannot be written; .*No space left"):
        tensors.save(path, {"out": torch.zeros(1)})
    assert not path.exists(), "half a file stays"
    monkeypatch.setattr(compile_command, "nvidia_rows", savez)
    with pytest.raises(AttentionError, match=r"the machine code of sm90.prefill cannot be read; .*No space left"):
        compile_command.code_rows(path, "sm90.prefill", "sm90", opcodes=False)


def test_a_result_that_would_overwrite_its_input(tmp_path):
    path = tmp_path / "x.npz"
    tensors.save(path, dict.fromkeys("qkv", torch.zeros(1, 2, 1, 8)))
    before = path.read_bytes()
    (tmp_path / "link.npz").symlink_to(path)
    for name in ("x.npz", "link.npz"):
        assert "is the input; write the result to another file" in refusal("run", path, "--out", tmp_path / name)
    assert path.read_bytes() == before


def whole(array: np.ndarray) -> bytes:
    """An .npz file with q, k and v."""
    memory = io.BytesIO()
    np.savez(memory, q=array, k=array, v=array)
    return memory.getvalue()


def headed(header: str) -> bytes:
    """An .npz file whose arrays have this header and no content."""
    memory, text = io.BytesIO(), header.encode() + b"\n"
    with zipfile.ZipFile(memory, "w") as file:
        for name in "qkv":
            file.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    return memory.getvalue()


def flagged(content: bytes, local: int, central: int, value: int) -> bytes:
    """An .npz file with another byte at these offsets in the headers of its members."""
    changed = bytearray(content)
    for sign, offset in ((b"PK\3\4", local), (b"PK\1\2", central)):
        for found in re.finditer(re.escape(sign), content):
            changed[found.start() + offset] = value
    return bytes(changed)


def unnamed(content: bytes) -> bytes:
    """An archive whose members are no arrays."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        for name in "qkv":
            file.writestr(name, content)
    return memory.getvalue()


NUMBERS = np.zeros((1, 2, 1, 8), np.float32)
SIZED = "{{'descr': '<f4', 'fortran_order': False, 'shape': ({},)}}"
OTHER_ORDER = ">f4" if sys.byteorder == "little" else "<f4"
FILES = {
    "empty": (b"", "cannot be read as .npz"),
    "truncated": (whole(NUMBERS)[:-40], "cannot be read as .npz"),
    "damaged": (whole(NUMBERS).replace(bytes(64), b"\1" * 64, 1), "cannot be read as .npz; Bad CRC-32"),
    "not an archive": (b"\x93NUMPY" + bytes(100), "cannot be read as .npz"),
    "objects": (whole(np.array([{}], object)), "cannot be read as .npz; Object arrays cannot be loaded"),
    "larger than a size": (headed(SIZED.format(10**20)), "too large"),
    "larger than it is": (headed(SIZED.format(10**15)), "cannot be"),
    "brackets": (headed("[" * 9000), "cannot be read as .npz"),
    "signs": (headed("-" * 9000 + "1"), "cannot be read as .npz"),
    "no hash": (headed("{[]: 1}"), "cannot be read as .npz; unhashable"),
    "no array": (unnamed(b"hello"), "q is no array; it must be numbers"),
    "compressed otherwise": (flagged(whole(NUMBERS), 8, 10, 99), "cannot be read as .npz; That compression method"),
    "encrypted": (flagged(whole(NUMBERS), 6, 8, 1), "cannot be read as .npz; File 'q.npy' is encrypted"),
    "complex": (whole(NUMBERS + 0j), "q has dtype torch.complex64; it must be real numbers"),
    "no rows": (whole(NUMBERS[:, :0]), "q has shape (1, 0, 1, 8); it must have at least one element"),
    "no sequences": (whole(NUMBERS[:0]), "q has shape (0, 2, 1, 8); it must have at least one element"),
    "no heads": (whole(NUMBERS[:, :, :0]), "q has shape (1, 2, 0, 8); it must have at least one element"),
    "strings": (whole(np.array(["a"])), "q has dtype '<U1'; it must be numbers that torch has"),
    "other byte order": (whole(NUMBERS.astype(OTHER_ORDER)), f"q has dtype '{OTHER_ORDER}'; it must be numbers"),
}


@pytest.mark.parametrize("kind", FILES)
def test_arrays_that_cannot_be_read(kind, tmp_path):
    content, words = FILES[kind]
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    text = refusal("run", path)
    assert words in text
    assert str(path) in text


@pytest.mark.parametrize("content", [b"", b"\1", b"\xff" * 100, b"\x10" + bytes(7) + b'{"q":1}'])
def test_safetensors_that_cannot_be_read(content, tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert f"{path} cannot be read as .safetensors" in refusal("run", path)


def test_other_words_are_refused():
    assert "schedule is 'fast'; write eager, lazy" in refusal("simulate", "--schedule", "fast")
    assert "simulate has no option '--shpe'; `python -m" in refusal("simulate", "--shpe", "1x64x2x64")
    assert "timeline is 'x.png'; write a name that ends with" in refusal("simulate", "--timeline", "x.png")
    assert "dtype is 'int8'; the demo runs in fp32" in refusal("demo", "--dtype", "int8")
    assert "dtype is 'fp64'; the demo runs in" in refusal("demo", "--dtype", "fp64")


def test_a_plan_takes_a_shape_without_its_memory():
    result = CliRunner().invoke(app, ["plan", "--shape", "64x1000000x64x128"])
    assert result.exit_code == 0
    assert "seq 1000000 x 1000000" in result.stdout


def test_what_run_compares_with_is_another_computation():
    q, k, v = torch.rand(3, 2, 7, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind(0)
    mask, score = Causal() & SlidingWindow(3), SoftCap(2.0)
    out, lse = independent.attention(q, k[:, :5, :2], v[:, :5, :2], mask, score)  # the first rows see no key
    expected, expected_lse = reference(q, k[:, :5, :2], v[:, :5, :2], mask=mask, score=score, dtype=torch.float64)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert lse[0, 0, 0] == -torch.inf and not out[0, 0].any()


def test_the_part_that_a_simulation_has_done():
    out, weights = torch.full((2, 3, 1, 8), torch.nan), torch.tensor([1.0, 2.0, 3.0])
    assert simulate.finished(out, weights) == 0.0
    out[:, 2] = 0.0
    assert simulate.finished(out, weights) == pytest.approx(0.5)
    out[:] = 1.0
    assert simulate.finished(out, weights) == 1.0


@pytest.mark.parametrize("option", [("--shape", "1x7x2x8"), ("--seed", "0")], ids=lambda x: x[0])
def test_a_file_has_a_shape_of_its_own(option, tmp_path):
    file = tmp_path / "x.npz"
    np.savez(file, **{name: np.zeros((1, 5, 2, 8), np.float32) for name in "qkv"})
    assert f"{option[0]} are given; --shape and --seed are of random q, k and v" in refusal("run", file, *option)


def test_queries_of_8_bits_have_the_format_of_the_keys():
    words = "--dtype fp8 and --kv-dtype fp8_e5m2 are given; q, k and v of 8 bits have one"
    assert words in refusal("run", "--dtype", "fp8", "--kv-dtype", "fp8_e5m2")
