"""`python -m warpattn`: the command line, or one sentence saying which packages it needs."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from io import TextIOWrapper

from warpattn.runtime import compilers

NEEDED = ("typer", "rich")
WARMING = "warpattn.serving.warming"
HOPPER = "sm90"


def named_arch(words: list[str]) -> str:
    """Return the architecture that `--arch` names, else Hopper. On another card that guess costs half a second of
    imports."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--arch":
            return value if equals else following
    return HOPPER


def main() -> None:
    """Run the command line; exits with status 1 when a package of the extra `cli` is missing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # for encodings without × and …
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"the command line needs {' and '.join(missing)}: pip install {' '.join(NEEDED)} safetensors")
    if "warm" in sys.argv[1:] and find_spec("triton") is not None:
        compilers.start(WARMING, named_arch(sys.argv))  # which imports torch while this process does
    from warpattn.cli.app import app

    app()


if __name__ == "__main__":
    main()
