"""What docs/operations.md says of GitOps: with the values that it names nothing is generated, and
the fields that it names are those that others write.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from tests.helm.conftest import REPOSITORY

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

PAGE = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## GitOps\n")[2].partition("\n## ")[0]
CA_BUNDLES = [f"/webhooks/{index}/clientConfig/caBundle" for index in (0, 1)]
IGNORED = {
    "MutatingWebhookConfiguration": CA_BUNDLES,
    "Deployment": ["/spec/replicas"],
    "StatefulSet": ["/spec/replicas"],
}


def sorted_objects(rendering: Rendering) -> list[Manifest]:
    return sorted(rendering.manifests, key=lambda one: (one["kind"], one["metadata"]["name"]))


def test_each_rendering_is_the_same(chart: Chart) -> None:
    """Two renderings, by two releases of Helm."""
    first, second = (chart.case("gitops", helm) for helm in ("helm3", "helm4"))
    assert sorted_objects(first) == sorted_objects(second)
    assert first.of_kind("Secret") == []
    assert first.of_kind("MutatingWebhookConfiguration") != []


def test_the_page_names_the_fields_that_others_write(chart: Chart) -> None:
    argo, flux = (
        yaml.safe_load(text)["spec"]
        for text in re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    )
    assert {one["kind"]: one["jsonPointers"] for one in argo["ignoreDifferences"]} == IGNORED
    ignored: list[dict[str, Any]] = flux["driftDetection"]["ignore"]
    assert {one["target"]["kind"]: one["paths"] for one in ignored} == IGNORED
    rows = re.findall(r"^\| (`/.*) \| ", SECTION, re.MULTILINE)
    assert {path for row in rows for path in re.findall("`(/[^`]+)`", row)} == {
        path for paths in IGNORED.values() for path in paths
    }
    [configuration] = chart.case("gitops").of_kind("MutatingWebhookConfiguration")
    clients = [one["clientConfig"] for one in configuration["webhooks"]]
    assert len(clients) == len(CA_BUNDLES)
    assert not any("caBundle" in client for client in clients), "cert-manager writes it"


def test_claims_of_storage_are_as_the_api_server_keeps_them(chart: Chart) -> None:
    """The list is compared as a whole: what the server adds would be a difference for ever."""
    [claim] = chart.render().get("StatefulSet", "storage")["spec"]["volumeClaimTemplates"]
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
