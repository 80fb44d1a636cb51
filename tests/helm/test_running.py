"""The services start with the settings and secrets of the chart, let one another in, and nobody else."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helm.conftest import Chart, Manifest, Rendering

BINARIES = Path(sys.executable).parent
TIMEOUT_S = 60
# What has to differ from a cluster: free ports, this machine's address, and sizes that fit it.
SMALL = {
    "lookup": {},
    "broker": {"DISCOVERY": "registration"},
    "storage": {"LM_PORT": "0", "MEMORY_GB": "0.0625", "DISK_GB": "0.0625", "ADVERTISE_URL": "lm://127.0.0.1:1"},
    "sidecar": {"LM_PORT": "0", "ARENA_GB": "0.0625", "HEALTH_PORT": "0", "DISTRIBUTED_URL": "lm://127.0.0.1:2"},
}


class Cluster:
    """The four services as processes, in a folder that stands for the root of each container.

    Args:
        rendering: Whose settings files and secrets.
        folder: Empty.
    """

    def __init__(self, rendering: Rendering, folder: Path) -> None:
        self._rendering = rendering
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ports: dict[str, int] = {}

    def start(self, service: str, addresses: dict[str, str]) -> None:
        """Start one service and wait until it listens. `addresses` are settings that name other services."""
        root = self._folder / service
        for path in ("run/secrets/lmcache", "run/lmcache/arena", "run/lmcache/socket", "var/lib/lmcache"):
            (root / path).mkdir(parents=True)
        for name in ("auth", "keys"):
            for key, value in self._rendering.get("Secret", name)["data"].items():
                (root / "run/secrets/lmcache" / key).write_bytes(base64.b64decode(value))
        config = self._rendering.get("ConfigMap", "vllm-tiny" if service == "sidecar" else service)["data"]["config.yaml"]
        for path in ("/run/", "/var/lib/"):
            config = config.replace(f": {path}", f": {root}{path}")
        (root / "config.yaml").write_text(config, encoding="utf-8")
        settings = {"PORT": "0", "INSTANCE_ID": f"{service}-0"} | SMALL[service] | addresses
        env = {f"LMCACHE_{service.upper()}_{name}": value for name, value in settings.items()}
        command = [str(BINARIES / f"lmcache-{service}"), "--config", "config.yaml", "--port-file", "ports.json"]
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(command, env=env, cwd=root, stdout=log, stderr=subprocess.STDOUT)
        self._processes.append(process)
        deadline = time.monotonic() + TIMEOUT_S
        while not (root / "ports.json").exists():
            assert process.poll() is None, (root / "log").read_text(encoding="utf-8")
            assert time.monotonic() < deadline, (root / "log").read_text(encoding="utf-8")
            time.sleep(0.05)
        self.ports[service] = json.loads((root / "ports.json").read_text(encoding="utf-8"))["port"]

    def get(self, service: str, path: str, token: str | None = None) -> Manifest:
        """One GET; raises `HTTPError` for a refusal."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[service]}{path}")
        if token is not None:
            secret = self._folder / service / "run/secrets/lmcache" / f"{token}-token"
            request.add_header("Authorization", f"Bearer {secret.read_text(encoding='ascii')}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: Manifest = json.load(answer)
        return body

    def stop(self) -> None:
        """Stop whatever was started, as Kubernetes does: SIGTERM, then SIGKILL."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(chart: Chart, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """All four, connected."""
    rendering = chart.render({"models": [{"name": "tiny", "model": "example/tiny-llama"}], "auth.tenant": "team-a"})
    cluster = Cluster(rendering, tmp_path_factory.mktemp("run"))
    try:
        cluster.start("lookup", {})
        cluster.start("broker", {})
        addresses = {f"{name.upper()}_URL": f"http://127.0.0.1:{cluster.ports[name]}" for name in ("lookup", "broker")}
        cluster.start("storage", addresses)
        cluster.start("sidecar", addresses)
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.parametrize(("service", "path", "field"), [("broker", "/v1/peers", "id"), ("lookup", "/v1/instances", "instance")])
def test_storage_and_sidecar_are_let_in(cluster: Cluster, service: str, path: str, field: str) -> None:
    expected = {"storage-0", "sidecar-0"}
    deadline = time.monotonic() + TIMEOUT_S
    found: set[str] = set()
    while found != expected:
        assert time.monotonic() < deadline, f"{service} knows {found}"
        (listed,) = cluster.get(service, path, "operator").values()
        found = {one[field] for one in listed}
        time.sleep(0.1)


@pytest.mark.parametrize("service", ["lookup", "broker", "storage", "sidecar"])
def test_strangers_are_not(cluster: Cluster, service: str) -> None:
    path = "/v1/status" if service == "sidecar" else "/v1/stats"
    with pytest.raises(urllib.error.HTTPError) as refusal:
        cluster.get(service, path)
    refusal.value.close()
    assert refusal.value.code == 401
    assert cluster.get(service, path, "operator")


@pytest.mark.parametrize("service", ["lookup", "broker", "storage", "sidecar"])
def test_kubelets_need_no_token(cluster: Cluster, service: str) -> None:
    assert cluster.get(service, "/healthz") == {"status": "ok"}
