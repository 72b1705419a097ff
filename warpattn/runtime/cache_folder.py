"""The folder of compiled kernels: what it holds, and what leaves it.

    <folder>/ab/cdef….kernel       a kernel; its time of change is when a process last took it from the disk
    <folder>/ab/tmp….part          a kernel that a process is writing, locked by it until it is renamed

Kernels of other versions of the source or of Triton have other names, so nothing reads them any more. They leave as all
do: those not used for longest first, once the folder holds more than its limit, and any after `UNUSED_DAYS`. A `.part`
file leaves when its writer's lock is gone, which the operating system also releases where a writer was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from warpattn.errors import AttentionError

__all__ = ["Contents", "clear", "folder", "limit", "look", "mark_used", "sweep"]

LIMIT_MIB = 1024  # a kernel takes 0.1 to 0.4 MiB: some thousand problems
UNUSED_DAYS = 90
GRACE_S = 60.0  # in which a new .part file may not have its lock yet
UNIT = 2**20


@dataclass(frozen=True)
class Contents:
    """What a folder holds: kernels and their bytes, seconds since the epoch of their last uses, unfinished files."""

    kernels: int = 0
    size: int = 0
    first_use: float = 0.0
    last_use: float = 0.0
    unfinished: int = 0


def folder() -> Path | None:
    """Where kernels are kept; None when there is no place for them."""
    given = os.environ.get("WARPATTN_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "warpattn"
    except RuntimeError:  # no home
        return None


def limit() -> int:
    """Bytes that the folder may hold: $WARPATTN_CACHE_MIB times 2**20, or those of `LIMIT_MIB`."""
    given = os.environ.get("WARPATTN_CACHE_MIB")
    if not given:
        return LIMIT_MIB * UNIT
    if not given.isdecimal():
        raise AttentionError(f"WARPATTN_CACHE_MIB is {given!r}; it must be a whole number of MiB")
    return int(given) * UNIT


def look(place: Path | None) -> Contents:
    """What a folder holds."""
    found = list(_kernels(place))
    used = [status.st_mtime for _, status in found] or [0.0]
    size = sum(status.st_size for _, status in found)
    return Contents(len(found), size, min(used), max(used), sum(1 for _ in _files(place, "part")))


def mark_used(path: Path) -> None:
    """Note that a kernel was read; where that cannot be noted, it leaves the folder sooner."""
    with contextlib.suppress(OSError):
        os.utime(path)


def sweep(place: Path | None, most: int | None = None) -> int:
    """Remove what nobody uses, then those used longest ago until `most` bytes are left (None: `limit()`); how many."""
    most = limit() if most is None else most
    _remove(path for path, status in _files(place, "part") if _abandoned(path, status))
    newest_first = sorted(_kernels(place), key=lambda found: -found[1].st_mtime)
    old, total, leaving = time.time() - UNUSED_DAYS * 86400, 0, []
    for path, status in newest_first:
        total += status.st_size
        if total > most or status.st_mtime < old:
            leaving.append(path)
    return _remove(leaving)


def clear(place: Path | None) -> int:
    """Remove every kernel, and the files of writers that are gone; how many kernels."""
    removed = sweep(place, 0)
    for path in place.glob("??") if place is not None and place.is_dir() else ():
        with contextlib.suppress(OSError):  # not empty: somebody writes there
            path.rmdir()
    return removed


def lock(handle: int) -> None:
    """Mark an open .part file as being written, until it is closed or its process ends."""
    with contextlib.suppress(OSError):  # a file system without locks: files of killed writers stay there
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _abandoned(path: Path, status: os.stat_result) -> bool:
    """Whether no process writes a .part file any more."""
    if time.time() - status.st_mtime < GRACE_S:
        return False
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked by its writer
        return False
    finally:
        os.close(handle)
    return True


def _kernels(place: Path | None) -> Iterator[tuple[Path, os.stat_result]]:
    return _files(place, "kernel")


def _files(place: Path | None, kind: str) -> Iterator[tuple[Path, os.stat_result]]:
    """Files of a kind with their status; those that another process removes meanwhile are left out."""
    for path in sorted(place.glob(f"??/*.{kind}")) if place is not None and place.is_dir() else ():
        with contextlib.suppress(OSError):
            yield path, path.lstat()


def _remove(paths: Iterable[Path]) -> int:
    """Remove files; how many could be."""
    removed = 0
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    return removed
