"""Tickets at a real sidecar process: several ranks, a disk, a remote tier that hangs, a full
arena, and clients that are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.record import Staged
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.telemetry import Counters
from lmcache_core.wire import messages as m
from lmcache_core.wire.capabilities import SIDECAR_CAPABILITIES
from lmcache_demo.settings import quiet_environment

from tests.fixtures.chains import chain_of, num_loaded, store_chunks
from tests.fixtures.embedded import until
from tests.fixtures.processes import Processes

ROOT = Path(__file__).resolve().parents[3]
ARENA_BYTES = 1 << 20
TIER_TIMEOUT_S = 9.0


class Sidecar:
    """A process, and its admin routes."""

    def __init__(self, directory: Path, processes: Processes, **options: Any) -> None:
        settings = {
            "port": 0,
            "lm_port": 0,
            "instance_id": "sidecar",
            "socket_path": directory / "s.sock",
            "arena_path": directory / "arena",
            "arena_gb": ARENA_BYTES / (1 << 30),
            "tier_timeout_s": TIER_TIMEOUT_S,
            "drain_timeout_s": 0.5,
        }
        self.socket = directory / "s.sock"
        _, ports = processes.start_service("sidecar", "lmcache_sidecar", settings | options)
        self._url = f"http://127.0.0.1:{ports['port']}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=5) as response:
            text = response.read().decode()
            return text if path == "/metrics" else json.loads(text)

    def settle(self) -> None:
        until(lambda: self.ask("/v1/status")["settled"], "chunks are not written below")

    def evict(self) -> int:
        """Push everything out of the arena that nobody holds; how many chunks are left there."""
        self.ask("/v1/evict", {"num_bytes": ARENA_BYTES})
        left: int = self.ask("/v1/tiers")["tiers"]["Hot"]["num_chunks"]
        return left


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, quiet_environment(PYTHONPATH=str(ROOT))) as owner:
        yield owner


@contextlib.contextmanager
def client_of(sidecar: Sidecar, rank: int = 0, world_size: int = 1) -> Iterator[SidecarChunkStore]:
    engine = m.EngineInfo("test", os.getpid(), rank, "org/model", "layout", world_size)
    hello = m.engine_hello(engine, SIDECAR_CAPABILITIES)
    store = SidecarChunkStore(sidecar.socket, hello, TIER_TIMEOUT_S, Counters())
    store.open(lambda salt: None)
    try:
        yield store
    finally:
        store.close()


def settled(store: SidecarChunkStore, ticket: str, *chains: Any) -> Staged:
    found: list[Staged] = []

    def is_ready() -> bool:
        staged = store.stage(ticket, chains)
        assert staged is not None
        found.append(staged)
        return staged.is_ready

    until(is_ready, "the lift does not end")
    return found[-1]


def test_a_scheduler_has_the_chunks_of_all_ranks_lifted_from_disk(
    tmp_path: Path, processes: Processes
) -> None:
    sidecar = Sidecar(tmp_path, processes, disk_path=tmp_path / "disk", disk_gb=0.01)
    chain = chain_of(range(10), world_size=2)
    with (
        client_of(sidecar, 0, 2) as first,
        client_of(sidecar, 1, 2) as second,
        client_of(sidecar, 0, 2) as scheduler,
    ):
        assert store_chunks(first, chain.keys_of_rank(0)) == 10
        assert settled(scheduler, "one rank", chain).tiers == (bytes(10),)
        assert store_chunks(second, chain.keys_of_rank(1)[:7]) == 7
        assert scheduler.stage("both ranks", [chain.part(0, 7)]) == Staged(True, (b"\1" * 7,))
        scheduler.unstage(["one rank", "both ranks"])
        sidecar.settle()
        until(lambda: sidecar.evict() == 0, "chunks of a ticket that was given back are held")
        first_answer = scheduler.stage("t", [chain])
        assert first_answer is not None
        assert not first_answer.is_ready
        assert settled(scheduler, "t", chain).tiers == (b"\2" * 7 + bytes(3),)
        assert sidecar.evict() == 14
        assert (
            num_loaded(first, chain.keys_of_rank(0)[:7])
            == num_loaded(second, chain.keys_of_rank(1)[:7])
            == 7
        )
        scheduler.unstage(["t"])
        assert sidecar.evict() == 0


def test_what_was_promised_can_be_loaded_from_an_arena_that_others_have_filled(
    tmp_path: Path, processes: Processes
) -> None:
    sidecar = Sidecar(tmp_path, processes)
    chain = chain_of(range(400))
    with client_of(sidecar) as store, client_of(sidecar) as other:
        assert store_chunks(store, chain.keys_of_rank(0)) == 400
        assert store.stage("t", [chain]) == Staged(True, (b"\1" * 400,))
        for turn in range(1, 6):
            store_chunks(other, chain_of(range(1000 * turn, 1000 * turn + 500)).keys_of_rank(0))
        assert sidecar.ask("/v1/tiers")["tiers"]["Hot"]["evicted_chunks"] > 0
        assert num_loaded(store, chain.keys_of_rank(0)) == 400


def test_a_remote_tier_that_hangs_costs_a_lift_its_deadline_and_nobody_else_anything(
    tmp_path: Path, processes: Processes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and says nothing
        url = f"lm://127.0.0.1:{mute.getsockname()[1]}"
        sidecar = Sidecar(
            tmp_path, processes, disk_path=tmp_path / "disk", disk_gb=0.01, remote_url=url
        )
        chain = chain_of(range(6))
        with client_of(sidecar) as store, client_of(sidecar) as other:
            store_chunks(store, chain.keys_of_rank(0)[:4])
            until(
                lambda: sidecar.ask("/v1/tiers")["tiers"]["LocalDiskBackend"]["num_chunks"] == 4,
                "not written to disk",
            )
            assert settled(store, "hot", chain).tiers == (b"\1" * 4 + bytes(2),)
            begin = time.monotonic()
            lasted = []
            while time.monotonic() < begin + 2 * TIER_TIMEOUT_S:
                asked_at = time.monotonic()
                assert other.stage(f"{asked_at}", [chain.part(0, 4)]) == Staged(True, (b"\1" * 4,))
                lasted.append(time.monotonic() - asked_at)
                staged = store.stage("t", [chain])
                assert staged is not None
                assert staged.tiers[0][:4] == b"\1" * 4
                if staged.is_ready:
                    break
                time.sleep(0.01)
            assert staged.is_ready, "the lift outlasts its deadline"
            assert sorted(lasted)[len(lasted) // 2] < 0.1
