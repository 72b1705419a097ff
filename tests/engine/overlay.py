"""A newer vLLM on CPUs before it is built for them: the Python files of its wheel over an older build's extensions.

    python -m tests.engine.overlay vllm-0.33.0-….whl FOLDER SITE_PACKAGES       then PYTHONPATH=FOLDER pytest …

Everything above the compiled operators is the newer version's: engine, scheduler, runner, attention layers. Operators
that only the newer version has are missing, which small models do not meet.
"""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from pathlib import Path

EXTENSIONS = "*.abi3.so"


def overlay(wheel: Path, folder: Path, site_packages: Path) -> str:
    """Fill a folder; returns the version, marked as one for CPUs, which is how vLLM knows its platform."""
    extensions = sorted((site_packages / "vllm").glob(EXTENSIONS))
    if not extensions:
        raise SystemExit(f"{site_packages} has no vllm with {EXTENSIONS}; it must be that of a build for CPUs")
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder, [name for name in files.namelist() if not name.endswith(".so")])
    for extension in extensions:
        shutil.copy(extension, folder / "vllm" / extension.name)
    (known,) = folder.glob("vllm-*.dist-info")
    version = known.name.removeprefix("vllm-").removesuffix(".dist-info") + "+cpu"
    metadata = known / "METADATA"
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", metadata.read_text(), count=1))
    known.rename(folder / f"vllm-{version}.dist-info")
    return version


if __name__ == "__main__":
    print(overlay(*map(Path, sys.argv[1:])))
