"""The chart, rendered by the pinned Helm 3 and Helm 4 out of a copy of its own, with its
dependency built.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.exposition import Exposed, scraped_services

REPOSITORY = Path(__file__).resolve().parents[2]
HELM_FOLDER = REPOSITORY / "helm"
FETCH_HELM = Path(__file__).parent / "tools" / "fetch_helm.py"
NAMESPACE = "inference"
REGISTRY = "registry.example.com/lmcache"
SET_REGISTRY = ("--set-json", f'images.registry="{REGISTRY}"')
"""The one value that has no default; others that are set win over it."""
RENDERING = ("template", "install", "upgrade", "lint")
RELEASE = "cache"
COMPONENT = "app.kubernetes.io/component"
HELM_TIMEOUT_S = 60

Manifest = dict[str, Any]
MODEL: Manifest = {"model": "example/tiny-llama"}
MODELS: Manifest = {"models": {"tiny": MODEL}}
TLS: Manifest = {"tls.enabled": True, "tls.existingSecret": "certificates"}
MUTUAL: Manifest = TLS | {"tls.mutual": True}
MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]

both_helms = pytest.mark.parametrize("helm", ["helm3", "helm4"])


def containers_of(pod: Manifest) -> list[Manifest]:
    """The containers of a pod's specification, init containers first."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def option_of(container: Manifest, name: str) -> Any:
    """The JSON that follows an option of a container's arguments."""
    return json.loads(container["args"][container["args"].index(name) + 1])


def parsed(text: str) -> list[Manifest]:
    """The objects of Helm's output."""
    return [one for one in yaml.safe_load_all(text) if one]


@dataclass(frozen=True)
class Rendering:
    """What one rendering gave.

    Attributes:
        text: Helm's output.
        manifests: The objects in it, in Helm's order.
    """

    text: str
    manifests: list[Manifest]

    def get(self, kind: str, name: str) -> Manifest:
        """The one object of that kind and name (without the release's prefix)."""
        found = [
            one
            for one in self.of_kind(kind)
            if one["metadata"]["name"] == f"{RELEASE}-lmcache-{name}"
        ]
        assert len(found) == 1, f"{len(found)} objects {kind} {name}"
        return found[0]

    def of_kind(self, *kinds: str) -> list[Manifest]:
        """The objects of these kinds."""
        return [one for one in self.manifests if one["kind"] in kinds]

    def workloads(self) -> list[Manifest]:
        """Everything that has a pod template."""
        return self.of_kind("Deployment", "StatefulSet")

    def pods(self) -> Iterator[tuple[str, Manifest]]:
        """Name of a workload and the specification of its pods."""
        for workload in self.workloads():
            yield workload["metadata"]["name"], workload["spec"]["template"]["spec"]

    def containers(self) -> Iterator[tuple[str, Manifest]]:
        """Every container, init containers included, as `workload/container`."""
        for name, pod in self.pods():
            for container in containers_of(pod):
                yield f"{name}/{container['name']}", container

    def pod(self, name: str) -> Manifest:
        """The specification of the pods of the workload of that name."""
        found: Manifest = dict(self.pods())[f"{RELEASE}-lmcache-{name}"]
        return found

    def container(self, name: str) -> Manifest:
        """The first container of that name."""
        return next(one for where, one in self.containers() if where.endswith(f"/{name}"))

    def config(self, component: str) -> Manifest:
        """The settings file of a component."""
        text = self.get("ConfigMap", component)["data"]["config.yaml"]
        settings: Manifest = yaml.safe_load(text)
        return settings

    def by_name(self, kind: str) -> dict[str, Manifest]:
        """Specifications of the objects of a kind, by name without the release's prefix."""
        prefix = f"{RELEASE}-lmcache-"
        return {
            one["metadata"]["name"].removeprefix(prefix): one["spec"] for one in self.of_kind(kind)
        }


@dataclass
class Chart:
    """A built copy of the chart.

    Attributes:
        path: Its folder.
        helms: The Helm binaries by name; `helm4` renders where a test does not care.
    """

    path: Path
    helms: dict[str, Path]
    _rendered: dict[str, Rendering] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def built(cls, folder: Path, helms: dict[str, Path]) -> Chart:
        """A copy in that folder, with its dependency."""
        shutil.copytree(
            HELM_FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.tgz")
        )
        chart = cls(folder / "lmcache", helms)
        answer = chart.run("dependency", "build", str(chart.path))
        assert answer.returncode == 0, answer.stderr
        return chart

    def run(self, *arguments: str, helm: str = "helm4") -> subprocess.CompletedProcess[str]:
        """Run one Helm command, without looking at a cluster."""
        registry = SET_REGISTRY if arguments[0] in RENDERING else ()
        command = [str(self.helms[helm]), arguments[0], *registry, *arguments[1:]]
        command += ["--kubeconfig", "/nonexistent"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=HELM_TIMEOUT_S, check=False
        )

    def template(
        self,
        values: Manifest | None,
        files: tuple[Path, ...],
        helm: str,
        command: tuple[str, ...] = ("template",),
    ) -> subprocess.CompletedProcess[str]:
        """`helm template`, or another command, with values files and, over them, values."""
        arguments = [*command, RELEASE, str(self.path), "--namespace", NAMESPACE]
        for file in files:
            arguments += ["--values", str(file)]
        for name, value in (values or {}).items():
            arguments += ["--set-json", f"{name}={json.dumps(value)}"]
        return self.run(*arguments, helm=helm)

    def render(
        self, values: Manifest | None = None, *files: Path, helm: str = "helm4"
    ) -> Rendering:
        """Render; the same rendering is made once.

        Args:
            values: By dotted name.
            files: Values files below them.
            helm: `helm3` or `helm4`.
        """
        key = json.dumps([values, [str(file) for file in files], helm])
        if key not in self._rendered:
            answer = self.template(values, files, helm)
            assert answer.returncode == 0, answer.stderr
            self._rendered[key] = Rendering(answer.stdout, parsed(answer.stdout))
        return self._rendered[key]

    def refuse(self, values: Manifest, *files: Path) -> str:
        """Render values that must be refused, once; gives the message."""
        key = json.dumps([values, [str(file) for file in files]])
        if key not in self._refused:
            answer = self.template(values, files, "helm4")
            assert answer.returncode != 0, "these values were accepted"
            self._refused[key] = answer.stderr
        return self._refused[key]

    def case(self, name: str, helm: str = "helm4") -> Rendering:
        """Render a values file of `ci/`."""
        return self.render(None, self.path / "ci" / f"{name}-values.yaml", helm=helm)


def fetch_helms() -> dict[str, Path]:
    """The pinned binaries by name, fetched where they are not in `.tools/` yet."""
    answer = subprocess.run(
        [sys.executable, FETCH_HELM], capture_output=True, text=True, timeout=400, check=False
    )
    assert answer.returncode == 0, answer.stderr
    pairs = (line.split(": ", 1) for line in answer.stdout.splitlines())
    return {name: Path(path) for name, path in pairs}


@pytest.fixture(scope="session")
def helms() -> dict[str, Path]:
    """The pinned binaries."""
    return fetch_helms()


@pytest.fixture(scope="session")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Exposed]]:
    """What each service shows to Prometheus; all of them are started for it."""
    return scraped_services(tmp_path_factory.mktemp("scraped"))


@pytest.fixture(scope="session")
def chart(helms: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Chart:
    """The chart as a user has it after `helm dependency build`, outside the checkout."""
    return Chart.built(tmp_path_factory.mktemp("helm"), helms)
