"""The matrix: every values file of `ci/`, the defaults and values-ha.yaml, with both Helms,
against several Kubernetes versions.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import kubernetes_validate
import pytest
import yaml

from tests.helm import extensions
from tests.helm.conftest import both_helms
from tests.helm.tools.describe_values import SCHEMA, VALUES, resolved

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

HELM_FOLDER = Path(__file__).resolve().parents[2] / "helm"
CASES = {
    path.name.removesuffix("-values.yaml"): path
    for path in sorted((HELM_FOLDER / "lmcache" / "ci").glob("*-values.yaml"))
}
CASES["ha"] = HELM_FOLDER / "lmcache" / "values-ha.yaml"
CASES["default"] = HELM_FOLDER / "lmcache" / "values.yaml"
KUBERNETES_VERSIONS = ("1.29", "1.33", "1.36", "1.37")
EXTENSIONS = {"cert-manager.io/v1": {"Certificate", "Issuer"}}
"""Kinds that Kubernetes itself has no schema of; test_tls.py knows their fields."""
OF_KUBERNETES = {"initialDelaySeconds", "nodeAffinity", "podAffinity", "podAntiAffinity"}
YAMLLINT = str(Path(__file__).parent / "yamllint.yaml")

every_case = pytest.mark.parametrize("case", sorted(CASES))


def render(chart: Chart, case: str, helm: str = "helm4") -> Rendering:
    return chart.render(None, CASES[case], helm=helm)


@both_helms
def test_lint_of_the_library(chart: Chart, helm: str) -> None:
    answer = chart.run("lint", "--strict", str(chart.path.parent / "lmcache-common"), helm=helm)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@every_case
def test_lint(chart: Chart, case: str) -> None:
    answer = chart.run("lint", "--strict", str(chart.path), "--values", str(CASES[case]))
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def schemas_are_read_once() -> Iterator[None]:
    """kubernetes-validate reads its files, some of megabytes, again for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "kubernetes_validate.utils.schema_contents",
            functools.cache(kubernetes_validate.utils.schema_contents),
        )
        yield


@every_case
@pytest.mark.usefixtures("schemas_are_read_once")
def test_objects_fit_kubernetes_schemas(chart: Chart, case: str) -> None:
    for manifest in render(chart, case).manifests:
        if manifest["kind"] in EXTENSIONS.get(manifest["apiVersion"], ()):
            continue
        if extensions.is_extension(manifest):
            extensions.validate(manifest)
            continue
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


@every_case
def test_both_helms_render_the_same(chart: Chart, case: str) -> None:
    def stable(rendering: Rendering) -> list[str]:
        """What is not generated: all but Secrets, and the authority in one of them."""
        kept = (one for one in rendering.manifests if one["kind"] != "Secret")
        texts = (json.dumps(one, sort_keys=True) for one in kept)
        return sorted(re.sub(r'"caBundle": "[^"]+"', "", text) for text in texts)

    assert stable(render(chart, case, "helm3")) == stable(render(chart, case, "helm4"))


@every_case
def test_no_object_appears_twice(chart: Chart, case: str) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in render(chart, case).manifests]
    assert len(names) == len(set(names))


def yamllint(*arguments: str, text: str | None = None) -> None:
    """Find duplicate keys, tabs and the like, which a parser would take in silence."""
    command = [sys.executable, "-m", "yamllint", "--strict", "--config-file", YAMLLINT, *arguments]
    answer = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stdout


@every_case
def test_rendered_yaml_is_clean(chart: Chart, case: str) -> None:
    yamllint("-", text=render(chart, case).text)


def test_committed_yaml_is_clean() -> None:
    files = HELM_FOLDER.rglob("*.yaml")
    yamllint(*(str(path) for path in files if path.parent.name not in ("templates", "charts")))


@both_helms
def test_dependency_build_leaves_the_lock_alone(chart: Chart, helm: str) -> None:
    committed = (HELM_FOLDER / "lmcache" / "Chart.lock").read_bytes()
    answer = chart.run("dependency", "build", str(chart.path), helm=helm)
    assert answer.returncode == 0, answer.stderr
    assert (chart.path / "Chart.lock").read_bytes() == committed


def test_schema_types_every_value() -> None:
    """Every value has a type, every object refuses unknown names, unless it is a map or one of
    Kubernetes' own objects.
    """
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    values = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
    maps = {"labels", "stringMap", "quantityMap", "connectorOptions", "sidecarTemplate"}
    open_by_design = {"values.models", "values.storage.tenantQuotas"}
    open_by_design |= {
        f"values.podDefaults.{name}" for name in ("podSecurityContext", "containerSecurityContext")
    }
    elsewhere = OF_KUBERNETES | {"global", "lmcache-common", "nameservers", "searches", "options"}
    elsewhere |= set(values["podDefaults"]) | {"type", "rollingUpdate", "partition"}

    def check(node: Manifest, value: object, where: str) -> None:
        reference = str(node.get("$ref", "")).rpartition("/")[2]
        node = resolved(schema, node)
        assert {"type", "anyOf", "enum"} & set(node), f"{where} has no type"
        if not isinstance(value, dict) or reference in maps or where in open_by_design:
            return
        known = node["properties"]
        assert node.get("additionalProperties") is False, f"{where} takes unknown names"
        for name, child in value.items():
            assert name in known, f"{where}.{name} is not in the schema"
            check(known[name], child, f"{where}.{name}")
        unlisted = set(known) - set(value) - elsewhere
        assert not unlisted, f"{where}: {unlisted} are not in values.yaml"

    check(schema, values, "values")
