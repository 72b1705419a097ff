"""Drop-in for flash-attn: its functions, versions 2, 3 and 4, under the module names that programs import.

    from warpattn.integrations import flash_attn
    flash_attn.install(2)                              # from now on:
    from flash_attn import flash_attn_func             # is ours

    version   modules
    2         flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding
    3         flash_attn_interface, flash_attn_3, flash_attn_3.flash_attn_interface
    4         flash_attn.cute, flash_attn.cute.interface

The functions can be imported without installing, too: `warpattn.integrations.flash_attn.version2`, 3 and 4. They serve
every argument, or refuse it by name; hints such as num_splits, which never change a result, are accepted.

Other names and submodules of an installed flash-attn stay importable: its module is loaded when one is first read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from warpattn.errors import AttentionError

__all__ = ["install", "installed", "uninstall"]

_HERE = __name__
# Name of a module, the module here that has its content (None: an empty package).
MODULES: dict[int, dict[str, str | None]] = {
    2: {
        "flash_attn": "version2",
        "flash_attn.flash_attn_interface": "version2",
        "flash_attn.bert_padding": "bert_padding",
    },
    3: {
        "flash_attn_interface": "version3",
        "flash_attn_3": "version3",
        "flash_attn_3.flash_attn_interface": "version3",
    },
    4: {"flash_attn.cute": "version4", "flash_attn.cute.interface": "version4"},
}

_replaced: list[tuple[str, ModuleType | None]] = []  # the earlier module of each name, newest last


def install(version: int = 2) -> None:
    """Put the modules of flash-attn `version` (2, 3 or 4) into sys.modules until `uninstall()`.

    Names that a program has already imported do not change. Versions can be installed side by side.
    Raises AttentionError for another version.
    """
    if version not in MODULES:
        raise AttentionError(f"version is {version!r}; it must be one of {', '.join(map(str, MODULES))}")
    content = dict(MODULES[version])
    if version == 4 and "flash_attn" not in sys.modules:
        content = {"flash_attn": None} | content
    packages = {name.rpartition(".")[0] for name in content}
    for name, source in content.items():
        _put(name, _module(name, source, name in packages))


def uninstall() -> None:
    """Undo every `install`: the names refer to their earlier modules again."""
    while _replaced:
        name, before = _replaced.pop()
        if before is None:
            for own in [x for x in sys.modules if x == name or x.startswith(f"{name}.")]:
                del sys.modules[own]
        else:
            sys.modules[name] = before
            _reach_submodules(name, before)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            if before is None:
                vars(sys.modules[parent]).pop(child, None)
            else:
                setattr(sys.modules[parent], child, before)


@contextmanager
def installed(version: int = 2) -> Iterator[None]:
    """`install` for a `with` block; at its end all versions are uninstalled."""
    install(version)
    try:
        yield
    finally:
        uninstall()


def _put(name: str, module: ModuleType) -> None:
    _replaced.append((name, sys.modules.get(name)))
    sys.modules[name] = module
    _reach_submodules(name, module)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _reach_submodules(name: str, module: ModuleType) -> None:
    for other in list(sys.modules):
        if other.rpartition(".")[0] == name:
            setattr(module, other.rpartition(".")[2], sys.modules[other])


class _Beneath:
    """The names of a module that ours hides: the one that was imported before, or an installed one, which runs when a
    name is first read."""

    def __init__(self, name: str) -> None:
        self.name, self.module = name, sys.modules.get(name)
        self.spec = _installed_spec(name) if self.module is None else None

    def path(self) -> list[str]:
        """Where its submodules are."""
        found = self.spec.submodule_search_locations if self.module is None and self.spec is not None else None
        return list(found or getattr(self.module, "__path__", ()))

    def __call__(self, name: str) -> Any:
        """The `__getattr__` of our module. What looks over all modules reads private names and must load nothing."""
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {self.name!r} has no attribute {name!r}")
        if self.module is None and self.spec is not None and self.spec.loader is not None:
            self.module = module_from_spec(self.spec)
            try:
                self.spec.loader.exec_module(self.module)
            except Exception as error:
                self.module = None
                rule = f"the installed {self.name}, which may have it, cannot be imported: {error}"
                raise AttributeError(f"warpattn's {self.name} has no {name}; {rule}") from error
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(f"module {self.name!r} has no attribute {name!r}") from None


def _installed_spec(name: str) -> ModuleSpec | None:
    """Find an installed module, also below a package of ours."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules[parent], "__path__", []) if parent else None
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return next((spec for find in finders if find is not None and (spec := find(name, path, None)) is not None), None)


def _module(name: str, source: str | None, is_package: bool) -> ModuleType:
    """Make a module `name` with the public names of our module `source`; others are those of the module it hides."""
    module = ModuleType(name, f"{name}, served by warpattn")
    module.__spec__ = ModuleSpec(name, None, origin="warpattn", is_package=is_package)
    beneath = _Beneath(name)
    module.__dict__["__getattr__"] = beneath
    if is_package:
        module.__path__ = beneath.path()
    if source is None:
        return module
    content = import_module(f"{_HERE}.{source}")
    module.__dict__.update({name: getattr(content, name) for name in content.__all__})
    module.__dict__["__all__"] = list(content.__all__)
    if hasattr(content, "VERSION"):
        module.__dict__["__version__"] = content.VERSION
    return module
