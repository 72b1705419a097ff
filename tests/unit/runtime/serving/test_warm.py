"""`warm`: the layers of a config, the kernels of a model, and that nothing is left to compile."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

import warpattn as wa
from warpattn.__main__ import named_arch
from warpattn.cli.app import app
from warpattn.problem.backends import LIMITS
from warpattn.runtime import kernel_cache
from warpattn.serving import warming
from warpattn.serving.layers import EightBitCache, LargestStep, Layer, layers_of, read_config, with_cache
from warpattn.serving.warming import (
    ABSORBED,
    CALLS,
    STEP,
    Example,
    Needed,
    _begun,
    examples_of,
    kernels_of,
    kinds_of_engines,
    launches_of,
    warm,
)

LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512,
         "torch_dtype": "bfloat16"}  # fmt: skip
GPT_OSS = {"model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
           "hidden_size": 2880, "sliding_window": 128, "dtype": "bfloat16",
           "layer_types": ["sliding_attention", "full_attention"] * 3}  # fmt: skip
GEMMA_2 = {"model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
           "sliding_window": 4096, "attn_logit_softcapping": 50.0, "torch_dtype": "float16"}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek_v3", "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_size": 7168}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA, [Layer(8, 2, 64, 64)]),
        ({"text_config": LLAMA, "vision_config": {}}, [Layer(8, 2, 64, 64)]),
        (GPT_OSS, [Layer(64, 8, 64, 64, window=128, sinks=True), Layer(64, 8, 64, 64, sinks=True)]),
        (GEMMA_2, [Layer(8, 4, 256, 256, torch.float16, 4096, 50.0), Layer(8, 4, 256, 256, torch.float16, None, 50.0)]),
        (DEEPSEEK, [Layer(128, 128, 192, 128), Layer(128, 1, 576, 512, latent=512)]),
        ({"n_head": 12, "n_embd": 768}, [Layer(12, 12, 64, 64)]),
        ({**LLAMA, "sliding_window": 512, "use_sliding_window": False}, [Layer(8, 2, 64, 64)]),
        ({**LLAMA, "attention_multiplier": 0.0078125}, [Layer(8, 2, 64, 64, scale=0.0078125)]),
        ({**LLAMA, "query_pre_attn_scalar": 256}, [Layer(8, 2, 64, 64, scale=0.0625)]),
        ({"text_config": {**LLAMA, "model_type": "gemma4_text"}}, [Layer(8, 2, 64, 64, scale=1.0)]),
    ],
)
def test_layers_of_a_config(config: dict, layers: list[Layer]) -> None:
    assert list(layers_of(config)) == layers


def test_a_scale_that_chooses_other_kernels() -> None:
    """Scores of products as they are may be too large for the usual ones of Hopper."""
    largest = LargestStep(requests=1, tokens=1, length=16)
    usual, small, large = (
        {kernel.file for kernel in kernels_of([Layer(2, 1, 64, 64, scale=scale)], largest, "sm90", "engine")}
        for scale in (None, 0.5, 1.0)
    )
    assert usual == small and len(large - usual) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2]", "holds a list"), ("{", "is no JSON"), ("{}", "no number of heads"),
     ('{"num_attention_heads": 4}', "neither head_dim nor hidden_size"),
     ('{"num_attention_heads": 4, "hidden_size": 64, "attention_multiplier": -1}', "attention_multiplier is -1"),
     ('{"num_attention_heads": 4, "hidden_size": 64, "query_pre_attn_scalar": "8"}', "query_pre_attn_scalar is '8'")],
)  # fmt: skip
def test_configs_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(wa.AttentionError, match=message):
        layers_of(read_config(tmp_path))


@pytest.mark.parametrize("name", ["requests", "tokens", "length", "page_size"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5, "8"])
def test_sizes_that_are_none(name: str, value: object) -> None:
    with pytest.raises(wa.AttentionError, match=f"{name} is {value!r}"):
        LargestStep(**{name: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("arch", list(LIMITS))
@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_any_smaller_step_needs_no_other_kernel(arch: str, config: dict) -> None:
    """Of random calls up to the largest step, every launch is of a kernel that `warm` compiles."""
    largest = LargestStep(requests=24, tokens=700, length=4000, drafts=3)
    files = {kernel.file for kernel in kernels_of(layers_of(config), largest, arch)}
    draw = random.Random(0)
    for layer in layers_of(config):
        for _ in range(40):
            requests = draw.randint(1, 24)
            kinds = ["paged", ABSORBED] if layer.latent else [*LIMITS[arch].kinds, STEP]
            kind, most = draw.choice(kinds), draw.choice([1, 4, None])
            each = draw.choice([1, 4]) if kind in ("paged", ABSORBED) else most or draw.randint(1, 700 // requests)
            step = kind in ("paged-ragged", STEP)
            pages = 250 if step else draw.randint(1, 250)
            decoded = draw.choice([0, 4]) if kind == STEP else 0
            example = Example(layer, kind, requests, requests * each, pages, most if step else None, decoded)
            for launch in launches_of(example, 16, arch):
                file = kernel_cache.path_of((launch.name, launch.arch, launch.key))
                assert file in files, (example, launch.name)


EIGHT_BIT = {"sm90": torch.float8_e4m3fn, "sm100": torch.float8_e5m2, "gfx942": torch.float8_e4m3fnuz}
CACHES = [(arch, per) for arch in EIGHT_BIT for per in ("tensor", None)] + [("sm90", 128)]


@pytest.mark.parametrize(("arch", "per"), CACHES)
def test_a_cache_of_8_bits(arch: str, per: str | int | None) -> None:
    """Steps of an engine over such pages need no other kernels, and none of 16-bit pages is among them."""
    cache, largest = EightBitCache(EIGHT_BIT[arch], per), LargestStep(requests=6, tokens=200, length=1000)
    plain = layers_of({**LLAMA, "head_dim": 128})
    layers = with_cache(plain, cache)
    files, others = ({kernel.file for kernel in kernels_of(x, largest, arch, "engine")} for x in (layers, plain))
    draw = random.Random(1)
    for _ in range(20):
        requests = draw.randint(1, 6)
        tokens, most = requests * draw.choice([1, 7, 30]), draw.choice([1, None])
        example = Example(layers[0], STEP, requests, requests if most else tokens, 63, most)
        for launch in (*launches_of(example, 16, arch), *launches_of(Example(layers[0], "append", 1, 1), 16, arch)):
            assert kernel_cache.path_of((launch.name, launch.arch, launch.key)) in files, (example, launch.name)
    attends = {kernel.name for kernel in kernels_of(layers, largest, arch, "engine") if kernel.file not in others}
    assert len(attends) >= 3, attends  # both ways to append, and what attends


def test_latents_of_8_bits() -> None:
    """Only what holds latents has 8 bits; their rotary parts are written by kernels of 16 bits."""
    prompts, decode = with_cache(layers_of(DEEPSEEK), EightBitCache(per=128))
    assert prompts.cache is None and decode.cache == EightBitCache(per=128)
    largest = LargestStep(requests=2, tokens=8, length=64)
    kinds = [example.kind for example in examples_of(decode, largest, kinds_of_engines(decode))]
    assert set(kinds) == {"append", "paged", ABSORBED}
    names = [kernel.name for kernel in kernels_of([decode], largest, "sm90", "engine")]
    assert names.count("sm90.append_slots") == 4 and "sm90.mla" in names, names  # two tensors, two dtypes of slots


def test_latents_as_engines_write_them() -> None:
    """Latents and rotary parts in two tensors, of 16 bits or of 8; the joined ones of `append_slots` beside them."""
    largest = LargestStep(requests=2, tokens=8, length=64)
    for cache, written in ((None, 4), (EightBitCache(), 2)):
        layers = layers_of(DEEPSEEK) if cache is None else with_cache(layers_of(DEEPSEEK), cache)
        names = [kernel.name for kernel in kernels_of(layers[1:], largest, "sm90", "engine")]
        assert names.count("sm90.append_slots") == written and names.count("sm90.mla") >= 2, names


@pytest.mark.parametrize(
    ("layer", "arch", "message"),
    [
        (Layer(8, 2, 512, 512), "gfx942", "head_dim"),
        (Layer(8, 2, 64, 64, torch.float32), "sm90", "torch.float32"),
        (Layer(8, 2, 64, 64, cache=EightBitCache()), "gfx942", "float8_e4m3fn"),
        (Layer(8, 2, 80, 80, cache=EightBitCache(per=64)), "sm90", "80"),
    ],
)
def test_layers_without_kernels(layer: Layer, arch: str, message: str) -> None:
    """`warm` says so, instead of compiling what no call will run."""
    with pytest.raises(wa.AttentionError, match=message):
        warm([layer], LargestStep(1, 1, 16), arch=arch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"dtype": torch.float16}, "dtype is"), ({"per": "64 rows"}, "per is '64 rows'"), ({"per": 32}, "per is 32")],
)
def test_caches_that_are_none(fields: dict, message: str) -> None:
    with pytest.raises(wa.AttentionError, match=message):
        EightBitCache(**fields)


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_engines_need_fewer(arch: str) -> None:
    """Their kernels are some of all, and those of random calls of the plug-ins are among them."""
    largest, layers = LargestStep(requests=4, tokens=100, length=500), layers_of(GPT_OSS) + layers_of(DEEPSEEK)
    every, some = ({kernel.file for kernel in kernels_of(layers, largest, arch, calls)} for calls in CALLS)
    assert some < every
    for layer in layers:
        kinds = {example.kind for example in examples_of(layer, largest, kinds_of_engines(layer))}
        assert kinds == {"append", *(("paged", ABSORBED) if layer.latent else ("ragged", STEP))}


def test_unknown_calls() -> None:
    with pytest.raises(wa.AttentionError, match="calls is 'dense'"):
        warm(LLAMA, arch="sm90", calls="dense")


def test_one_kernel_lists_the_blocks_of_many() -> None:
    """It depends on few of a configuration's fields."""
    kernels = list(kernels_of(layers_of(GPT_OSS), LargestStep(requests=64, tokens=4096, length=8192), "sm90"))
    names = [kernel.name for kernel in kernels]
    assert names.count("sm90.order") < names.count("sm90.prefill_varlen")


