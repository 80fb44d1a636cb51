"""The webhook as a process of its own, asked over TLS as an API server asks."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonpatch
import pytest
from lmcache_webhook import startup_check

from tests.fixtures.pods import SHAPES, Pod, plain
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.tls import Authority, Pair
from tests.fixtures.waiting import wait_until


def publish_certificate(directory: Path) -> None:
    """Replace ca.crt, tls.crt and tls.key with those of a new authority."""
    authority = Authority(directory)
    authority.renew(Pair(directory / "tls.crt", directory / "tls.key"), "localhost")
    authority.publish(directory / "ca.crt")


def environment(directory: Path, **more: str) -> dict[str, str]:
    values = {
        "PORT": "0",
        "HEALTH_PORT": "0",
        "SIDECAR_IMAGE": "s:1",
        "PAYLOAD_IMAGE": "p:1",
        "TLS_CERT_FILE": str(directory / "tls.crt"),
        "TLS_KEY_FILE": str(directory / "tls.key"),
        **more,
    }
    return {f"LMCACHE_WEBHOOK_{name}": value for name, value in values.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("webhook")
    publish_certificate(made)
    return made


@pytest.fixture(scope="module")
def service(directory: Path) -> Iterator[ServiceProcess]:
    with running_service("lmcache_webhook", directory, environment(directory)) as running:
        yield running


def client_for(service: ServiceProcess, directory: Path) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(directory / "ca.crt"))
    return httpx.Client(
        base_url=f"https://localhost:{service.ports['port']}",
        verify=context,
        trust_env=False,
        timeout=60,
    )


@pytest.fixture
def client(service: ServiceProcess, directory: Path) -> Iterator[httpx.Client]:
    with client_for(service, directory) as made:
        yield made


def question(pod: Any, **more: Any) -> dict[str, Any]:
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "team-a",
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
        "object": pod,
        "oldObject": None,
        "options": {"apiVersion": "meta.k8s.io/v1", "kind": "CreateOptions"},
        **more,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def ask(client: httpx.Client, pod: Any, **more: Any) -> dict[str, Any]:
    answer = client.post("/mutate?timeout=5s", json=question(pod, **more))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["apiVersion"], body["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response: dict[str, Any] = body["response"]
    assert response["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
    assert response["allowed"] is True
    return response


def patched(pod: Pod, response: dict[str, Any]) -> Pod:
    assert response["patchType"] == "JSONPatch"
    changed: Pod = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
    return changed


def test_a_pod_that_asks_gets_its_sidecar(client: httpx.Client) -> None:
    for shape in SHAPES.values():
        changed = patched(shape(), ask(client, shape()))
        assert changed["spec"]["initContainers"][-1]["name"] == "lmcache-sidecar"
        assert not {"patch", "patchType"} & set(ask(client, changed))
    assert ask(client, plain(), dryRun=True) == ask(client, plain())


def test_a_pod_that_cannot_be_injected_gets_a_warning(client: httpx.Client) -> None:
    document = plain()
    document["spec"]["hostNetwork"] = True
    response = ask(client, document)
    assert response["warnings"][0].startswith(
        "lmcache: not injected: the pod uses its node's network"
    )
    assert patched(document, response)["metadata"]["annotations"][
        "lmcache.io/inject-status"
    ].startswith("not injected: ")


@pytest.mark.parametrize(
    "more",
    [
        {"operation": "UPDATE"},
        {"operation": "DELETE", "object": None},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
        {"object": {"spec": "nonsense"}},
        {"namespace": ""},
    ],
)
def test_everything_is_allowed(more: dict[str, Any], client: httpx.Client) -> None:
    ask(client, plain(), **more)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 422),
        (b"[]", 422),
        (json.dumps({**question({}), "apiVersion": "admission.k8s.io/v1beta1"}).encode(), 422),
        (b'{"a":' * 100_000, 422),
        (b" " * ((1 << 20) + 1), 413),
    ],
)
def test_a_malformed_review_is_a_problem(content: bytes, status: int, client: httpx.Client) -> None:
    """The API server then lets the pod through, by failurePolicy."""
    answer = client.post("/mutate", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (status, 400) if status == 422 else answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    ask(client, plain())


def test_its_health_and_metrics_are_served(client: httpx.Client, service: ServiceProcess) -> None:
    ask(client, plain())
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json()["status"] == "ok"
    assert 'lmcache_webhook_reviews_total{verdict="injected"}' in client.get("/metrics").text
    assert "/mutate" in client.get("/openapi.json").json()["paths"]
    probes = f"http://127.0.0.1:{service.ports['health_port']}"
    assert httpx.get(f"{probes}/readyz", trust_env=False).status_code == 200
    assert httpx.get(f"{probes}/mutate", trust_env=False).status_code == 404


def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    publish_certificate(tmp_path)
    with running_service("lmcache_webhook", tmp_path, environment(tmp_path)) as service:
        with client_for(service, tmp_path) as before:
            ask(before, plain())
        publish_certificate(tmp_path)
        wait_until(lambda: is_trusted(service, tmp_path))


def is_trusted(service: ServiceProcess, directory: Path) -> bool:
    try:
        with client_for(service, directory) as client:
            ask(client, plain())
    except httpx.ConnectError:
        return False
    return True


def test_beyond_its_rate_pods_are_let_through(directory: Path, tmp_path: Path) -> None:
    with (
        running_service(
            "lmcache_webhook", tmp_path, environment(directory, MAX_REVIEWS_PER_S="1")
        ) as service,
        client_for(service, directory) as client,
    ):
        responses = [ask(client, plain()) for _ in range(4)]
    assert "patch" in responses[0]
    assert any(
        "max_reviews_per_s" in response.get("warnings", [""])[0] for response in responses[1:]
    )


def test_the_startup_check_ends_when_the_webhook_injects(
    service: ServiceProcess,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is trusted as by the API server: with another authority nothing is answered."""
    publish_certificate(tmp_path)
    foreign, own = ((folder / "ca.crt").read_text() for folder in (tmp_path, directory))
    host = f"localhost:{service.ports['port']}"
    with pytest.raises(ssl.SSLCertVerificationError):
        startup_check.ask(host, "team-a", foreign)
    refusals = [ConnectionRefusedError("refused")] * 2
    answered = startup_check.ask

    def ask(*arguments: str) -> str:
        if refusals:
            raise refusals.pop()
        return answered(*arguments)

    monkeypatch.setattr(startup_check, "ask", ask)
    monkeypatch.setattr(startup_check, "PAUSE_S", 0)
    monkeypatch.setattr("sys.argv", ["", host, "team-a", own])
    assert startup_check.main() == 0
    before, after = capsys.readouterr().out.splitlines()
    assert before == f"{host}: refused"
    assert after.startswith(f"{host}: injected: the container vllm shares")


def test_the_startup_check_says_why_a_pod_would_not_be_injected(
    directory: Path, tmp_path: Path
) -> None:
    tenants = json.dumps([{"namespaces": ["team-b"]}])
    environ = environment(directory, TENANTS=tenants)
    with running_service("lmcache_webhook", tmp_path, environ) as other:
        host = f"localhost:{other.ports['port']}"
        authority = (directory / "ca.crt").read_text()
        status = startup_check.ask(host, "team-a", authority)
    assert status.startswith("not injected: the webhook of team-b knows no tenant for")
