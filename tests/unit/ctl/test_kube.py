"""Which credentials are used (as kubectl, a kubeconfig goes before a pod's own account), and which
pods of a namespace are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import kubernetes.config
import pytest
from lmcache_ctl.kube import access
from lmcache_ctl.kube.access import KubeApi
from lmcache_ctl.kube.pods import pods_of
from lmcache_ctl.options import CtlSettings
from lmcache_webhook.app import injection_options
from lmcache_webhook.settings import WebhookSettings

from tests.fixtures import reviews
from tests.fixtures.pods import Pod, container, pod

NAMED, NO_CONTEXT = "named.yaml", "no-context.yaml"


def config(server: str, context: str = "{cluster: c, user: u}") -> str:
    return (
        f"current-context: here\ncontexts: [{{name: here, context: {context}}}]\n"
        f"clusters: [{{name: c, cluster: {{server: 'http://{server}'}}}}]\n"
        "users: [{name: u, user: {token: t}}]\n"
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a process in a pod that may ask the API."""
    (tmp_path / "namespace").write_text("of-the-pod\n")
    monkeypatch.setattr(access, "POD_NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)

    def of_the_pod(client_configuration: object) -> None:
        client_configuration.host = "http://pod"  # type: ignore[attr-defined]

    monkeypatch.setattr(kubernetes.config, "load_incluster_config", of_the_pod)
    (tmp_path / NAMED).write_text(config(NAMED, "{cluster: c, user: u, namespace: own}"))
    (tmp_path / NO_CONTEXT).write_text("contexts: []\n")
    return tmp_path


@pytest.mark.parametrize(
    ("kubeconfig", "has_default", "found", "place"),
    [
        ("", False, "pod", "namespace of-the-pod of this pod's cluster"),
        ("", True, "default", "namespace of-the-pod of context here"),
        (NAMED, False, NAMED, "namespace own of context here"),
        (NAMED, True, NAMED, "namespace own of context here"),
        ("nowhere.yaml", True, "pod", "namespace of-the-pod of this pod's cluster"),
        (NO_CONTEXT, False, "pod", "namespace of-the-pod of this pod's cluster"),
    ],
)
def test_a_kubeconfig_goes_before_the_pods_own_account(
    kubeconfig: str,
    has_default: bool,
    found: str,
    place: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(home / kubeconfig))
    if has_default:
        (home / ".kube").mkdir()
        (home / ".kube" / "config").write_text(config("default"))
    with KubeApi(CtlSettings()) as api:
        assert (api.configuration.host, api.place) == (f"http://{found}", place)


def test_a_named_kubeconfig_goes_before_all(home: Path) -> None:
    with KubeApi(CtlSettings(kubeconfig=home / NAMED)) as api:
        assert api.configuration.host == f"http://{NAMED}"


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


def asking(by: str) -> Pod:
    """A pod as the webhook leaves it, that has asked by its label or by its annotation."""
    document = pod(container(args=["m"]))
    document["metadata"] = {"name": f"by-{by}", f"{by}s": {"lmcache.io/inject": "true"}}
    settings = WebhookSettings(sidecar_image="s:1", payload_image="p:1")
    return reviews.injected(injection_options(settings), document)


@pytest.mark.parametrize("by", ["label", "annotation"])
def test_injected_pods_are_found_however_they_have_asked(by: str) -> None:
    ours = {"metadata": {"name": "ours", "labels": {"app.kubernetes.io/part-of": "lmcache"}}}
    strange = {"metadata": {"name": "strange", "labels": {"lmcache.io/inject": "true"}}}
    cluster = cast(KubeApi, Namespace(ours, strange, asking(by)))
    assert [one.metadata.name for one in pods_of(cluster, None)] == ["ours", f"by-{by}"]
