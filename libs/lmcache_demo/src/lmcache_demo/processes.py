"""Processes of the demo: started, awaited, killed; none outlives it. And the cache's services as
such processes, on loopback ports that they choose.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.names import DISK_TIER

START_TIMEOUT_S = 180.0
"""A sidecar compiles its codecs first, where the installation has not: half a minute of two busy
processors.
"""
END_TIMEOUT_S = 10.0
SETTLE_TIMEOUT_S = 30.0
POLL_S = 0.05
PR_SET_PDEATHSIG = 1
TAIL_LINES = 30
LOOPBACK = "127.0.0.1"


class DemoError(Exception):
    """Something is not as the demo says it is."""


@dataclass(frozen=True, eq=False)
class Process:
    """A child process, and the log that it writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL, and wait."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(END_TIMEOUT_S)

    def end(self) -> None:
        """Send SIGTERM, and SIGKILL if that takes longer than `END_TIMEOUT_S`."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self) -> str:
        """Return the end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Processes:
    """Owner of all processes of a run: `with Processes(directory, environment) as processes:`.

    The directory is for logs, settings and port files.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = dict(environment)
        self._all: list[Process] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()

    def start(self, name: str, module: str, arguments: Sequence[str] = (), **pipes: int) -> Process:
        """Run `python -m module` as a child that dies with this process.

        `pipes` are `stdin` and `stdout` as in `subprocess.Popen`; by default neither is connected.
        """
        return self.start_command(name, [sys.executable, "-m", module, *arguments], **pipes)

    def start_command(self, name: str, command: Sequence[str], **pipes: int) -> Process:
        """Run a command as a child that dies with this process; see `start`."""
        log = self._directory / f"{name}.log"
        with log.open("wb") as output:
            child = subprocess.Popen(  # noqa: S603
                list(command),
                env=self._environment,
                stdin=pipes.get("stdin", subprocess.DEVNULL),
                stdout=pipes.get("stdout", output),
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        process = Process(name, child, log)
        self._all.append(process)
        return process

    def start_service(
        self, name: str, module: str, settings: Mapping[str, object]
    ) -> tuple[Process, dict[str, int]]:
        """Start a service, wait until it listens, and return it and its ports by name.

        Raises:
            DemoError: It ended, or did not listen in time; the text ends with its log.
        """
        config = self._directory / f"{name}.json"
        port_file = self._directory / f"{name}.ports"
        port_file.unlink(missing_ok=True)  # a process of that name that was killed has left its own
        config.write_text(json.dumps(settings, default=str), encoding="utf-8")
        process = self.start(name, module, ["--config", str(config), "--port-file", str(port_file)])
        deadline = time.monotonic() + START_TIMEOUT_S
        while not port_file.exists():
            if not process.is_alive:
                raise DemoError(
                    f"{name} ended with code {process.process.returncode}:\n{process.tail()}"
                )
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{name} did not listen within {START_TIMEOUT_S:.0f} s:\n{process.tail()}"
                )
            time.sleep(POLL_S)
        ports: dict[str, int] = json.loads(port_file.read_text(encoding="utf-8"))
        return process, ports

    def end_all(self) -> None:
        """End every child, newest first."""
        for process in self._all:
            with contextlib.suppress(ProcessLookupError):
                process.process.send_signal(signal.SIGTERM)
        for process in reversed(self._all):
            process.end()


@dataclass(frozen=True, eq=False)
class Sidecar:
    """A running sidecar: engines reach it at its socket, and its port tells its state."""

    process: Process
    socket: Path
    port: int

    def wait_until(self, state: str) -> None:
        """Wait until it is `registered` with lookup and broker, or `settled`: what was stored has
        reached cache_storage and lookup.
        """
        _wait_for(f"{self.process.name} to be {state}", lambda: bool(self._get("status")[state]))

    def wait_until_loaded(self) -> None:
        """Wait until it knows what lies on its disk."""
        _wait_for(
            f"{self.process.name} to read its disk",
            lambda: self.tiers()[DISK_TIER]["is_loading"] == 0,
        )

    def tiers(self) -> dict[str, dict[str, int]]:
        """Return the figures of each of its tiers, since it started."""
        tiers: dict[str, dict[str, int]] = self._get("tiers")["tiers"]
        return tiers

    def _get(self, path: str) -> dict[str, Any]:
        url = f"http://{LOOPBACK}:{self.port}/v1/{path}"
        with urllib.request.urlopen(url, timeout=5.0) as response:
            body: dict[str, Any] = json.loads(response.read())
            return body


class Cluster:
    """Starts services and sidecars, with their sockets, arenas and disks in a directory."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self.processes = processes
        self.directory = directory
        self._services: list[Process] = []
        self._addresses: dict[str, object] = {}  # settings of all that find the services
        self.index = "embedded"
        """Where lookup keeps its index."""

    def start_services(self, use_redis: bool) -> None:
        """Start Redis, if it is to be used and there is one, then lookup, broker and
        cache_storage.
        """
        lookup: dict[str, object] = {}
        redis_server = shutil.which("redis-server") or shutil.which("valkey-server")
        if use_redis and redis_server is not None:
            lookup["redis_url"] = self._start_redis(redis_server)
            self.index = "Redis"
        ticket_keys = self.directory / "ticket-keys"
        key = base64.b64encode(secrets.token_bytes(32)).decode()
        ticket_keys.write_text(f"demo:{key}\n", encoding="utf-8")
        ticket_keys.chmod(0o600)
        ports = self._start_service("lookup", "lmcache_lookup", lookup)
        urls = {"lookup_url": f"http://{LOOPBACK}:{ports['port']}"}
        ports = self._start_service("broker", "lmcache_broker", {"ticket_keys_file": ticket_keys})
        urls["broker_url"] = f"http://{LOOPBACK}:{ports['port']}"
        storage = {
            "lm_port": 0,
            "memory_gb": 0.25,
            "disk_path": self.directory / "storage-disk",
            "disk_gb": 1.0,
            "instance_id": "storage",
        }
        ports = self._start_service("cache_storage", "lmcache_storage", storage | urls)
        self._addresses = {
            **urls,
            "remote_url": f"lm://{LOOPBACK}:{ports['lm_port']}",
            "ticket_keys_file": ticket_keys,
        }

    def start_sidecar(self, name: str, **options: object) -> Sidecar:
        """Start a sidecar with an arena and a socket of its own, and wait until it is registered;
        `options` are further settings.
        """
        path = self.directory / f"{name}.sock"
        settings = {
            "port": 0,
            "lm_port": 0,
            "instance_id": name,
            "socket_path": path,
            "arena_path": self.directory / f"{name}-arena",
            "arena_gb": 0.25,
        }
        process, ports = self.processes.start_service(
            name, "lmcache_sidecar", settings | self._addresses | options
        )
        sidecar = Sidecar(process, path, ports["port"])
        sidecar.wait_until("registered")
        return sidecar

    def kill_services(self) -> None:
        """Send SIGKILL to every service."""
        for process in self._services:
            process.kill()

    def _start_service(
        self, name: str, module: str, settings: Mapping[str, object]
    ) -> dict[str, int]:
        process, ports = self.processes.start_service(name, module, {"port": 0, **settings})
        self._services.append(process)
        return ports

    def _start_redis(self, server: str) -> str:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = probe.getsockname()[1]
        arguments = f"--port {port} --bind {LOOPBACK} --appendonly no".split()
        arguments += ["--save", "", "--dir", str(self.directory)]
        self._services.append(self.processes.start_command("redis", [server, *arguments]))
        _wait_for("redis to listen", lambda: _accepts(port))
        return f"redis://{LOOPBACK}:{port}/0"


def _wait_for(what: str, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise DemoError(f"waited {SETTLE_TIMEOUT_S:.0f} s for {what}")
        time.sleep(POLL_S)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _die_with_parent() -> None:
    """Ask the kernel to kill this child when its parent dies, even by SIGKILL (Linux; elsewhere
    nothing happens).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
