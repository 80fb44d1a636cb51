"""One release has one version: packages and their pins of one another, images, what is baked, and
what the chart asks for.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import lmcache_core
import pytest

from tests.version import ROOT, found, places, write

NUM_FILES = {"pyproject.toml": 11, "Dockerfile": 7, "Chart.yaml": 2, "Chart.lock": 1}


def test_every_place_has_the_same_version() -> None:
    versions = found()
    assert {
        ending: sum(name.endswith(ending) for name in versions) for ending in NUM_FILES
    } == NUM_FILES
    assert {name: set(each) for name, each in versions.items()} == {
        name: {lmcache_core.__version__} for name in versions
    }
    assert len(versions["helm/lmcache/Chart.yaml"]) == 3, "its own, the images', the library's"
    assert len(versions["docker-bake.hcl"]) == 2, "the default tag, and a command to copy"


def test_packages_of_one_release_are_installed_together() -> None:
    """Siblings are pinned to the same version: pip never mixes releases."""
    loose = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path, _ in places()
        if path.name == "pyproject.toml"
        for line in path.read_text(encoding="utf-8").splitlines()
        if '"lmcache-' in line and "==" not in line and not line.startswith("name = ")
    ]
    assert loose == []


def test_another_version_is_written_everywhere(tmp_path: Path) -> None:
    before = found()
    for path, _ in places():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    write("12.0.3", tmp_path)
    assert found(tmp_path) == {name: ["12.0.3"] * len(each) for name, each in before.items()}
    write(lmcache_core.__version__, tmp_path)
    for path, _ in places():
        assert (tmp_path / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="must be three numbers"):
        write("v1", tmp_path)
