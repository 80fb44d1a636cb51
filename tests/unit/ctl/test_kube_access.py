"""Which credentials are used: as kubectl, a kubeconfig goes before a pod's own account."""

from __future__ import annotations

from pathlib import Path

import kubernetes.config
import pytest
from lmcache_ctl.kube import access
from lmcache_ctl.kube.access import KubeApi
from lmcache_ctl.options import CtlSettings

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
