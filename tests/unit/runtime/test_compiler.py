"""What Triton refuses to compile ends in one sentence, with Triton's own lines as the cause."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.errors import TritonError
from triton.runtime.errors import PTXASError

import warpattn as wa
from tests.launches import small_call
from warpattn.kernels.pieces import codegen
from warpattn.runtime import compiler, hip, simulate
from warpattn.runtime.compiler import artifact_of, check_memory, compiled, folder_refusal, refusals_named
from warpattn.runtime.launches import list_launches


def test_a_mask_that_cannot_be_compiled(monkeypatch):
    monkeypatch.setitem(codegen._CALLS, "log", "gl.to_tensor(2**70)")
    q = torch.randn(1, 64, 1, 64, dtype=torch.bfloat16)
    mask = wa.CustomMask(lambda b, h, q, k: wa.log(wa.to_float(k)) < 2.0)
    with pytest.raises(wa.AttentionError) as refused:
        wa.attention(q, q, q, mask=mask, backend="simulate:sm90")
    said = "sm90.prefill cannot be compiled; Triton says: "
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value.__cause__, CompilationError)


@pytest.mark.parametrize(
    ("error", "words"), [(PTXASError("fatal\nregister allocation failed"), "register allocation failed"),
                         (TritonError(), "TritonError"),
                         (RuntimeError("PassManager::run failed"), "PassManager::run failed"),
                         (RecursionError("maximum recursion depth exceeded"), "maximum recursion depth exceeded")]
)  # fmt: skip
def test_the_last_line_is_the_reason(error, words):
    said = f"^sm90.decode cannot be compiled; Triton says: {words}$"
    with pytest.raises(wa.AttentionError, match=said), refusals_named("sm90.decode"):
        raise error


@pytest.mark.parametrize(
    ("owner", "name", "compile_it"), [(simulate, "to_ttgir", simulate._kernel), (triton, "compile", compiled)]
)
def test_a_pass_of_the_compiler_that_fails(owner, name, compile_it, monkeypatch):
    """On both ways: to the simulator, and to machine code."""

    def failing(*_, **__):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(simulate, "_compiled", {})
    (launch,) = list_launches(*small_call("sm90", (64, 64)))
    with pytest.raises(wa.AttentionError, match=r"^sm90.prefill cannot be compiled; Triton says: PassManager::run"):
        compile_it(launch)


def test_a_version_gets_its_own_kernels_of_triton(tmp_path, monkeypatch):
    """Triton's names do not see what a config works out on the host: another version of our sources compiles anew."""
    *_, launch = list_launches(*small_call("sm90", (64, 64), kind="paged", rows=(1, 64), page=16))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
        for version in ("one", "one", "two"):
            monkeypatch.setattr(compiler, "version", lambda version=version: version)
            compiled(launch)
    assert not launch.shared_code and found == [False, True, False]


def test_the_cause_of_an_error_is_its_reason():
    """Also where it was not being handled."""
    refused = RuntimeError("the pass failed")
    refused.__cause__ = ValueError("too many registers")
    with pytest.raises(wa.AttentionError, match=r"Triton says: too many registers$"), refusals_named("sm90.decode"):
        raise refused


def test_other_errors_pass():
    with pytest.raises(KeyError), refusals_named("sm90.decode"):
        raise KeyError("a bug")


@pytest.mark.parametrize(("arch", "code", "threads"), [("sm90", b"of NVIDIA", 96), ("gfx950", b"of AMD", 192)])
def test_machine_code_and_threads_of_a_maker(arch, code, threads, monkeypatch):
    """Three warps, of 32 or 64 lanes."""
    metadata = SimpleNamespace(name="entry", shared=1024, num_warps=3)
    asm = {"cubin": b"of NVIDIA", "hsaco": b"of AMD", "amdgcn": ""}
    made = SimpleNamespace(metadata=metadata, asm=asm, src=SimpleNamespace(signature={"x": "*fp32"}))
    monkeypatch.setattr(compiler, "compiled", lambda launch, target: made)
    monkeypatch.setattr(hip, "check_layout", lambda *_: None)
    artifact = artifact_of(SimpleNamespace(arch=arch, name="kernel"))
    assert (artifact.cubin, artifact.threads) == (code, threads)


def test_a_kernel_of_more_shared_memory_than_a_block_has():
    launch = SimpleNamespace(arch="gfx942", name="cdna.attend")
    check_memory(launch, 65_536)
    with pytest.raises(wa.AttentionError, match=r"cdna.attend needs 65,537 bytes .* gfx942 has 65,536 at most"):
        check_memory(launch, 65_537)


def test_folders_that_triton_may_not_write_into(tmp_path):
    own, shared, file = tmp_path / "own", tmp_path / "shared", tmp_path / "file"
    own.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    file.touch()
    assert folder_refusal(own) == folder_refusal(own / "new" / "er") == folder_refusal(shared / "new") == ""
    assert folder_refusal(shared) == f"every user may write in {shared}"
    assert folder_refusal(file) == f"{file} cannot be written" and folder_refusal(file / "x").endswith("be written")
    assert folder_refusal(None) == "there is no home folder"


@pytest.mark.parametrize("refused", [False, True])
def test_a_private_folder_from_the_first_refusal_on(refused, tmp_path, monkeypatch):
    """What fails in Triton's own folder runs once more elsewhere, and all that follows runs there at once."""
    from triton import knobs

    used, leaving, elsewhere = [], [], tmp_path / "private"
    for name, value in (("_private", []), ("private_temporary", lambda: elsewhere), ("say_once", lambda _: None)):
        monkeypatch.setattr(compiler, name, value)
    monkeypatch.setattr(compiler.atexit, "register", lambda *call, **_: leaving.append(call[1]))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_it():
        used.append(knobs.cache.dir)
        if used[-1] != str(elsewhere) and refused:
            raise OSError("no space left on device")
        return len(used)

    found = [compiler._somewhere(compile_it) for _ in range(2)]
    assert found == ([2, 3] if refused else [1, 2])
    assert used == ([str(tmp_path), str(elsewhere), str(elsewhere)] if refused else [str(tmp_path)] * 2)
    assert leaving == ([elsewhere] if refused else [])
