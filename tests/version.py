"""Show the version of this release, or write another one everywhere it stands.

    python -m tests.version            # each place, and its version
    python -m tests.version 0.2.0      # write it; then run what it prints

A version stands in files that tools read without this repository: packages and their pins of one
another, images, charts, commands to copy. This table is all of them, and a test compares them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = r"(\d+\.\d+\.\d+)"
COMMAND = rf"(?:\blmcache-[a-z-]+:|\bTAG=){VERSION}"
MANIFEST = rf'^version = "{VERSION}"|"lmcache-[a-z]+(?:\[[a-z0-9,]+\])?=={VERSION}"'
PLACES = {
    "libs/lmcache_core/src/lmcache_core/__init__.py": rf'^__version__ = "{VERSION}"',
    "kernels/pyproject.toml": MANIFEST,
    "libs/*/pyproject.toml": MANIFEST,
    "services/*/pyproject.toml": MANIFEST,
    "docker/*.Dockerfile": rf'{COMMAND}|image\.version="{VERSION}"',
    "docker-bake.hcl": rf'{COMMAND}|(?<=variable "TAG" {{\n)  default     = "{VERSION}"',
    "docker/README.md": COMMAND,
    "docs/quickstart.md": COMMAND,
    "helm/lmcache/README.md": COMMAND,
    "helm/*/Chart.yaml": rf'^ *(?:version|appVersion): "?{VERSION}"?$',
    "helm/*/Chart.lock": rf"^ *version: {VERSION}$",
}
"""Files, and where a version stands in their text: in a group."""
NEXT = """\
helm dependency update helm/lmcache
make chart-snapshot api-docs
"""


def places(root: Path = ROOT) -> Iterator[tuple[Path, re.Pattern[str]]]:
    """Yield the files of a checkout with a version in them, each with the pattern."""
    for glob, pattern in PLACES.items():
        paths = sorted(root.glob(glob))
        if not paths:
            raise FileNotFoundError(f"{glob}: no such file; tests/version.py names it")
        yield from ((path, re.compile(pattern, re.MULTILINE)) for path in paths)


def found(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the versions in each file, in their order."""
    return {
        path.relative_to(root).as_posix(): [
            match[match.lastindex or 0]
            for match in pattern.finditer(path.read_text(encoding="utf-8"))
        ]
        for path, pattern in places(root)
    }


def write(version: str, root: Path = ROOT) -> None:
    """Write a version in the place of each that is there.

    Raises:
        ValueError: It is not of the form that packages, images and charts all take.
    """
    if not re.fullmatch(VERSION, version):
        raise ValueError(f"version {version!r}: must be three numbers, as 1.2.3")
    for path, pattern in places(root):
        text = path.read_text(encoding="utf-8")
        for match in reversed(list(pattern.finditer(text))):
            start, end = match.span(match.lastindex or 0)
            text = text[:start] + version + text[end:]
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
        print(NEXT, end="")
    else:
        for place, versions in found().items():
            print(*sorted(set(versions)), place)
