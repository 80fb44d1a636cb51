"""Sidecars and their neighbours as real processes, and what a test asks them."""

from __future__ import annotations

import base64
import secrets
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.processes import Owner, Service

ARENA_GB = 0.06
SETTLE_TIMEOUT_S = 15.0
CALM_S = 0.2


def sidecar(owner: Owner, name: str = "sidecar", **settings: Any) -> Service:
    """A running sidecar at `<directory>/<name>.sock`, all of whose ports are free ones."""
    directory = owner.directory
    common = {
        "port": 0,
        "lm_port": 0,
        "instance_id": name,
        "socket_path": socket_of(owner, name),
        "arena_path": directory / f"{name}-arena",
        "arena_gb": ARENA_GB,
    }
    return owner.service("lmcache_sidecar", name, common | settings)


def socket_of(owner: Owner, name: str = "sidecar") -> Path:
    """Where that sidecar listens, or will."""
    return owner.directory / f"{name}.sock"


def storage(owner: Owner, name: str = "storage", **settings: Any) -> Service:
    """A running storage service."""
    common = {"port": 0, "lm_port": 0, "instance_id": name, "memory_gb": 0.25}
    return owner.service("lmcache_storage", name, common | settings)


def neighbourhood(owner: Owner) -> dict[str, Any]:
    """A running lookup and broker; the settings by which sidecars find them."""
    keys = owner.directory / "ticket-keys"
    keys.write_text(f"k1:{base64.b64encode(secrets.token_bytes(32)).decode()}\n")
    lookup = owner.service("lmcache_lookup", "lookup", {"port": 0})
    broker = owner.service("lmcache_broker", "broker", {"port": 0, "ticket_keys_file": keys})
    return {"lookup_url": lookup.url, "broker_url": broker.url, "ticket_keys_file": keys}


def num_chunks(service: Service, tier: str = "memory") -> int:
    """How many chunks a tier of a sidecar or a storage holds."""
    path = "/v1/tiers" if service.module == "lmcache_sidecar" else "/v1/stats"
    return int(service.get(path)["tiers"][tier]["num_chunks"])


class Growth:
    """What comes into a tier from now on. An engine that attaches stores a pattern first, so begin
    behind that.

    Args:
        service: A sidecar or a storage.
        tier: One of its tiers.
    """

    def __init__(self, service: Service, tier: str = "memory") -> None:
        self._service = service
        self._tier = tier
        self._before = num_chunks(service, tier)

    @property
    def num_chunks(self) -> int:
        return num_chunks(self._service, self._tier) - self._before

    def reaches(self, number: int) -> None:
        """Wait until that many chunks have come: stores may end after the answer."""
        eventually(
            lambda: self.num_chunks >= number,
            f"{number} more chunks in {self._tier} of {self._service.name}",
        )


def eventually(
    condition: Callable[[], object], what: str, timeout_s: float = SETTLE_TIMEOUT_S
) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.03)


def fetch(service: Service, path: str) -> bytes:
    """The body of a GET."""
    with urllib.request.urlopen(service.url + path, timeout=10.0) as response:
        return bytes(response.read())


def put(service: Service, path: str, body: bytes) -> None:
    """PUT bytes."""
    _send(service, path, "PUT", body)


def delete(service: Service, path: str) -> None:
    """DELETE."""
    _send(service, path, "DELETE", None)


def _send(service: Service, path: str, method: str, body: bytes | None) -> None:
    request = urllib.request.Request(
        service.url + path, body, {"content-type": "application/octet-stream"}, method=method
    )
    with urllib.request.urlopen(request, timeout=10.0) as response:
        assert response.status < 300


def await_calm(service: Service) -> int:
    """Wait until nothing more comes into a sidecar's memory; how many chunks it holds."""
    counts = [-1]

    def is_calm() -> bool:
        counts.append(num_chunks(service))
        time.sleep(CALM_S)
        return counts[-1] == counts[-2] == num_chunks(service) > 0

    eventually(is_calm, "stores go on and on, or nothing was stored")
    return counts[-1]


class SilentServer:
    """A TCP server that accepts and never answers: a remote tier that hangs."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self._accepted: list[socket.socket] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> SilentServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for connection in (*self._accepted, self._listener):
            connection.close()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def num_accepted(self) -> int:
        return len(self._accepted)

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                self._accepted.append(self._listener.accept()[0])
            except TimeoutError:
                continue
