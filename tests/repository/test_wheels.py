"""The distributions as one would publish them: built, and looked into."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import lmcache_core
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    path.parent
    for pattern in ("kernels", "libs/*", "services/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
)
COMMANDS = {
    "lmcache-broker": {"lmcache-broker"},
    "lmcache-ctl": {"lmcachectl", "kubectl-lmcache"},
    "lmcache-demo": {"lmcache-demo"},
    "lmcache-lookup": {"lmcache-lookup"},
    "lmcache-mover": {"lmcache-mover"},
    "lmcache-sidecar": {"lmcache-sidecar"},
    "lmcache-storage": {"lmcache-storage"},
    "lmcache-webhook": {"lmcache-webhook"},
}


def build(source: Path, target: str, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    [made] = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_wheel_can_be_published(package: Path, tmp_path: Path) -> None:
    """Built from the source distribution, as an installer would without a wheel for it."""
    with tarfile.open(build(package, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.glob("lmcache_*")
    with zipfile.ZipFile(build(source, "wheel", tmp_path / "wheel")) as wheel:
        names, facts = wheel.namelist(), metadata_of(wheel)
        [licence] = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
        points = [wheel.read(one).decode() for one in names if one.endswith("entry_points.txt")]
    [module] = [path.parent.name for path in (package / "src").glob("*/__init__.py")]
    assert f"{module}/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        module,
        facts["Name"].replace("-", "_"),
    }
    assert facts["Version"] == lmcache_core.__version__
    assert (facts["License-Expression"], facts.get_all("License-File")) == (
        "Apache-2.0",
        ["LICENSE"],
    )
    assert facts["Author"] == "The lmcache authors"
    addresses = dict(one.split(", ") for one in facts.get_all("Project-URL", []))
    assert set(addresses) == {"Homepage", "Changelog", "Issues"}
    assert facts["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in facts.get_all("Classifier", [])
    assert facts["Summary"]
    assert facts["Description-Content-Type"] == "text/markdown"
    assert facts.get_payload()
    for text in facts.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        if requirement.name.startswith("lmcache-"):
            assert str(requirement.specifier) == f"=={facts['Version']}", text
    lines = [line for text in points for line in text.splitlines() if " = " in line]
    commands = {line.partition(" = ")[0] for line in lines}
    assert commands == COMMANDS.get(facts["Name"], set())
