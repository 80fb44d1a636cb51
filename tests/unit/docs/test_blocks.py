"""What the blocks of the pages that a newcomer pastes from name is there.

Tests run these blocks: `tests/integration/ctl/test_pasted.py` the shell of README and quick start,
`tests/integration/transformers` the README's Python, `tests/integration/test_tutorial.py` the
tutorial. `tests/helm/test_quickstart.py` compares the quick start with what Helm renders.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hcl2
import pytest
from lmcache_webhook.injection.plan import INJECT

from tests.unit.docs.pages import FENCE, ROOT

README, QUICKSTART, TUTORIAL = (
    ROOT / name for name in ("README.md", "docs/quickstart.md", "docs/tutorial.md")
)
PASTED = (README, QUICKSTART)
LANGUAGES = {README: {"sh", "python"}, QUICKSTART: {"", "sh"}, TUTORIAL: {"sh", "text"}}
PROGRAMS = {
    *("cat", "docker", "export", "git", "helm", "kubectl", "lmcachectl", "make", "pip", "python3"),
}
WORDS_OF_SHELL = {"for", "done", "sleep", "umask"}


def name_of(page: Path) -> str:
    return page.name


def shell(page: Path) -> Iterator[str]:
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in ("", "sh"):
            yield text


def lines(page: Path) -> Iterator[str]:
    """Commands, without comments and what they read from the page itself."""
    for block in shell(page):
        text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r" \\\n *", " ", text)  # a continued line
        for line in text.splitlines():
            if line.strip():
                yield re.split(r"\s{2,}#\s", line)[0].strip()


@pytest.mark.parametrize("page", LANGUAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_run_or_checked(page: Path) -> None:
    kinds = [language for language, _ in FENCE.findall(page.read_text(encoding="utf-8"))]
    assert kinds
    assert set(kinds) <= LANGUAGES[page]


@pytest.mark.parametrize("page", LANGUAGES, ids=name_of)
def test_a_shell_can_read_every_block(page: Path) -> None:
    for block in shell(page):
        read = subprocess.run(
            ["bash", "-n"], input=block, capture_output=True, text=True, check=False
        )
        assert (read.returncode, read.stderr) == (0, ""), block


@pytest.mark.parametrize("page", PASTED, ids=name_of)
def test_commands_are_of_programs_that_are_asked_for(page: Path) -> None:
    for line in lines(page):
        first = re.sub(r"^(?:\w+=\S+ )+|^\(", "", line).split()[0].rstrip(";")
        assert first in PROGRAMS | WORDS_OF_SHELL, line


@pytest.mark.parametrize("page", PASTED, ids=name_of)
def test_files_of_the_repository_are_there(page: Path) -> None:
    named = [
        word
        for line in lines(page)
        for word in re.findall(r"(?:^|\s)(?:\./)?((?:helm|libs|services|docker)/[\w./-]+)", line)
    ]
    assert named
    assert [word for word in named if not (ROOT / word).exists()] == []


def test_images_are_baked_by_names_that_the_file_has() -> None:
    bake = hcl2.loads((ROOT / "docker-bake.hcl").read_text(encoding="utf-8"))
    variables = {name.strip('"') for block in bake["variable"] for name in block}
    calls = [line for line in lines(QUICKSTART) if "docker buildx bake" in line]
    assert calls
    for line in calls:
        assert set(re.findall(r"\b([A-Z]+)=", line)) <= variables
        assert line.split("docker buildx bake")[1].split() == ["--push"]


@pytest.mark.parametrize("page", PASTED, ids=name_of)
def test_patches_carry_the_label_that_the_webhook_reads(page: Path) -> None:
    patches = [
        json.loads(patch) for line in lines(page) for patch in re.findall(r" -p '(\{.*\})'", line)
    ]
    labels = [patch["spec"]["template"]["metadata"]["labels"] for patch in patches]
    assert labels == [{INJECT: "true"}]