def test_an_engine_of_gpt_oss_needs_few_kernels() -> None:
    """Each takes seconds of a core before the engine serves, those that combine parts one at most."""
    names = Counter(kernel.name for kernel in kernels_of(layers_of(GPT_OSS), LargestStep(), "sm90", "engine"))
    long = {"sm90.prefill_varlen": 11, "sm90.decode": 12}
    assert {name: names[name] for name in long} == long and names.total() <= 51, names


def test_engines_compile_nothing_for_other_steps() -> None:
    """Prompts of any length, and steps over pages of sizes that plug-ins round up to."""
    layers, largest, draw = layers_of(GPT_OSS), LargestStep(), random.Random(3)
    files = {kernel.file for kernel in kernels_of(layers, largest, "sm90", "engine")}
    for _ in range(150):
        layer, requests = draw.choice(layers), 1 << draw.randint(0, 8)
        steps = [requests << n for n in range(14) if requests << n <= largest.tokens]
        each = 1 + int(2 ** (draw.random() * 13)) % (largest.tokens // requests)
        prompts = Example(layer, "ragged", requests, requests * each)
        for example in (prompts, Example(layer, STEP, requests, draw.choice(steps), 2048)):
            for launch in launches_of(example, 16, "sm90"):
                file = kernel_cache.path_of((launch.name, launch.arch, launch.key))
                assert file in files, (example, launch.name)


def test_slow_kernels_begin_while_others_are_looked_for() -> None:
    names = ["sm90.order", "sm90.prefill_varlen", "sm90.mla", "sm90.prefill", "sm90.decode"]
    example, said = Example(Layer(2, 1, 64, 64), "ragged", 1, 1), []

    def kernels() -> Iterator[Needed]:
        for name in names:
            said.append("looked for " + name)
            yield Needed(example, 0, name, None)

    def compile_one(kernel: Needed) -> Future[None]:
        said.append(kernel.name)
        return Future()

    number, begun = _begun(kernels(), compile_one)
    looked = [f"looked for {name}" for name in names]
    assert said == [*looked[:2], names[1], *looked[2:4], names[3], looked[4], names[4], names[2], names[0]]
    assert number == len(begun) == 5


def test_examples_reach_the_largest_step() -> None:
    largest = LargestStep(requests=3, tokens=5, length=40, page_size=16)
    found = list(examples_of(Layer(2, 1, 64, 64), largest, ("dense", "ragged", "paged")))
    assert {example.requests for example in found} == {1, 2, 3}
    assert {example.tokens for example in found if example.kind == "dense"} == {1, 2, 4, 5}
    assert {example.pages for example in found if example.kind == "paged"} == {1, 2, 3}


def test_everything_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path / "kernels"))
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "float16"}))
    line = ["warm", str(tmp_path), "--arch", "sm90", "--requests", "1", "--tokens", "1", "--length", "16",
            "--processes", "1"]  # fmt: skip
    monkeypatch.setattr(warming, "examples_of", lambda layer, *_: [Example(layer, "append", 1, 1)])
    first = CliRunner().invoke(app, line)
    assert first.exit_code == 0 and "3 kernels, 3 compiled now" in first.output, first.output
    assert len(list((tmp_path / "kernels").rglob("*.kernel"))) == 3
    assert "3 kernels, 0 compiled now" in CliRunner().invoke(app, line).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-dtype", "fp7"], "kv-dtype is 'fp7'"),
        (["--kv-dtype", "fp8", "--kv-scales", "32"], "kv-scales is '32'"),
        (["--kv-scales", "head"], "--kv-scales is 'head'; it belongs to a cache of 8 bits"),
        (["--kv-dtype", "fp8_e4m3fnuz"], "torch.float8_e4m3fnuz"),
    ],
)
def test_caches_on_the_command_line(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = CliRunner().invoke(app, ["warm", str(tmp_path), "--arch", "sm90", *options])
    assert found.exit_code == 1 and message in found.output, found.output


def test_the_server_of_compilers_begins_before_torch_is_imported() -> None:
    """Its own import of torch then takes place at the same time."""
    program = """
import sys
from multiprocessing import forkserver
import warpattn.__main__ as command
forkserver.ensure_running = lambda: sys.exit("too late" if "torch" in sys.modules else "begun")
sys.argv = ["warpattn", *sys.argv[1:]]
command.main()
"""
    ends = {}
    for name in ("warm", "doctor"):
        line = [sys.executable, "-c", program, name, "--help"]
        ends[name] = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (ends["warm"].returncode, ends["warm"].stderr.strip()) == (1, "begun")
    assert ends["doctor"].returncode == 0, ends["doctor"].stderr


def test_compiling_processes_begin_with_what_all_need() -> None:
    """Twenty of them would each take more than a second of a core for it."""
    program = """
from concurrent.futures import ProcessPoolExecutor
from warpattn.runtime import compilers
named = compilers.PRELOADED + compilers.KERNELS["sm90"]
with ProcessPoolExecutor(1, mp_context=compilers.start("warpattn.serving.warming", "sm90")) as pool:
    missing = f"set({named}) - set(__import__('sys').modules)"
    digests = "__import__('triton').runtime.cache.triton_key.cache_info().currsize"
    print(len(named), *(pool.submit(eval, told).result() for told in (missing, digests)))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[0] == "6 set() 1", run.stdout


@pytest.mark.parametrize("from_a_file", [True, False])
def test_a_script_without_a_guard_runs_once(tmp_path: Path, from_a_file: bool) -> None:
    """Also one from standard input, which is in no file."""
    program = """
print("begun", flush=True)
import warpattn as wa
step = wa.LargestStep(requests=1, tokens=1, length=16)
print(wa.warm([wa.Layer(8, 2, 64, 64)], step, arch="sm90", calls="engine", processes=2).compiled > 0)
"""
    file = tmp_path / "script.py"
    file.write_text(program)
    line = [sys.executable, str(file) if from_a_file else "-"]
    there = os.environ | {"WARPATTN_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": os.pathsep.join(sys.path)}
    given = None if from_a_file else program
    run = subprocess.run(line, input=given, env=there, capture_output=True, text=True, check=False)
    assert (run.stdout, run.returncode) == ("begun\nTrue\n", 0), run.stderr


def test_only_one_thread_imports() -> None:
    """Two that import Triton at once wait for each other, and Python lets one of them fail."""
    program = """
import sys, threading
class Thread:
    def find_spec(self, name, *_):
        if threading.current_thread() is not threading.main_thread():
            print("imported by a thread:", name)
sys.meta_path.insert(0, Thread())
from warpattn.runtime.compilers.digests import reading
reading.join()
print(sys.modules["triton"].runtime.cache.triton_key.cache_info().currsize)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("words", "arch"),
    [(["warm", "x"], "sm90"), (["warm", "--arch", "gfx942", "x"], "gfx942"), (["warm", "--arch=sm103"], "sm103"),
     (["warm", "--arch"], "")],
)  # fmt: skip
def test_the_architecture_whose_kernels_the_server_reads(words: list[str], arch: str) -> None:
    assert named_arch(words) == arch


