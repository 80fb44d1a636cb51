"""An upgrade from one set of values to another changes nothing that Kubernetes keeps, or says so
before it is tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helm.conftest import both_helms
from tests.helm.test_cases import CASES, render
from tests.helm.test_secrets import OWNER, FakeCluster, kubeconfig, run_against

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helm.conftest import Chart, Manifest

__all__ = ["kubeconfig"]
IMMUTABLE = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
    "Service": ("clusterIP",),
    "RoleBinding": (),
}
OTHER_VOLUMES = {"minimal", "kind"}
"""Cases of another size: for a first installation."""


def kept(manifest: Manifest) -> Manifest:
    """What of an object cannot change."""
    spec = manifest.get("spec", {})
    fields = {name: spec.get(name) for name in IMMUTABLE.get(manifest["kind"], ())}
    return fields | {name: manifest[name] for name in ("roleRef", "type") if name in manifest}


@pytest.mark.parametrize("case", sorted(set(CASES) - OTHER_VOLUMES))
def test_every_case_can_follow_the_defaults(chart: Chart, case: str) -> None:
    before = {
        (one["kind"], one["metadata"]["name"]): kept(one)
        for one in render(chart, "default").manifests
    }
    for one in render(chart, case).manifests:
        key = (one["kind"], one["metadata"]["name"])
        assert before.get(key, kept(one)) == kept(one), key


def installed(chart: Chart, size: str | None = None) -> None:
    """Put the StatefulSet of the default values into the cluster, whose volumes the cluster
    tells by that size.
    """
    manifest = chart.render().get("StatefulSet", "storage")
    claims = [
        claim | {"spec": {**claim["spec"]}} for claim in manifest["spec"]["volumeClaimTemplates"]
    ]
    if size is not None:
        claims[0]["spec"]["resources"] = {"requests": {"storage": size}}
    metadata = manifest["metadata"] | {"annotations": OWNER}
    live = manifest | {
        "metadata": metadata,
        "spec": manifest["spec"] | {"volumeClaimTemplates": claims},
    }
    FakeCluster.objects[f"statefulsets/{metadata['name']}"] = live


@both_helms
@pytest.mark.parametrize(
    "values",
    [
        "storage.persistence.size=51Gi",
        "storage.persistence.storageClassName=fast",
        "storage.persistence.enabled=false",
    ],
)
def test_other_volumes_are_refused_with_what_to_do(
    chart: Chart, kubeconfig: Path, helm: str, values: str
) -> None:
    assert run_against(chart, kubeconfig, helm, "--set", values).returncode == 0, (
        "nothing is installed"
    )
    installed(chart)
    answer = run_against(chart, kubeconfig, helm, "--set", values)
    assert "which cannot change: leave it as it was, or see" in answer.stderr
    assert "### Other volumes" in (chart.path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("size", "told"),
    [("50Gi", "50Gi"), ("2048Gi", "2Ti"), ("1.5Ti", "1536Gi"), ("1Pi", "1Pi"), ("0.5Ti", "512Gi")],
)
def test_the_same_volumes_are_known_however_the_cluster_writes_their_size(
    chart: Chart, kubeconfig: Path, size: str, told: str
) -> None:
    installed(chart, told)
    answer = run_against(chart, kubeconfig, "helm4", "--set", f"storage.persistence.size={size}")
    assert answer.returncode == 0, answer.stderr
