"""The folder of compiled kernels: which files it holds, and which are removed when.

    <folder>/ab/version-cdef….kernel   a kernel; its modification time is when a process last read it from disk
    <folder>/ab/tmp….part              a kernel that a process is writing, locked by it until it is renamed
    <folder>/tuned/                    tuned choices (tuned/rows.py), which `tune --forget` removes

`version` is a digest of the source and of Triton's version. Kernels of other versions are removed after `OTHERS_DAYS`
without use, any after `UNUSED_DAYS`, and the least recently used once the folder exceeds its limit. A `.part` file is
removed when its writer's lock is gone; the operating system also releases the lock of a killed writer.

A user who can write a kernel's file can run code as its reader. So folders and files are made for this user alone, and
`refusal` says why a folder is not used: it belongs to another user, or others may write there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from warpattn.errors import AttentionError

LIMIT_MIB = 1024  # a kernel takes 0.1 to 0.4 MiB: some thousand problems
UNUSED_DAYS = 90
OTHERS_DAYS = 14  # of another version: kernels of a second environment in use must stay
TEMPORARY = "warpattn-"
LARGEST = 64 * 2**20  # most bytes of a file to read
GRACE_S = 60.0  # how long a new .part file may be without its lock
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
    """Return the folder where kernels are kept; None when there is none."""
    given = os.environ.get("WARPATTN_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "warpattn"
    except RuntimeError:  # no home
        return None


def refusal(place: Path | None, writing: bool = True) -> str:
    """Say why kernels are not kept in a folder (or, `writing` false, not read from it); empty if they are."""
    if place is None:
        return "there is no home folder: set WARPATTN_CACHE_DIR"
    try:
        status = place.stat()
    except OSError as error:
        made = isinstance(error, FileNotFoundError) and _can_be_made(place)
        return "" if made else f"{place} cannot be made: set WARPATTN_CACHE_DIR"
    if not stat.S_ISDIR(status.st_mode):
        return f"{place} is no folder"
    if status.st_uid != os.geteuid():
        return f"{place} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write in {place}; chmod go-w changes that"
    if writing and not os.access(place, os.W_OK | os.X_OK):
        return f"{place} cannot be written: set WARPATTN_CACHE_DIR"
    return ""


def is_folder(place: Path) -> bool:
    """Whether there is a folder; False, too, where the system does not say, as of a name that is too long."""
    try:
        return place.is_dir()
    except OSError:
        return False


def _can_be_made(place: Path) -> bool:
    there = next(path for path in place.absolute().parents if os.path.lexists(path))
    return is_folder(there) and os.access(there, os.W_OK | os.X_OK)


def read(path: Path) -> bytes:
    """Return the bytes of a file that only this user can have written; raises OSError for anything else, such as a
    link, or a pipe, on which a reader would block."""
    for place in path.parents[:2]:
        if why := refusal(place, writing=False):
            raise PermissionError(why)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise OSError(f"{path} is not a file of at most {LARGEST} bytes")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others may have written {path}")
        return file.read()


def new_file(path: Path) -> tuple[int, Path]:
    """Make an open, locked .part file, to be renamed to `path`, in folders for this user alone."""
    make_folders(path)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    lock(handle)
    return handle, Path(name)


def make_folders(path: Path) -> None:
    """Make the two folders of a file for this user alone; raises PermissionError if others may write in one."""
    place = path.parents[1]
    place.parent.mkdir(parents=True, exist_ok=True)
    for made in (place, path.parent):
        made.mkdir(mode=0o700, exist_ok=True)
        if why := refusal(made):
            raise PermissionError(why)


def private_temporary() -> Path:
    """Make a temporary folder for this process; remove those of processes that were killed."""
    for other in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*/lock"):
        with contextlib.suppress(OSError):
            if _abandoned(other, other.lstat()):
                shutil.rmtree(other.parent, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    handle = os.open(place / "lock", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    lock(handle)  # it stays open until the process ends
    return place


def limit() -> int:
    """Return how many bytes the folder may hold: $WARPATTN_CACHE_MIB MiB, else `LIMIT_MIB`."""
    given = os.environ.get("WARPATTN_CACHE_MIB")
    if not given:
        return LIMIT_MIB * UNIT
    if not given.isdecimal():
        raise AttentionError(f"WARPATTN_CACHE_MIB is {given!r}; it must be a whole number of MiB")
    return int(given) * UNIT


def look(place: Path | None) -> Contents:
    """Return what a folder holds."""
    found = list(_kernels(place))
    used = [status.st_mtime for _, status in found] or [0.0]
    size = sum(status.st_size for _, status in found)
    return Contents(len(found), size, min(used), max(used), sum(1 for _ in _files(place, "part")))


def mark_used(path: Path) -> None:
    """Note that a kernel was read; if that fails, it is removed sooner."""
    with contextlib.suppress(OSError):
        os.utime(path)


def sweep(place: Path | None, most: int | None = None, version: str = "") -> int:
    """Remove unused kernels, then the least recently used until `most` bytes are left (None: `limit()`); return how
    many. version: the prefix of the names of kernels that this process could use; others are removed earlier.
    """
    most = limit() if most is None else most
    _remove(path for path, status in _files(place, "part") if _abandoned(path, status))
    newest_first = sorted(_kernels(place), key=lambda found: -found[1].st_mtime)
    now, total, leaving = time.time(), 0, []
    for path, status in newest_first:
        total += status.st_size
        days = UNUSED_DAYS if path.name.startswith(version) else OTHERS_DAYS
        if total > most or now - status.st_mtime > days * 86400:
            leaving.append(path)
    return _remove(leaving)


def clear(place: Path | None) -> int:
    """Remove every kernel, and the files of writers that are gone; return the number of kernels."""
    removed = sweep(place, 0)
    for path in place.glob("??") if place is not None and is_folder(place) else ():
        with contextlib.suppress(OSError):  # not empty: another process writes there
            path.rmdir()
    return removed


def lock(handle: int) -> None:
    """Mark an open .part file as being written, until it is closed or its process ends."""
    with contextlib.suppress(OSError):  # a file system without locks: files of killed writers stay there
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _abandoned(path: Path, status: os.stat_result) -> bool:
    """Whether the process that wrote a .part file is gone."""
    if time.time() - status.st_mtime < GRACE_S or status.st_uid != os.geteuid():
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
    """Yield files of a kind with their status, without those that another process removes meanwhile."""
    for below in sorted(place.glob("??")) if place is not None and is_folder(place) else ():
        if below.is_symlink():  # its target is not part of this folder
            continue
        for path in sorted(below.glob(f"*.{kind}")):
            with contextlib.suppress(OSError):
                yield path, path.lstat()


def _remove(paths: Iterable[Path]) -> int:
    """Remove files; return how many could be removed."""
    removed = 0
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    return removed
