"""What holds of the release's objects at any time; each broken rule yields a sentence."""

from __future__ import annotations

import yaml

from tests.cluster.helm import Helm
from tests.cluster.kube import Cluster, name_of
from tests.cluster.names import BASE, INSTANCE
from tests.cluster.permissions import permission_problems
from tests.cluster.pods import probe_problems, security_problems
from tests.cluster.policies import uncovered
from tests.cluster.webhook import trust_problems

NETWORKING = "apis/networking.k8s.io/v1"
ADMISSION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


def release_problems(cluster: Cluster, helm: Helm) -> list[str]:
    """Return what is wrong with the release's objects."""
    pods = cluster.pods(INSTANCE)
    policies = cluster.items(cluster.path("networkpolicies", api=NETWORKING))
    webhooks = cluster.call("GET", f"{ADMISSION}/{cluster.namespace}-{BASE}-webhook")
    secret = cluster.call("GET", cluster.path("secrets", f"{BASE}-webhook-tls"))
    return [
        *missing_objects(cluster, helm.manifest()),
        *uncovered(policies, pods),
        *(text for pod in pods for text in probe_problems(pod)),
        *(text for pod in cluster.items(cluster.path("pods")) for text in security_problems(pod)),
        *trust_problems(webhooks, secret),
        *permission_problems(cluster),
    ]


def missing_objects(cluster: Cluster, manifest: str) -> list[str]:
    """Return which objects of a release are not in the cluster."""
    there = {(one.partition("/")[0], one.rpartition("/")[2]) for one in cluster.objects()}
    return [
        f"{one['kind']} {name_of(one)} of the release is not there"
        for one in yaml.safe_load_all(manifest)
        if one and (one["kind"], name_of(one)) not in there
    ]
