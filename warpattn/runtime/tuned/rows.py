"""The file of tuned choices: for each call the fastest configuration on a card, with the times of all.

    <cache folder>/tuned/choices.json   a line with the format and a checksum, then the rows as JSON
    <cache folder>/tuned/lock           locked by the process that rewrites the file

The rules of compiled kernels apply: folders and file are made for this user alone and read only if no other user could
have written them, and the file is replaced in one step. A row only names a configuration, so no file can introduce one
that this package does not make itself. A row of other kernels or another Triton is stale: its name may mean something
else by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warpattn.errors import AttentionError
from warpattn.problem.launch import BUILT_IN
from warpattn.runtime import cache_folder, kernel_cache

FORMAT = "warpattn tuned 1"
FOLDER, FILE = "tuned", "choices.json"
MOST_ROWS = 4096  # the oldest are removed first
MOST_BYTES = 16 * 2**20  # a row takes 1 to 3 KiB
PRIVATE = 0o600


@dataclass(frozen=True)
class Row:
    """What `tune` found for one call on one card."""

    key: str  # digest of everything that the choice depends on, see `table.key_of`
    call: str  # the same in words
    card: str
    candidate: str  # name of the fastest configuration; BUILT_IN: the planner's own choice
    built_in: str  # name of the planner's own choice
    microseconds: Mapping[str, float]  # medians by name; the planner's own choice is under BUILT_IN
    refused: Mapping[str, str]  # configurations that did not compile, failed or gave other values, with the reason
    rounds: int
    date: str  # ISO 8601
    kernels: str  # digest of the kernels' source text and Triton's version
    triton: str

    @property
    def gain(self) -> float:
        """The speedup over the planner's own choice."""
        return self.microseconds[BUILT_IN] / self.microseconds[self.candidate]

    @property
    def stale(self) -> bool:
        """Whether other kernels or another Triton were measured."""
        return self.kernels != kernel_cache.version()

    @property
    def words(self) -> str:
        """A sentence about the row, for a plan's reasons."""
        count = len(self.microseconds)
        if self.stale:
            now = f"kernels {kernel_cache.version()}, Triton {kernel_cache.triton_version() or 'none'}"
            made = f"by kernels {self.kernels}, Triton {self.triton}; these are {now}"
            return f"a choice tuned on {self.card}, {self.date}, is ignored: it was made {made}; tune again"
        if self.candidate == BUILT_IN:
            return f"tuned on {self.card}, {self.date}: the built-in choice is the best of {count}"
        return (
            f"tuned on {self.card}, {self.date}: {self.candidate}, {self.gain:.2f} x as fast as the built-in choice "
            f"{self.built_in} (medians of {self.rounds} rounds, the best of {count})"
        )


def path() -> Path | None:
    """Return this user's file of tuned choices; None without a cache folder."""
    place = cache_folder.folder()
    return None if place is None else place / FOLDER / FILE


def read(file: Path | None) -> dict[str, Row]:
    """Return the rows of a file by key, none without a file; raises AttentionError if the file cannot be used."""
    if file is None or not os.path.lexists(file):
        return {}
    try:
        return _parsed(cache_folder.read(file))
    except FileNotFoundError:  # removed meanwhile
        return {}
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"it is damaged, {error}" if isinstance(error, DamagedError) else "it is damaged"
    rule = "`python -m warpattn tune --forget` removes it"
    raise AttentionError(f"tuned choices in {file} are not used: {why}; {rule}")


class DamagedError(ValueError):
    """Raised for a damaged file of tuned choices."""


def _parsed(text: bytes) -> dict[str, Row]:
    if len(text) > MOST_BYTES:
        raise DamagedError(f"it has more than {MOST_BYTES} bytes")
    header, _, body = text.partition(b"\n")
    told = json.loads(header)
    if told["format"] != FORMAT:
        raise DamagedError(f"its format is not {FORMAT!r}")
    if told["sha256"] != hashlib.sha256(body).hexdigest():
        raise DamagedError("its checksum is another one")
    listed = json.loads(body)
    if len(listed) > MOST_ROWS:
        raise DamagedError(f"it has more than {MOST_ROWS} rows")
    rows = [_row(fields) for fields in listed]
    return {row.key: row for row in rows}


def _row(fields: Mapping[str, Any]) -> Row:
    """Make a row from its fields in a file; raises DamagedError or TypeError if a field is wrong."""
    row = Row(**fields)
    words = (row.key, row.call, row.card, row.candidate, row.built_in, row.date, row.kernels, row.triton)
    times, refused = dict(row.microseconds), dict(row.refused)
    numbers = [isinstance(us, float) and 0 < us < math.inf for us in times.values()]
    fine = all(isinstance(word, str) for word in (*words, *refused.values())) and type(row.rounds) is int
    if not (fine and all(numbers) and BUILT_IN in times and row.candidate in times):
        raise DamagedError(f"the row of {row.call!r} names no measured configuration")
    return row


def add(file: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file; a row replaces one with its key. Other processes may add rows at the same time.

    Raises OSError, or AttentionError for a damaged file, which is left unchanged.
    """

    def change(known: dict[str, Row]) -> dict[str, Row]:
        for row in rows:
            known.pop(row.key, None)  # the newest are last
            known[row.key] = row
        return known

    _change(file, change)


def forget(file: Path | None) -> int:
    """Remove the file, damaged or not; return how many rows it had, 0 if unknown. Raises OSError if it cannot."""
    if file is None or not os.path.lexists(file):
        return 0
    try:
        count = len(read(file))
    except AttentionError:
        count = 0
    file.unlink()
    return count


def _change(file: Path, change: Callable[[dict[str, Row]], dict[str, Row]]) -> None:
    cache_folder.make_folders(file)
    with _locked(file.with_name("lock")):
        rows = list(change(read(file)).values())[-MOST_ROWS:]
        body = json.dumps([asdict(row) for row in rows]).encode()
        header = json.dumps({"format": FORMAT, "sha256": hashlib.sha256(body).hexdigest()}).encode()
        new = file.with_suffix(".part")  # only this process writes it: it has the lock
        new.unlink(missing_ok=True)
        handle = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
        with os.fdopen(handle, "wb") as written:
            written.write(header + b"\n" + body)
        new.replace(file)


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the lock; waits until no other process holds it."""
    handle = os.open(place, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the last of two processes wins
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
