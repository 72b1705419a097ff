"""The protocols and the ring verbs of DESIGN.md are those of the kernels' classes."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "warpattn" / "kernels"
DESIGN = (ROOT / "DESIGN.md").read_text()


def table(title: str) -> list[list[str]]:
    """The cells of the first table after a line of DESIGN.md that begins with `title`, without its ruler."""
    rows = re.search(rf"^{re.escape(title)}.*?((?:^\|[^\n]*\n)+)", DESIGN, re.DOTALL | re.MULTILINE)[1].splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows if not set(row) <= set("|- ")]


def methods(path: Path, inherited: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, list[str]]]:
    """{class: {method: its parameters}} of a file, with those of base classes, which `inherited` has."""
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    found = {}
    for one in classes:
        bases = [inherited.get(ast.unparse(base), {}) for base in one.bases]
        own = {f.name: [a.arg for a in f.args.args[1:]] for f in one.body if isinstance(f, ast.FunctionDef)}
        found[one.name] = {name: parameters for each in (*bases, own) for name, parameters in each.items()}
    return found


CLASSES: dict[str, dict[str, list[str]]] = {}
for file in sorted(KERNELS.rglob("*.py")):
    for name, found in methods(file, CLASSES).items():
        CLASSES.setdefault(name, {}).update(found)


@pytest.mark.parametrize("row", table("## The protocols")[1:], ids=lambda row: row[0].partition(":")[0])
def test_a_protocol_is_that_of_its_classes(row):
    _, wanted, implemented = row
    every, _, some = wanted.partition(";")
    names = re.findall(r"`([A-Z]\w+)`", implemented.partition(";")[0])
    assert names
    for name in names:
        for method, parameters in re.findall(r"`(\w+)\(([^)]*)\)`", every):
            assert CLASSES[name][method] == re.findall(r"\w+", parameters), f"{name}.{method}"
    known = [CLASSES[name] for name in re.findall(r"`([A-Z]\w+)`", implemented)]
    for method, parameters in re.findall(r"`(\w+)\(([^)]*)\)`", some):
        assert any(one.get(method) == re.findall(r"\w+", parameters) for one in known), method


@pytest.mark.parametrize("field", ["tensors", "work"])
def test_roles_of_prefill_use_what_a_protocol_lists(field):
    (row,) = (row for row in table("## The protocols")[1:] if row[0].startswith(f"{field}:"))
    listed = set(re.findall(r"`(\w+)(?:\([^`]*)?`", row[1]))
    used = set()
    for path in (KERNELS / "sm90" / "prefill").rglob("*.py"):
        found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
        used |= {node.attr for node in found if ast.unparse(node.value) == f"ctx.{field}"}
    assert "load_queries" in used or "publish" in used
    assert used <= listed, used - listed


def test_a_verb_of_a_ring_is_a_method_in_its_file():
    head, *rows = table("Rings use the same verbs")
    for column in range(1, len(head)):
        folder = re.search(r"(nvidia|amd)/", head[column])[1]
        files = [KERNELS / folder / name for name in re.findall(r"(\w+\.py)", head[column])]
        known = {method for path in files for one in methods(path, CLASSES).values() for method in one}
        for row in rows:
            verbs = re.findall(r"`(?:state\.)?(\w+)(?:\([^`]*)?`", row[column])
            assert set(verbs) <= known, f"{row[0]}: {set(verbs) - known} in {head[column]}"
