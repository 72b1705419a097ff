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
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

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
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
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
    for other in list(sys.modules):  # submodules stay reachable through the name
        if other.rpartition(".")[0] == name:
            setattr(module, other.rpartition(".")[2], sys.modules[other])
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _module(name: str, source: str | None, is_package: bool) -> ModuleType:
    """Make a module `name` with the public names of our module `source`."""
    module = ModuleType(name, f"{name}, served by warpattn")
    module.__spec__ = ModuleSpec(name, None, origin="warpattn", is_package=is_package)
    if is_package:
        module.__path__ = []
    if source is None:
        return module
    content = import_module(f"{_HERE}.{source}")
    module.__dict__.update({name: getattr(content, name) for name in content.__all__})
    module.__dict__["__all__"] = list(content.__all__)
    if hasattr(content, "VERSION"):
        module.__dict__["__version__"] = content.VERSION
    return module
