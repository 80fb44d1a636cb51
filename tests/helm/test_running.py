"""The services start with the settings and secrets of the chart, let one another in and no
stranger, over TLS too; and `helm test` passes on them.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from lmcache_core.errors import AuthenticationError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_node.node import client_tls, shown_token
from lmcache_servicekit.settings import load_settings
from lmcache_sidecar.settings import SidecarSettings

from tests.fixtures.tls import Authority
from tests.fixtures.waiting import wait_until
from tests.helm.conftest import MODELS, MUTUAL
from tests.helm.processes import Cluster

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest

TEST_TIMEOUT_S = 60
SERVICES = ("lookup", "broker", "storage", "sidecar")
VALUES: Manifest = MODELS | {"auth.tenant": "team-a"}


@pytest.fixture(scope="module", params=["plain", "mutual TLS"])
def cluster(
    chart: Chart, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """All four, connected."""
    is_plain = request.param == "plain"
    authority = None if is_plain else Authority(tmp_path_factory.mktemp("authority"))
    cluster = Cluster(
        chart.render(VALUES | ({} if is_plain else MUTUAL)),
        tmp_path_factory.mktemp("run"),
        authority,
    )
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.parametrize(
    ("service", "path", "field"),
    [("broker", "/v1/peers", "id"), ("lookup", "/v1/instances", "instance")],
)
def test_storage_and_sidecar_are_let_in(
    cluster: Cluster, service: str, path: str, field: str
) -> None:
    def known() -> set[str]:
        (listed,) = cluster.get(service, path, "operator").values()
        return {one[field] for one in listed}

    wait_until(lambda: known() == {"storage-0", "sidecar-0"})


@pytest.mark.parametrize("service", SERVICES)
def test_strangers_are_refused(cluster: Cluster, service: str) -> None:
    path = "/v1/status" if service == "sidecar" else "/v1/stats"
    with pytest.raises(urllib.error.HTTPError) as refusal:
        cluster.get(service, path)
    refusal.value.close()
    assert refusal.value.code == 401
    assert cluster.get(service, path, "operator")


@pytest.mark.parametrize("service", SERVICES)
def test_callers_without_a_certificate_are_refused(cluster: Cluster, service: str) -> None:
    if cluster.scheme == "http":
        assert cluster.get(service, "/healthz") == {"status": "ok"}
        return
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        cluster.get(service, "/healthz", shows_certificate=False)


@pytest.mark.parametrize("service", SERVICES)
def test_kubelets_need_neither_token_nor_certificate(cluster: Cluster, service: str) -> None:
    assert cluster.probe(service, "/healthz") == {"status": "ok"}


@pytest.mark.parametrize("shows_token", [True, False])
async def test_what_the_sidecar_has_lets_it_fetch_from_the_storage(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, shows_token: bool
) -> None:
    """Over lm://, with its own token, certificate and authority, and the name that it is told
    certificates have.
    """
    monkeypatch.chdir(cluster.config_of("sidecar").parent)
    settings = load_settings(SidecarSettings, cluster.config_of("sidecar"), {})
    assert settings.remote_url is not None
    tls = client_tls(settings) if settings.remote_url.startswith("lm+tls://") else None
    assert (tls is None) == (cluster.scheme == "http")
    token = shown_token(settings.service_token_file) if shows_token else None
    client = LmClient("127.0.0.1", cluster.lm_ports["storage"], token, ClientOptions(tls=tls))
    keys = [ChunkKey.of(settings.tenant, CacheEngineKey("vllm", "tiny", 1, 0, "ab" * 32))]
    try:
        if shows_token:
            assert await client.contains(keys, 10.0) == [False]
        else:
            with pytest.raises(AuthenticationError):
                await client.contains(keys, 10.0)
    finally:
        await client.close()


def command_of(cluster: Cluster) -> list[str]:
    """The pod's command, with this machine's addresses and paths: the script is that of the
    ConfigMap, secrets those of the sidecar.
    """
    data = cluster.rendering.get("ConfigMap", "release-test")["data"]
    path = cluster.folder / "release_test.py"
    path.write_text(data["release_test.py"], encoding="utf-8")
    pod = cluster.rendering.get("Pod", "release-test")
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["python", "/etc/lmcache/release_test.py"]
    places = {
        "cache-lmcache-storage-headless.inference.svc:65432": (
            f"127.0.0.1:{cluster.lm_ports['storage']}"
        ),
        "cache-lmcache-storage.inference.svc:8080": f"127.0.0.1:{cluster.ports['storage']}",
        "cache-lmcache-lookup.inference.svc:8081": f"127.0.0.1:{cluster.ports['lookup']}",
        "cache-lmcache-broker.inference.svc:8082": f"127.0.0.1:{cluster.ports['broker']}",
        "/run/secrets/": f"{cluster.folder}/sidecar/run/secrets/",
    }
    arguments = "\n".join(container["args"])
    for given, here in places.items():
        assert given in arguments
        arguments = arguments.replace(given, here)
    return [sys.executable, str(path), *arguments.splitlines()]


def run_release_test(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False
    )


def test_a_release_that_works_passes(cluster: Cluster) -> None:
    answer = run_release_test(command_of(cluster))
    assert answer.returncode == 0, answer.stderr
    done = [line for line in answer.stdout.splitlines() if line.startswith("ok ")]
    assert len(done) == len(answer.stdout.splitlines()) == 5
    held = cluster.get("storage", "/v1/chunks", "sidecar")
    assert held["chunks"] == [], "nothing stays"


def test_a_token_that_is_wrong_fails(cluster: Cluster) -> None:
    wrong = cluster.folder / "wrong-token"
    wrong.write_text("x" * 48, encoding="ascii")
    command = [
        f"--token-file={wrong}" if one.startswith("--token-file=") else one
        for one in command_of(cluster)
    ]
    answer = run_release_test([*command, "--patience-s=0"])
    assert answer.returncode == 1
    assert answer.stderr.count("FAILED") == 4, "all but the refusal of who shows none"
    assert "x" * 48 not in answer.stderr


def test_a_service_without_authentication_fails(cluster: Cluster) -> None:
    """/healthz stands for a service that asks for no token."""
    command = [
        one.replace("/v1/instances", "/healthz").replace("/v1/peers", "/v1/none")
        for one in command_of(cluster)
    ]
    answer = run_release_test([*command, "--patience-s=0"])
    assert answer.returncode == 1
    assert "/healthz: guarded: it answers 200 without a token, not 401" in answer.stderr
    assert "/v1/none: guarded: it answers" in answer.stderr
