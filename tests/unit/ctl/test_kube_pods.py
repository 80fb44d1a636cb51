"""Which pods of a namespace are looked at."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import jsonpatch
import pytest
from lmcache_ctl.kube.access import KubeApi
from lmcache_ctl.kube.pods import pods_of
from lmcache_webhook.app import injection_options
from lmcache_webhook.injection.injector import review_pod
from lmcache_webhook.settings import WebhookSettings

from tests.fixtures.pods import Pod, container, pod


class Namespace:
    """Pods, by what selectors ask for."""

    def __init__(self, *pods: Pod) -> None:
        self._pods = pods
        self.namespace = "team-a"
        self.core = SimpleNamespace(list_namespaced_pod=None)

    def list(self, method: Callable[..., Any], what: str, selector: str) -> list[Any]:
        wanted = dict(part.split("=") for part in selector.split(","))
        fitting = [
            one["metadata"]
            for one in self._pods
            if wanted.items() <= one["metadata"].get("labels", {}).items()
        ]
        return [
            SimpleNamespace(metadata=SimpleNamespace(name=found["name"], namespace="team-a"))
            for found in fitting
        ]


def injected(by: str) -> Pod:
    """A pod as the webhook leaves it, that has asked by its label or by its annotation."""
    document = pod(container(args=["m"]))
    document["metadata"] = {"name": f"by-{by}", f"{by}s": {"lmcache.io/inject": "true"}}
    outcome = review_pod(
        injection_options(WebhookSettings(sidecar_image="s:1", payload_image="p:1")),
        document,
        "team-a",
    )
    assert outcome.verdict == "injected", outcome.reason
    changed: Pod = jsonpatch.apply_patch(document, outcome.operations)
    return changed


@pytest.mark.parametrize("by", ["label", "annotation"])
def test_injected_pods_are_found_however_they_have_asked(by: str) -> None:
    ours = {"metadata": {"name": "ours", "labels": {"app.kubernetes.io/part-of": "lmcache"}}}
    strange = {"metadata": {"name": "strange", "labels": {"lmcache.io/inject": "true"}}}
    cluster = cast(KubeApi, Namespace(ours, strange, injected(by)))
    assert [one.metadata.name for one in pods_of(cluster, None)] == ["ours", f"by-{by}"]
