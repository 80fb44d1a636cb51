"""Show the version of this release, or write another one everywhere it stands.

    python -m tests.version               # each place, and its version
    python -m tests.version 0.2.0         # write it; then run what it prints
    python -m tests.version 0.2.0-rc1     # a release candidate: Python's places say 0.2.0rc1
    python -m tests.version https://host/owner/name    # the repository's address

Both stand in files that tools read without this repository: packages and their pins of one
another, images, charts, commands to copy. These tables are all of them, and tests compare them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = r"(\d+\.\d+\.\d+(?:-rc\d+)?)"
"""As images, charts and tags have it (semver)."""
OF_PYTHON = r"(\d+\.\d+\.\d+(?:rc\d+)?)"
COMMAND = rf"(?:\blmcache-[a-z-]+:|\bTAG=){VERSION}"
MANIFEST = rf'^version = "{OF_PYTHON}"|"lmcache-[a-z]+(?:\[[a-z0-9,]+\])?=={OF_PYTHON}"'
MANIFESTS = ("kernels/pyproject.toml", "libs/*/pyproject.toml", "services/*/pyproject.toml")
PLACES = {
    "libs/lmcache_core/src/lmcache_core/__init__.py": rf'^__version__ = "{OF_PYTHON}"',
    **dict.fromkeys(MANIFESTS, MANIFEST),
    "docker/*.Dockerfile": rf'{COMMAND}|image\.version="{VERSION}"',
    "docker-bake.hcl": rf'{COMMAND}|(?<=variable "TAG" {{\n)  default     = "{VERSION}"',
    "docker/README.md": COMMAND,
    "docs/quickstart.md": COMMAND,
    "helm/lmcache/README.md": COMMAND,
    "helm/*/Chart.yaml": rf'^ *(?:version|appVersion): "?{VERSION}"?$',
    "helm/*/Chart.lock": rf"^ *version: {VERSION}$",
}
"""Files, and where a version stands in their text: in a group."""
ADDRESS = r"(https://[\w.-]+/[\w.-]+/[\w.-]+?)(?=[\"/\n])"
ADDRESSES = {
    **dict.fromkeys(MANIFESTS, rf'^[A-Z]\w+ = "{ADDRESS}'),
    "helm/*/Chart.yaml": rf"^(?:home: |icon: |sources:\n  - ){ADDRESS}",
}
"""The same of the repository's address, which release.yml writes."""
NEXT = """\
helm dependency update helm/lmcache
make chart-snapshot api-docs
"""


def places(
    root: Path = ROOT, table: dict[str, str] = PLACES
) -> Iterator[tuple[Path, re.Pattern[str]]]:
    """Yield the files of a checkout with a version in them, each with the pattern."""
    for glob, pattern in table.items():
        paths = sorted(root.glob(glob))
        if not paths:
            raise FileNotFoundError(f"{glob}: no such file; tests/version.py names it")
        yield from ((path, re.compile(pattern, re.MULTILINE)) for path in paths)


def found(root: Path = ROOT, table: dict[str, str] = PLACES) -> dict[str, list[str]]:
    """Return the versions in each file, in their order, as images have them."""
    return {
        path.relative_to(root).as_posix(): [
            re.sub(r"(?<=\d)rc(?=\d+$)", "-rc", match[match.lastindex or 0])
            for match in pattern.finditer(path.read_text(encoding="utf-8"))
        ]
        for path, pattern in places(root, table)
    }


def write(text: str, root: Path = ROOT) -> None:
    """Write a version, or the repository's address, in the place of each that is there.

    Raises:
        ValueError: It is not of the form that packages, images and charts all take.
    """
    if re.fullmatch(VERSION, text):
        table = PLACES
    elif re.fullmatch(rf"{ADDRESS}\n", f"{text}\n"):
        table = ADDRESSES
    else:
        raise ValueError(
            f"{text!r}: must be three numbers, as 1.2.3 or 1.2.3-rc1, or https://host/owner/name"
        )
    for path, pattern in places(root, table):
        content = path.read_text(encoding="utf-8")
        new = text.replace("-rc", "rc") if OF_PYTHON in pattern.pattern else text
        for match in reversed(list(pattern.finditer(content))):
            start, end = match.span(match.lastindex or 0)
            content = content[:start] + new + content[end:]
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
        print(NEXT, end="")
    else:
        for place, versions in found().items():
            print(*sorted(set(versions)), place)
