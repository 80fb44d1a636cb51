"""Sidecars that pull from each other through real movers, killed and absent."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import PATIENT
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Neighbourhood, Sidecar, eventually
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at
from tests.transports.movers import ROOT, Mover

NUM_TOKENS = 16 * CHUNK_SIZE


class Pods:
    """Sidecars with a mover each."""

    def __init__(self, neighbourhood: Neighbourhood, directory: Path, exits: ExitStack) -> None:
        self._neighbourhood = neighbourhood
        self._directory = directory
        self._exits = exits
        self.ticket_keys = neighbourhood.ticket_keys
        self.movers: dict[str, Mover] = {}

    def add(self, name: str, **options: Any) -> Sidecar:
        """A sidecar that has reached its mover."""
        self.start_mover(name)
        sidecar = self._neighbourhood.sidecar(
            name, peer_transport="nixl", mover_socket=self._socket(name), **options
        )
        eventually(lambda: events(sidecar)["mover_starts"] == 1)
        return sidecar

    def start_mover(self, name: str) -> None:
        """A mover for that sidecar."""
        mover = self.movers[name] = Mover(self._socket(name), "tcp")
        self._exits.callback(mover.stop)

    def _socket(self, name: str) -> Path:
        return self._directory / f"{name}.mover"


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    sources = [*ROOT.glob("libs/*/src"), *ROOT.glob("services/*/src"), ROOT / "kernels" / "src"]
    path = os.pathsep.join(map(str, sources))
    with (
        Processes(tmp_path, quiet_environment(PYTHONPATH=path)) as processes,
        ExitStack() as exits,
    ):
        yield Pods(Neighbourhood(processes, tmp_path), tmp_path, exits)


def events(sidecar: Sidecar) -> dict[str, float]:
    """What has happened at its tier of peers, so far."""
    lines = sidecar.text("/metrics").splitlines()
    found = (re.match(r"lmcache_tier_events_total{(.*)} (.*)", line) for line in lines)
    return {
        labels["event"]: float(match[2])
        for match in found
        if match and (labels := dict(re.findall(r'(\w+)="([^"]*)"', match[1])))["tier"] == "peers"
    }


def store_at(sidecar: Sidecar, seed: int) -> None:
    with engine_at(sidecar.socket, **PATIENT) as engine:
        engine.store(tokens_of(NUM_TOKENS, seed), kvcaches=random_kv(NUM_TOKENS, seed))
    eventually(lambda: sidecar.get("/v1/status")["settled"])


def check_found_at(sidecar: Sidecar, seed: int) -> None:
    target = empty_kv(NUM_TOKENS)
    with engine_at(sidecar.socket, **PATIENT) as engine:
        assert engine.retrieve(tokens_of(NUM_TOKENS, seed), kvcaches=target).all()
    assert_equal_prefix(target, random_kv(NUM_TOKENS, seed), NUM_TOKENS)


def test_chunks_come_by_the_mover_and_without_one_by_lm(pods: Pods) -> None:
    a, b = pods.add("a"), pods.add("b")
    for seed in range(4):
        store_at(a, seed)
    check_found_at(b, 0)  # tells what the peer understands
    check_found_at(b, 1)
    assert events(b)["mover_chunks"] > 0
    os.kill(pods.movers["a"].worker, signal.SIGKILL)
    check_found_at(b, 2)
    pods.movers["b"].stop()
    check_found_at(b, 3)
    pods.start_mover("b")
    eventually(lambda: events(b)["mover_starts"] == 2)
    assert events(b)["failed_pulls"] == 0


def test_no_secret_is_in_a_movers_memory(pods: Pods) -> None:
    """UCX has no access control: over TCP a peer can read all of this memory."""
    a, b = pods.add("a"), pods.add("b")
    store_at(a, 0)
    store_at(a, 1)
    for seed in range(2):
        check_found_at(b, seed)
    assert events(b)["mover_chunks"] > 0, "with tickets"
    name, _, key = pods.ticket_keys.read_text().strip().partition(":")
    secrets = [key.encode(), base64.b64decode(key), f"{name}:".encode() + key.encode()]
    for mover in pods.movers.values():
        for pid in (mover.worker, mover.process.pid):
            found = memory_of(pid)
            assert b"lmcache_mover" in found, "it was read"
            assert not any(secret in found for secret in secrets)
    assert any(secret in memory_of(b.process.process.pid) for secret in secrets), (
        "the sidecar has them"
    )


def memory_of(pid: int) -> bytes:
    """Return what a process maps, but for files and arenas."""
    found = bytearray(Path(f"/proc/{pid}/environ").read_bytes())
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            area, rights, _, _, inode, *name = line.split()
            if not rights.startswith("rw") or inode != "0" or name in (["[vvar]"], ["[vsyscall]"]):
                continue
            begin, end = (int(one, 16) for one in area.split("-"))
            memory.seek(begin)
            with contextlib.suppress(OSError):  # not every page can be read
                found += memory.read(end - begin)
    return bytes(found)
