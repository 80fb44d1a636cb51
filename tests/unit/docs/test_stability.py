"""The table of versions in docs/stability.md says what code, chart and workflows say."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml
from lmcache_core.integrations.vllm.releases import LEAST, LEAST_WITH_TIERS, Release, text_of

from tests.cluster.helm import OLDEST
from tests.helm.test_cases import KUBERNETES_VERSIONS
from tests.helm.tools.fetch_helm import TOOLS
from tests.releases import VLLM_AHEAD, VLLM_RELEASES
from tests.unit.docs.pages import ROOT

VERSION = r"\d+\.\d+(?:\.\d+)?"


def row(name: str) -> tuple[str, list[str]]:
    """The least version of a row, and those in the column of CI."""
    page = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(name)} \| ([^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    assert found is not None, name
    return found[1], re.findall(VERSION, found[2])


def yaml_of(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def run_from(least: Release) -> list[str]:
    releases = [*reversed(VLLM_RELEASES), *VLLM_AHEAD]
    return [text for text in releases if tuple(map(int, text.split("."))) >= least]


def test_releases_of_vllm() -> None:
    """The webhook declines below the least, `make test-vllm-releases` runs the others."""
    for kind, least in (("lmcache", LEAST), ("offloading-tier", LEAST_WITH_TIERS)):
        assert row(f"vLLM, connector `{kind}`") == (text_of(least), run_from(least))


def test_releases_of_kubernetes() -> None:
    least, named = row("Kubernetes")
    matrix = yaml_of(".github/workflows/e2e.yml")["jobs"]["kind"]["strategy"]["matrix"]
    nodes = [
        re.match(r"kindest/node:v(\d+\.\d+)\.\d+@sha256:[0-9a-f]{64}$", one)
        for one in matrix["node"]
    ]
    run = [found[1] for found in nodes if found]
    assert len(run) == len(nodes), "each by its digest"
    assert named[: len(run)] == run
    assert sorted(named) == sorted(KUBERNETES_VERSIONS)
    assert least == run[0]
    for chart in ("lmcache", "lmcache-common"):
        assert yaml_of(f"helm/{chart}/Chart.yaml")["kubeVersion"] == f">={least}.0-0"


def test_releases_of_helm() -> None:
    fetched = [tool.version for tool in TOOLS if tool.name.startswith("helm")]
    minors = [re.sub(r"^v|\.\d+$", "", version) for version in fetched]
    assert row("Helm") == (".".join(map(str, OLDEST)), minors)


def test_releases_of_python() -> None:
    matrix = yaml_of(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    bundled = re.search(r"for minor in ([\d ]+);", (ROOT / "docker/payload.Dockerfile").read_text())
    assert bundled is not None
    least, named = row("Python")
    assert named == [f"3.{minor}" for minor in bundled[1].split()]
    assert named[: len(matrix)] == matrix
    for manifest in ("kernels/pyproject.toml", "services/webhook/pyproject.toml"):
        project = tomllib.loads((ROOT / manifest).read_text())["project"]
        assert project["requires-python"] == f">={least}"
