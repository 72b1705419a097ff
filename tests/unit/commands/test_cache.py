"""`cache info` and `cache clear`, and what is shown while commands work."""

import io

import pytest

pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

from warpattn.cli import progress
from warpattn.cli.app import app
from warpattn.runtime import cache_folder, kernel_cache
from warpattn.runtime.kernel_cache import Artifact


def invoke(*arguments, exit_code=0):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path / "kernels"))


def test_info_and_clear(tmp_path):
    assert f"folder   {tmp_path / 'kernels'} (not made yet)" in invoke("cache", "info")
    for i in range(3):
        kernel_cache.store(kernel_cache.path_of((i,)), Artifact(bytes(2**19), "entry", 0, 128))
    text = invoke("cache", "info")
    assert "kernels  3, 1.5 MiB" in text
    assert f"limit    {cache_folder.LIMIT_MIB} MiB, those used longest ago leave first" in text
    assert "removed 3 kernels, 1.5 MiB" in invoke("cache", "clear")
    assert "kernels  0, 0.0 MiB" in invoke("cache", "info")


def test_no_home_is_one_sentence(monkeypatch):
    monkeypatch.setattr(cache_folder, "folder", lambda: None)
    assert "error: there is no home folder; set WARPATTN_CACHE_DIR" in invoke("cache", "info", exit_code=1)


def test_what_cannot_be_removed_is_one_sentence(monkeypatch):
    kernel_cache.store(kernel_cache.path_of((1,)), Artifact(b"code", "entry", 0, 128))
    monkeypatch.setattr(cache_folder, "_remove", lambda paths: 0)
    assert "error: 1 kernel in" in invoke("cache", "clear", exit_code=1)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_terminals(terminal, monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    with progress.working("simulating", lambda: 0.5):
        pass
    assert ("simulating" in shown.getvalue()) is terminal


def test_progress_can_be_switched_off(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=shown, force_terminal=True, width=100))
    invoke("run", "--shape", "1x8x1x8")
    assert "comparing with torch" in shown.getvalue()
    shown.seek(shown.truncate(0))
    invoke("--no-progress", "run", "--shape", "1x8x1x8")
    assert "comparing" not in shown.getvalue()
