"""The services of the demo, as separate processes on loopback ports that they choose."""

from __future__ import annotations

import base64
import json
import secrets
import socket
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.names import DISK_TIER

from lmcache_demo.processes import DemoError, Process, Processes
from lmcache_demo.settings import find_redis_server

SETTLE_TIMEOUT_S = 30.0
POLL_S = 0.1
LOOPBACK = "127.0.0.1"
PARTS_PER_MILLION = 1e6


@dataclass(frozen=True)
class Sidecar:
    """A running sidecar."""

    name: str
    process: Process
    socket: Path
    port: int


@dataclass(frozen=True)
class TierCompression:
    """Figures of the codec of one tier of a sidecar.

    Attributes:
        raw_bytes: Of the chunks that it encoded, before.
        encoded_bytes: The same after.
        num_decoded_chunks: Chunks that it decoded.
        max_error: Largest error that its encoder measured, relative to the largest value of a token
            or channel; 0 for none.
        rms_error: Largest root mean square error of a group of layers, relative; 0 for none.
    """

    raw_bytes: int
    encoded_bytes: int
    num_decoded_chunks: int
    max_error: float
    rms_error: float


class Cluster:
    """Start services, and know their addresses.

    Args:
        processes: Owner of the processes.
        directory: For sockets, arenas and disks.
        use_redis: Look for a redis-server.
    """

    def __init__(self, processes: Processes, directory: Path, use_redis: bool = True) -> None:
        self._processes = processes
        self._directory = directory
        self._use_redis = use_redis
        self._services: list[Process] = []
        self._ticket_keys = directory / "ticket-keys"
        self._ticket_keys.write_text(
            f"demo:{base64.b64encode(secrets.token_bytes(32)).decode()}\n", encoding="utf-8"
        )
        self._ticket_keys.chmod(0o600)
        self.index = "embedded"
        self._storage: dict[str, int] = {}
        self._lookup_url = ""
        self._broker_url = ""

    def start_services(self) -> None:
        """Start Redis where there is one, then lookup, broker and cache_storage."""
        lookup: dict[str, object] = {"port": 0}
        redis_server = find_redis_server() if self._use_redis else None
        if redis_server is not None:
            lookup["redis_url"] = self._start_redis(redis_server)
            self.index = "Redis"
        broker = {"port": 0, "ticket_keys_file": self._ticket_keys}
        port = self._service("lookup", "lmcache_lookup", lookup)["port"]
        self._lookup_url = f"http://{LOOPBACK}:{port}"
        port = self._service("broker", "lmcache_broker", broker)["port"]
        self._broker_url = f"http://{LOOPBACK}:{port}"
        storage = {
            "port": 0,
            "lm_port": 0,
            "memory_gb": 0.25,
            "disk_path": self._directory / "storage-disk",
            "disk_gb": 1.0,
            "instance_id": "storage",
            "lookup_url": self._lookup_url,
            "broker_url": self._broker_url,
        }
        self._storage = self._service("cache_storage", "lmcache_storage", storage)

    def start_sidecar(self, name: str, **options: object) -> Sidecar:
        """Start a sidecar with an arena and a socket of its own.

        Args:
            name: Its id.
            **options: Further settings.
        """
        path = self._directory / f"{name}.sock"
        settings = {
            "port": 0,
            "lm_port": 0,
            "instance_id": name,
            "socket_path": path,
            "arena_path": self._directory / f"{name}-arena",
            "arena_gb": 0.25,
            "remote_url": f"lm://{LOOPBACK}:{self._storage['lm_port']}",
            "lookup_url": self._lookup_url,
            "broker_url": self._broker_url,
            "ticket_keys_file": self._ticket_keys,
        }
        process, ports = self._processes.start_service(name, "lmcache_sidecar", settings | options)
        sidecar = Sidecar(name, process, path, ports["port"])
        self._wait(
            f"{name} to be registered", lambda: bool(_get(sidecar.port, "/v1/status")["registered"])
        )
        return sidecar

    def wait_until_settled(self, sidecar: Sidecar) -> None:
        """Wait until what was stored has reached cache_storage and lookup."""
        self._wait(
            f"{sidecar.name} to settle", lambda: bool(_get(sidecar.port, "/v1/status")["settled"])
        )

    def wait_until_loaded(self, sidecar: Sidecar) -> None:
        """Wait until a sidecar knows what lies on its disk."""
        self._wait(
            f"{sidecar.name} to read its disk",
            lambda: _get(sidecar.port, "/v1/tiers")["tiers"][DISK_TIER]["is_loading"] == 0,
        )

    def codec_figures(self, sidecar: Sidecar, tier: str) -> TierCompression:
        """Return the figures of a tier's codec since the sidecar started."""
        figures: dict[str, int] = _get(sidecar.port, "/v1/tiers")["tiers"][tier]
        return TierCompression(
            figures.get("encoded_raw_bytes", 0),
            figures.get("encoded_bytes", 0),
            figures.get("decoded_chunks", 0),
            figures.get("worst_max_error_ppm", 0) / PARTS_PER_MILLION,
            figures.get("worst_rms_error_ppm", 0) / PARTS_PER_MILLION,
        )

    def kill_services(self) -> None:
        """Send SIGKILL to every service."""
        for process in self._services:
            process.kill()

    def _service(self, name: str, module: str, settings: dict[str, Any]) -> dict[str, int]:
        process, ports = self._processes.start_service(name, module, settings)
        self._services.append(process)
        return ports

    def _start_redis(self, server: str) -> str:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = probe.getsockname()[1]
        arguments = f"--port {port} --bind {LOOPBACK} --appendonly no".split()
        arguments += ["--save", "", "--dir", str(self._directory)]
        process = self._processes.start_command("redis", [server, *arguments])
        self._services.append(process)
        self._wait("redis to listen", lambda: _accepts(port))
        return f"redis://{LOOPBACK}:{port}/0"

    def _wait(self, what: str, condition: Any) -> None:
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise DemoError(f"waited {SETTLE_TIMEOUT_S:.0f} s for {what}")
            time.sleep(POLL_S)


def _get(port: int, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}{path}", timeout=5.0) as response:
        body: dict[str, Any] = json.loads(response.read())
        return body


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
    except OSError:
        return False
    return True
