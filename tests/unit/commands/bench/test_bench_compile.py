"""The benchmark of compile times: what it compiles, and how it reports a kernel that takes too long."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from bench import compile_times
from bench.compile_times import BOUNDS_S, launches, main, problems


@pytest.mark.parametrize("arch", BOUNDS_S)
def test_every_architecture_has_prefill_decode_and_latent_attention(arch):
    names = {launch.name.partition(".")[2] for problem in problems() for launch in launches(problem, arch)}
    assert len(names) >= 2 and all(launches(problem, arch) for problem in problems())


def test_a_slow_kernel_is_reported(monkeypatch, capsys):
    times = iter([1.0, 1.0, 99.0, *[1.0] * 100])
    monkeypatch.setattr(compile_times, "seconds_to_compile", lambda launch: next(times))
    main(["--arch", "gfx942"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("longer than 3 s") for line in lines[:3]] == [False, True, False]
    assert lines[-1] == f"{len(lines) - 2} of {len(lines) - 1} kernels within the bounds"


def test_every_compilation_starts_from_nothing(monkeypatch):
    found = []

    def compiled(launch):
        folder = Path(triton.knobs.cache.dir)
        found.append(list(folder.iterdir()))
        (folder / "kernel").touch()

    monkeypatch.setattr(compile_times, "compiled", compiled)
    for _ in range(2):
        compile_times.seconds_to_compile(None)
    assert found == [[], []]