@pytest.mark.parametrize(
    ("model", "arch", "message"),
    [(LLAMA, "sm80", "arch is 'sm80'"), (7, "sm90", "model is an int"), (["llama"], "sm90", "model is a list")],
)
def test_what_is_refused(model: object, arch: str, message: str) -> None:
    with pytest.raises(wa.AttentionError, match=message):
        warm(model, arch=arch)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"largest": "x"}, "^largest is 'x'; it must be a LargestStep or None$"),
        ({"largest": 0}, "^largest is 0; it must be a LargestStep or None$"),
        ({"progress": None}, "^progress is None; it must be a function of the part done$"),
    ],
)
def test_arguments_of_tune_too_are_refused(named: dict, message: str) -> None:
    with pytest.raises(wa.AttentionError, match=message):
        warm(LLAMA, arch="sm90", **named)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e39, "1", True])
def test_scales_of_layers_are_finite(scale: object) -> None:
    with pytest.raises(wa.AttentionError, match=r"^scale is .*; it must be a finite number of fp32 or None$"):
        Layer(8, 2, 64, 64, scale=scale)  # pyright: ignore[reportArgumentType]


def test_without_a_card_the_architecture_is_needed() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    with pytest.raises(wa.AttentionError, match="arch is None"):
        warm(LLAMA)
