"""`import warpattn`: what it exports, and what it does not load."""

import subprocess
import sys

import pytest

import warpattn as wa


@pytest.mark.parametrize("name", wa.__all__)
def test_every_public_name_says_what_it_is(name):
    assert len(getattr(wa, name).__doc__ or "") > 20


def test_a_name_with_a_typo_knows_its_module():
    """By which Python's own message says which name was meant."""
    with pytest.raises(AttributeError, match="has no attribute 'Casual'") as caught:
        wa.Casual  # noqa: B018
    assert caught.value.name == "Casual" and caught.value.obj is wa


def test_all_is_complete():
    public = {name for name, value in vars(wa).items() if not name.startswith("_") and not hasattr(value, "__path__")}
    modules = {name for name in public if type(getattr(wa, name)).__name__ == "module"}
    assert public - modules == set(wa.__all__)


def test_importing_it_does_not_import_triton():
    program = "import sys, warpattn; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", program], check=False).returncode == 0
