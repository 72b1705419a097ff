"""`python -m warpattn`: the command line, or one sentence saying which packages it needs."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from io import TextIOWrapper

from warpattn.runtime import compilers

NEEDED = ("typer", "rich")
WARMING = "warpattn.serving.warming"
HOPPER = "sm90"
INTERRUPTED = 130  # 128 + SIGINT, as of a shell
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def named_arch(words: list[str]) -> str:
    """Return the architecture that `--arch` names, else Hopper. On another card that guess costs half a second of
    imports."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--arch":
            return value if equals else following
    return HOPPER


def main() -> None:
    """Run the command line; exits with status 1 when a package of the extra `cli` is missing, or
    standard output is closed."""
    if sys.stdout is None:  # closed: a file could get its number
        sys.exit("error: the output cannot be written: standard output is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # for encodings without × and …
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"the command line needs {' and '.join(missing)}: pip install {' '.join(NEEDED)} safetensors")
    if "warm" in sys.argv[1:] and find_spec("triton") is not None:
        compilers.start(WARMING, named_arch(sys.argv))  # which imports torch while this process does
    if os.environ.get("COLUMNS", "").strip("0") == "":
        os.environ.pop("COLUMNS", None)  # 0 is no width, as in `shutil.get_terminal_size`
    from warpattn.cli.app import app

    written(app)


def written(command: Callable[[], object]) -> None:
    """Run a command; exits with status 1 when what it writes finds no space, and without a word where the reader of a
    pipe has gone."""
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITTEN or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python writes the rest at exit
        sys.exit(1 if error.errno == errno.EPIPE else f"error: the output cannot be written: {error.strerror}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the command has begun, which ends alike
        sys.exit(INTERRUPTED)
