"""The documents that people read, and the code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GENERATED = ("docs/api", "docs/benchmarks.md")
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "helm/*/*.md",
        "services/*/*.md",
        "libs/*/*.md",
        "kernels/*.md",
    )
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).as_posix().startswith(GENERATED)
)
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")


def name_of(page: Path) -> str:
    """As it is written in a test's id."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Fenced blocks of these languages; without any, all."""
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if not languages or language in languages:
            yield text


def spans(page: Path) -> list[str]:
    """What stands in backticks within sentences and tables."""
    return SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def commands(page: Path) -> Iterator[str]:
    """Lines of shell and spans, with continued lines joined and comments taken off."""
    for block in blocks(page, "", "sh"):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield re.split(r"(?:^|\s)#\s", line)[0].strip()
    yield from spans(page)
