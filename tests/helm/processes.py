"""The services of a rendering as processes of this machine."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from tests.fixtures.tls import Authority
    from tests.helm.conftest import Manifest, Rendering

BINARIES = Path(sys.executable).parent
TIMEOUT_S = 60
# What has to differ from a cluster: free ports, this machine's address, and sizes that fit it.
SMALL = {
    "lookup": {},
    "broker": {"DISCOVERY": "registration"},
    "storage": {
        "LM_PORT": "0",
        "MEMORY_GB": "0.0625",
        "DISK_GB": "0.0625",
        "ADVERTISE_URL": "lm://127.0.0.1:1",
    },
    "sidecar": {
        "LM_PORT": "0",
        "ARENA_GB": "0.0625",
        "HEALTH_PORT": "0",
        "DISTRIBUTED_URL": "lm://127.0.0.1:2",
    },
}


class Cluster:
    """The four services as processes, in a folder that stands for the root of each container.

    Args:
        rendering: Whose settings files and secrets.
        folder: Empty.
        authority: Signs a certificate for each service, with the name that the chart gives to all
            of them; None: nothing is encrypted.

    Attributes:
        rendering, folder: As given.
    """

    def __init__(
        self, rendering: Rendering, folder: Path, authority: Authority | None = None
    ) -> None:
        self.rendering = rendering
        self.folder = folder
        self._authority = authority
        self.scheme = "http" if authority is None else "https"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ports: dict[str, int] = {}
        self.health_ports: dict[str, int] = {}
        self.lm_ports: dict[str, int] = {}

    def start(self, service: str, addresses: dict[str, str]) -> None:
        """Start one service and wait until it listens. `addresses` are settings that name other
        services.
        """
        root = self.folder / service
        for path in (
            "run/secrets/lmcache",
            "run/secrets/tls",
            "run/lmcache/arena",
            "run/lmcache/socket",
            "var/lib/lmcache",
        ):
            (root / path).mkdir(parents=True, exist_ok=True)
        for name in ("auth", "keys"):
            for key, value in self.rendering.get("Secret", name)["data"].items():
                (root / "run/secrets/lmcache" / key).write_bytes(base64.b64decode(value))
        if self._authority is not None:
            pair = self._authority.sign(service, "127.0.0.1", "cache-lmcache.inference.svc")
            for name, file in (
                ("tls.crt", pair.cert),
                ("tls.key", pair.key),
                ("ca.crt", self._authority.file),
            ):
                (root / "run/secrets/tls" / name).write_bytes(file.read_bytes())
        config = self.rendering.get("ConfigMap", "vllm-tiny" if service == "sidecar" else service)[
            "data"
        ]["config.yaml"]
        for path in ("/run/", "/var/lib/"):
            config = config.replace(f": {path}", f": {root}{path}")
        # There is no Redis here: the index is in the lookup's process.
        config = "".join(
            line for line in config.splitlines(keepends=True) if not line.startswith("redis_tls_")
        )
        (root / "config.yaml").write_text(config, encoding="utf-8")
        settings = (
            {"PORT": "0", "HEALTH_PORT": "0", "INSTANCE_ID": f"{service}-0"}
            | SMALL[service]
            | addresses
        )
        if self._authority is not None:
            settings = {
                name: value.replace("lm://", "lm+tls://") for name, value in settings.items()
            }
        env = {f"LMCACHE_{service.upper()}_{name}": value for name, value in settings.items()}
        command = [
            str(BINARIES / f"lmcache-{service}"),
            "--config",
            "config.yaml",
            "--port-file",
            "ports.json",
        ]
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=env, cwd=root, stdout=log, stderr=subprocess.STDOUT
            )
        self._processes.append(process)
        wait_until(lambda: process.poll() is not None or (root / "ports.json").exists())
        assert process.poll() is None, (root / "log").read_text(encoding="utf-8")
        ports = json.loads((root / "ports.json").read_text(encoding="utf-8"))
        self.ports[service], self.health_ports[service] = ports["port"], ports["health_port"]
        self.lm_ports[service] = ports.get("lm_port", 0)

    def config_of(self, service: str) -> Path:
        """The settings file that it was started with."""
        return self.folder / service / "config.yaml"

    def url_of(self, service: str) -> str:
        """Where its REST is."""
        return f"{self.scheme}://127.0.0.1:{self.ports[service]}"

    def get(
        self, service: str, path: str, token: str | None = None, shows_certificate: bool = True
    ) -> Manifest:
        """One GET; raises `HTTPError` for a refusal."""
        request = urllib.request.Request(f"{self.url_of(service)}{path}")
        if token is not None:
            secret = self.folder / service / "run/secrets/lmcache" / f"{token}-token"
            request.add_header("Authorization", f"Bearer {secret.read_text(encoding='ascii')}")
        context = None if self._authority is None else self._context(service, shows_certificate)
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            body: Manifest = json.load(answer)
        return body

    def probe(self, service: str, path: str) -> Manifest:
        """One GET of the port for probes, as a kubelet asks."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.health_ports[service]}{path}", timeout=10
        ) as answer:
            body: Manifest = json.load(answer)
        return body

    def _context(self, service: str, shows_certificate: bool) -> ssl.SSLContext:
        folder = self.folder / service / "run/secrets/tls"
        context = ssl.create_default_context(cafile=folder / "ca.crt")
        if shows_certificate:
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        return context

    def start_all(self) -> None:
        """All four, connected."""
        self.start("lookup", {})
        self.start("broker", {})
        addresses = {f"{name.upper()}_URL": self.url_of(name) for name in ("lookup", "broker")}
        self.start("storage", addresses)
        self.start("sidecar", addresses)

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
