"""The texts name files and modules that exist."""

from pathlib import Path

import pytest

import warpattn
from tests.repo.names import absent, missing, spelled_out, unknown, words_of
from tests.repo.test_repository import FILES, ROOT

# The changelog says what has moved, and notes name options and files of their time.
TEXTS = [name for name in FILES if name.endswith(".md") and name not in {"CHANGELOG.md", "bench/notes.md"}]


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_text_names_exists(name):
    found = list(missing((ROOT / name).read_text(), FILES, ROOT))
    assert not found, "\n".join(["", *found])


SOURCES = [name for name in FILES if name.endswith((".py", ".toml", ".yml")) or name == "Makefile"]
OTHERS = {"scaled_upcast", "scaled_downcast"}  # operations of Triton that the simulator does not know
OTHERS |= {"flat_", "v_permlane"}  # beginnings of AMD's instructions


@pytest.fixture(scope="module")
def words() -> set[str]:
    return words_of("\n".join((ROOT / name).read_text() for name in SOURCES)) | OTHERS


@pytest.mark.parametrize("name", TEXTS)
def test_names_in_code_occur_in_code(name, words):
    found = list(unknown((ROOT / name).read_text(), words))
    assert not found, "\n".join(["", *found])


def test_names_of_the_package_and_of_listings_resolve():
    found = [f"{name}: {sentence}" for name in TEXTS for sentence in absent((ROOT / name).read_text())]
    assert not found, "\n".join(["", *found])


def test_names_that_do_not_resolve_are_seen():
    listing = "```text\nfrom warpattn import attention, atention\nimport torch\n```\n"
    assert list(absent(listing)) == ["warpattn has no atention"]
    assert list(absent("`wa.masks.Causal`, `wa.Casual()`")) == ["wa.Casual: warpattn has none"]
    (broken,) = absent("```py\nimport torch\nx = (\n```\n")
    assert broken.startswith("a listing does not compile")
    command, run = "```text\n$ python -m warpattn plan\n```\n", "```python\nfrom warpattn import atention\n```\n"
    assert not list(absent(command + run))  # `python` blocks are run


def test_names_in_code():
    words = words_of("def keep_it(): return DecodePlan")
    assert not list(unknown("`keep_it(x)` makes a `DecodePlan` of words like `keep`", words))
    assert list(unknown("`drop_it`, `PrefillPlan`", words)) == [
        "drop_it: no source has drop_it",
        "PrefillPlan: no source has PrefillPlan",
    ]


FEW = ["warpattn/__init__.py", "warpattn/masks/base.py", "tests/unit/few/test_b.py"]
FEW += ["warpattn/sim/__init__.py", "warpattn/sim/knockout.py"]


@pytest.fixture
def few(tmp_path) -> Path:
    for name in FEW:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("from .knockout import knock_out\n")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "see masks/base.py:12",
        "`sim/knockout.py`",
        "[a link](../masks/base.py)",
        "`masks/`",
        "`tests/unit/*/test_*.py`",
        "`warpattn/{sim/knockout,masks/base}.py`",
        "warpattn/<folder>/base.py",
        "warpattn.sim.knock_out(x)",
        "`warpattn.sim`",
        "`somewhere/else`",
        "half a word: x.pyc",
    ],
)
def test_what_exists_is_no_complaint(few, text):
    assert not list(missing(text, FEW, few))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("see `masks/program.py`", "masks/program.py is no file"),
        ("(pieces/split.py)", "pieces/split.py is no file"),
        ("launch.py", "launch.py is no file"),
        ("`masks/{base,other}.py`", "masks/other.py is no file"),
        ("`sim/old/`", "sim/old is no path"),
        ("`warpattn.gcn`", "warpattn.gcn is no module"),
        ("warpattn.sim.knock_in", "warpattn.sim.knock_in is no module, and no name in one"),
    ],
)
def test_what_does_not_exist_is_said(few, text, complaint):
    found = "\n".join(missing(text, FEW, few))
    assert complaint in found


def test_braces():
    assert spelled_out("a/{b,c}/{d,e}.py") == ["a/b/d.py", "a/b/e.py", "a/c/d.py", "a/c/e.py"]


def test_completion_offers_what_is_public():
    offered = {name for name in dir(warpattn) if not name.startswith("_")}
    assert offered == set(warpattn.__all__) and "atexit" not in offered
