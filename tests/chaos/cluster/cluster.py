"""The cluster's processes, and what can be done to them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import resource
import secrets
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lmcache_demo.processes import DemoError, Process

from tests.chaos.cluster.link import Links
from tests.chaos.cluster.plan import BROKERS, LINKS, LOOKUPS, SERVICES, SIDECARS, STORAGES
from tests.chaos.cluster.worker import CHUNK_BYTES
from tests.fixtures.processes import Processes
from tests.fixtures.redis_server import RedisServer

GB = 1 << 30
ARENA_CHUNKS, SIDECAR_DISK_CHUNKS = 70, 50
"""A fraction of what the workload asks for, so that peers and storages are asked all the time."""
STORAGE_CHUNKS, STORAGE_DISK_CHUNKS = 150, 250
TIER_TIMEOUT_S = 0.8
REST_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 60.0
FULL_FILE_BYTES = CHUNK_BYTES // 2
"""Largest file that a process may write while its disk is "full": logs and journals fit for a
while, chunks do not.
"""
NUM_STARTERS = 16


class Cluster:
    """Four sidecars, two cache_storage, two lookups, two brokers, Redis; every address is a link's,
    so that starts may take any port.

    Threads may start, kill and stop different processes at once.

    Args:
        directory: For everything that is written.
        seed: Of the links.
        environment: Of the processes.
    """

    def __init__(self, directory: Path, seed: int, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self.processes = Processes(directory, environment)
        self.links = Links(LINKS, seed)
        self.redis = RedisServer()
        self.starters = ThreadPoolExecutor(NUM_STARTERS, "chaos")
        """Children die with the thread that has started them: it lives as long as they may."""
        self.running: dict[str, Process] = {}
        self.ports: dict[str, dict[str, int]] = {}
        self.num_starts: dict[str, int] = {}
        self._token = secrets.token_urlsafe(24)
        self._write_secrets()

    def open(self) -> None:
        """Start all, and wait until all are ready."""
        self.links.open()
        self.redis.start()
        self.links.all["redis"].set_target("redis", self.redis.port)
        for names in ((*LOOKUPS, *BROKERS), STORAGES, SIDECARS):
            list(self.starters.map(self.start, names))
        self.until_ready(READY_TIMEOUT_S)

    def close(self) -> None:
        """End all, whatever state it is in."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.process.send_signal(signal.SIGCONT)
                process.process.kill()
        self.processes.end_all()
        self.starters.shutdown()
        self.redis.kill()
        self.links.close()

    def start(self, name: str) -> None:
        """Start one service, or Redis, and let its link lead to it.

        Raises:
            DemoError: It ended, or did not listen in time.
        """
        self.num_starts[name] = number = self.num_starts.get(name, 0) + 1
        if name == "redis":
            self.redis.start()
            return
        kind = name.split("-")[0]
        process, ports = self.processes.start_service(
            f"{name}.{number}", f"lmcache_{kind}", self._settings(kind, name)
        )
        self.running[name], self.ports[name] = process, ports
        link, port = (kind, "port") if kind in ("lookup", "broker") else (name, "lm_port")
        self.links.all[link].set_target(name, ports[port])

    def kill(self, name: str) -> None:
        """SIGKILL."""
        if name == "redis":
            self.redis.kill()
        else:
            self._check_alive(name)
            self.running[name].kill()

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        if name == "redis":
            self.redis.pause()
        else:
            self._check_alive(name)
            self.running[name].process.send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        if name == "redis":
            self.redis.resume()
        else:
            self.running[name].process.send_signal(signal.SIGCONT)

    def fill_disk(self, name: str, is_full: bool) -> None:
        """Let a process write no file longer than `FULL_FILE_BYTES`: as where the volume is
        full, the system refuses its chunks.
        """
        self._check_alive(name)
        _, hard = resource.prlimit(self.running[name].process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(
            self.running[name].process.pid,
            resource.RLIMIT_FSIZE,
            (FULL_FILE_BYTES if is_full else hard, hard),
        )

    def flush_redis(self) -> None:
        """Forget everything, while all keep their connections."""
        with self.redis.client() as client:
            client.flushall()

    def _check_alive(self, name: str) -> None:
        process = self.running[name]
        if not process.is_alive:
            raise DemoError(
                f"{name} has ended by itself with code"
                f" {process.process.returncode}:\n{process.tail()}"
            )

    def get(self, name: str, path: str) -> Any:
        """A service's own answer, past all links; None where it does not answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[name]['port']}{path}",
            headers={"authorization": f"Bearer {self._token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=REST_TIMEOUT_S) as response:
                text = response.read().decode()
                return (
                    json.loads(text)
                    if response.headers.get_content_type() == "application/json"
                    else text
                )
        except (OSError, urllib.error.URLError):
            return None

    def unready(self) -> list[str]:
        """Services that do not say that they are ready, and sidecars that lookup and broker do
        not know.
        """
        ready = {name: self.get(name, "/readyz") for name in SERVICES}
        # Lookups answer without their index, but then they know nothing.
        names = [
            name
            for name, it in ready.items()
            if it is None or (name.startswith("lookup") and it["status"] != "ok")
        ]
        return names + [
            name
            for name in SIDECARS
            if name not in names and not (self.get(name, "/v1/status") or {}).get("registered")
        ]

    def until_ready(self, timeout_s: float) -> float:
        """Wait until all are; how long that took.

        Raises:
            DemoError: Not all are by then.
        """
        begin_s = time.monotonic()
        while names := self.unready():
            if time.monotonic() > begin_s + timeout_s:
                raise DemoError(
                    f"not ready after {timeout_s:.0f} s:"
                    f" {', '.join(names)}\n{self.running[names[0]].tail()}"
                )
            time.sleep(0.2)
        return time.monotonic() - begin_s

    def socket(self, name: str) -> Path:
        """Where engines reach a sidecar."""
        return self._directory / f"{name}.sock"

    def _write_secrets(self) -> None:
        (self._directory / "service-token").write_text(self._token)
        digest = hashlib.sha256(self._token.encode()).hexdigest()
        (self._directory / "tokens.yaml").write_text(
            f"tokens:\n  - {{name: pods, tenant: acme, role: admin, token_sha256: {digest}}}\n"
        )
        (self._directory / "ticket-keys").write_text(
            f"k1:{base64.b64encode(secrets.token_bytes(32)).decode()}\n"
        )
        (self._directory / "salt").write_text("the-salt-of-acme-0123456789")

    def _settings(self, kind: str, name: str) -> dict[str, object]:
        directory, ports = (
            self._directory,
            {name: link.port for name, link in self.links.all.items()},
        )
        common = {"port": 0, "instance_id": name, "auth_tokens_file": directory / "tokens.yaml"}
        keys = {"ticket_keys_file": directory / "ticket-keys"}
        redis = {"redis_url": f"redis://127.0.0.1:{ports['redis']}"}
        storages = "lm://" + ",".join(f"127.0.0.1:{ports[storage]}" for storage in STORAGES)
        caller = {
            "lm_port": 0,
            "lookup_url": f"http://127.0.0.1:{ports['lookup']}",
            "broker_url": f"http://127.0.0.1:{ports['broker']}",
            "service_token_file": directory / "service-token",
            "tenant": "acme",
            "tier_timeout_s": TIER_TIMEOUT_S,
            "disk_path": directory / f"{name}-disk",
            "node": name,
        }
        own: dict[str, object]
        match kind:
            case "lookup":
                return common | redis
            case "broker":
                return common | redis | keys
            case "storage":
                own = {"advertise_url": f"lm://127.0.0.1:{ports[name]}", "replicas_url": storages}
                own |= {
                    "memory_gb": STORAGE_CHUNKS * CHUNK_BYTES / GB,
                    "disk_gb": STORAGE_DISK_CHUNKS * CHUNK_BYTES / GB,
                }
                return common | caller | own
        own = {
            "distributed_url": f"lm://127.0.0.1:{ports[name]}",
            "remote_url": storages,
            "salt_file": directory / "salt",
        }
        own |= {
            "arena_gb": ARENA_CHUNKS * CHUNK_BYTES / GB,
            "disk_gb": SIDECAR_DISK_CHUNKS * CHUNK_BYTES / GB,
        }
        return (
            common
            | caller
            | keys
            | own
            | {"socket_path": self.socket(name), "arena_path": directory / f"{name}-arena"}
        )
