"""One release has one version: packages, images, what is baked, and what the chart asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import hcl2
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    [
        ROOT / "kernels/pyproject.toml",
        *ROOT.glob("libs/*/pyproject.toml"),
        *ROOT.glob("services/*/pyproject.toml"),
    ]
)
DOCKERFILES = sorted(ROOT.glob("docker/*.Dockerfile"))
CHARTS = {
    path.parent.name: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in ROOT.glob("helm/*/Chart.yaml")
}
VERSION = CHARTS["lmcache"]["appVersion"]
# An image's tag, or TAG=, as a person would copy it.
TAG = re.compile(r"(?:\blmcache-[a-z-]+:|\bTAG=)(\d[\w.-]*\w)")
TOLD = [
    *DOCKERFILES,
    *(
        ROOT / name
        for name in (
            "docker-bake.hcl",
            "docker/README.md",
            "docs/quickstart.md",
            "helm/lmcache/README.md",
        )
    ),
]


def test_packages_have_the_chart_s_version() -> None:
    versions = {
        str(path.relative_to(ROOT)): tomllib.loads(path.read_text(encoding="utf-8"))["project"][
            "version"
        ]
        for path in PACKAGES
    }
    assert len(versions) == 11
    assert versions == dict.fromkeys(versions, VERSION)


def test_images_have_the_chart_s_version() -> None:
    labels = {
        path.name: re.findall(
            r'org\.opencontainers\.image\.version="([^"]*)"', path.read_text(encoding="utf-8")
        )
        for path in DOCKERFILES
    }
    assert len(labels) == 7
    assert labels == {key: [VERSION] for key in labels}
    bake = hcl2.loads((ROOT / "docker-bake.hcl").read_text(encoding="utf-8"))
    [tag] = [
        body["default"].strip('"')
        for block in bake["variable"]
        for name, body in block.items()
        if name.strip('"') == "TAG"
    ]
    assert tag == VERSION, "the chart asks for the tag that is baked"


def test_charts_agree() -> None:
    assert {name: chart["version"] for name, chart in CHARTS.items()} == {
        "lmcache": VERSION,
        "lmcache-common": VERSION,
    }
    lock = yaml.safe_load((ROOT / "helm/lmcache/Chart.lock").read_text(encoding="utf-8"))
    for dependencies in (CHARTS["lmcache"]["dependencies"], lock["dependencies"]):
        assert [(one["name"], one["version"]) for one in dependencies] == [
            ("lmcache-common", VERSION)
        ]


def test_commands_to_copy_name_it() -> None:
    tags = {
        str(path.relative_to(ROOT)): set(TAG.findall(path.read_text(encoding="utf-8")))
        for path in TOLD
    }
    assert tags == {key: {VERSION} for key in tags}
