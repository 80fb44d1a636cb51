"""One release has one version: packages and their pins of one another, images, what is baked, and
what the chart asks for.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import lmcache_core
import pytest
import yaml
from packaging.version import Version

from tests.version import ADDRESSES, ROOT, found, places, write

NUM_FILES = {"pyproject.toml": 12, "Dockerfile": 8, "Chart.yaml": 2, "Chart.lock": 1}


def test_every_place_has_the_same_version() -> None:
    versions = found()
    assert {
        ending: sum(name.endswith(ending) for name in versions) for ending in NUM_FILES
    } == NUM_FILES
    [version] = {one for each in versions.values() for one in each}
    assert all(versions.values())
    assert version.replace("-rc", "rc") == lmcache_core.__version__
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of every file with a version or the address in it."""
    for table in ({}, {"table": ADDRESSES}):
        for path, _ in places(**table):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return tmp_path


def test_another_version_is_written_everywhere(checkout: Path) -> None:
    before = found()
    [version] = {one for each in before.values() for one in each}
    for other in ("12.0.3", "12.0.3-rc4", "12.0.4"):
        write(other, checkout)
        assert found(checkout) == {name: [other] * len(each) for name, each in before.items()}
    write(version, checkout)
    for path, _ in places():
        assert (checkout / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    for wrong in ("v1", "1.2", "1.2.3rc1", "1.2.3-rc.1", "1.2.3-beta1"):
        with pytest.raises(ValueError, match="must be three numbers"):
            write(wrong, checkout)


def test_a_release_candidate_is_one_to_pip_and_to_helm(checkout: Path) -> None:
    """Python writes 1.0.0rc1, semantic versioning 1.0.0-rc1. A chart, whose version is an image's
    tag too, takes no other form, and pip names a wheel by its own.
    """
    write("1.0.0-rc1", checkout)
    for path in checkout.rglob("*.*"):
        text = path.read_text(encoding="utf-8")
        is_python = path.name in ("pyproject.toml", "__init__.py")
        assert text.count("1.0.0-rc1" if is_python else "1.0.0rc1") == 0, path
        assert Version("1.0.0-rc1").public == "1.0.0rc1"
        assert ("1.0.0rc1" if is_python else "1.0.0-rc1") in text, path


def test_the_repository_s_address_is_written_everywhere(checkout: Path) -> None:
    """A release says where it was made: release.yml writes the address of its repository."""
    before = found(table=ADDRESSES)
    assert {len(each) for name, each in before.items() if name.endswith(".toml")} == {3}
    assert {one for each in before.values() for one in each} == {"https://github.com/OWNER/lmcache"}
    write("https://example.com/some/na.me", checkout)
    for name, each in found(checkout, ADDRESSES).items():
        assert each == ["https://example.com/some/na.me"] * len(before[name])
        assert "OWNER" not in (checkout / name).read_text(encoding="utf-8")


def test_charts_say_where_they_are_from() -> None:
    """As Artifact Hub and `helm show chart` show it."""
    chart = yaml.safe_load((ROOT / "helm/lmcache/Chart.yaml").read_text(encoding="utf-8"))
    assert chart["sources"] == [chart["home"]]
    icon = chart["icon"].removeprefix(f"{chart['home']}/raw/main/")
    assert (ROOT / icon).read_text(encoding="utf-8").startswith("<svg ")
    version = chart["version"]
    is_early = version.startswith("0.") or "-rc" in version
    assert chart["annotations"]["artifacthub.io/prerelease"] == str(is_early).lower()
