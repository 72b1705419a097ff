"""`flash_attn.install` beside an installed flash-attn, which a folder stands in for."""

import importlib
import sys

import pytest

from warpattn.integrations import flash_attn
from warpattn.integrations.flash_attn import version2, version4

FILES = {
    "flash_attn/__init__.py": "from flash_attn.flash_attn_interface import flash_attn_func\n"
                              "__version__ = '2.8.0'\nmore = 1\n",
    "flash_attn/flash_attn_interface.py": "flash_attn_func = 'theirs'\n_flash_attn_forward = 'private'\n",
    "flash_attn/layers/__init__.py": "",
    "flash_attn/layers/rotary.py": "from flash_attn import flash_attn_func as used\napply_rotary_emb = 'rotary'\n",
    "flash_attn/bert_padding.py": "import absent_module\n",
    "flash_attn/cute/__init__.py": "",
    "flash_attn/cute/testing.py": "reference = 'theirs'\n",
}  # fmt: skip


@pytest.fixture
def _theirs(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    flash_attn.uninstall()
    for name in [x for x in sys.modules if x.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.mark.usefixtures("_theirs")
def test_version_4_leaves_the_installed_functions():
    flash_attn.install(4)
    import flash_attn as package
    from flash_attn import flash_attn_func, flash_attn_interface
    from flash_attn.cute import flash_attn_func as newest
    from flash_attn.cute.testing import reference
    from flash_attn.layers.rotary import used

    assert newest is version4.flash_attn_func
    assert flash_attn_func == used == reference == flash_attn_interface.flash_attn_func == "theirs"
    assert (package.more, package.__version__, package.cute) == (1, "2.8.0", sys.modules["flash_attn.cute"])
    with pytest.raises(AttributeError, match="'flash_attn' has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.usefixtures("_theirs")
@pytest.mark.parametrize("imported", [False, True])
def test_version_2_replaces_its_functions_only(imported):
    before = importlib.import_module("flash_attn") if imported else None
    flash_attn.install(2)
    from flash_attn import flash_attn_func, more
    from flash_attn.flash_attn_interface import _flash_attn_forward
    from flash_attn.layers.rotary import apply_rotary_emb, used

    assert flash_attn_func is used is version2.flash_attn_func
    assert (more, _flash_attn_forward, apply_rotary_emb) == (1, "private", "rotary")
    with pytest.raises(AttributeError, match=r"has no other; the installed .* cannot be imported: No module named"):
        _ = sys.modules["flash_attn.bert_padding"].other
    flash_attn.uninstall()
    import flash_attn as package
    from flash_attn import flash_attn_func as again

    assert again == "theirs"
    assert before in (None, package)
    assert importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb == "rotary"


@pytest.mark.usefixtures("_theirs")
def test_looking_over_all_modules_loads_nothing():
    flash_attn.install(2)
    assert not any(hasattr(module, "__file__") for name, module in sys.modules.items() if name == "flash_attn")
    assert not [name for name in sys.modules if name.startswith("flash_attn.layers")]
