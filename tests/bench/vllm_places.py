"""Where KV can come from: the services of a small cluster, and engines that get it from one
place each.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.vllm_engines import CHUNK_SIZE, TimedEngine
from tests.vllm.processes import Owner, Service
from tests.vllm.sidecars import eventually, neighbourhood, num_chunks, sidecar, socket_of, storage

ARENA_GB = 0.75
NEIGHBOUR_ARENA_GB = 0.25
DISK_GB = 4.0
STORAGE_GB = 2.0
STARTS_AT_ONCE = 2
SETTLE_TIMEOUT_S = 30.0
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""For arenas: a pod's volume for them is one in memory too."""
EVERYTHING_BYTES = 1 << 40
INSIDE = {"max_local_cpu_size": NEIGHBOUR_ARENA_GB, "chunk_size": CHUNK_SIZE}
"""Options of a connector without a sidecar."""


@dataclass(frozen=True)
class Places:
    """What runs.

    Attributes:
        pod: The sidecar of the engines that compute; it has memory, a disk, peers and storage.
        peer: A sidecar that has memory of its own, and peers.
        keeper: The storage service.
        far: A sidecar that has memory of its own, and that storage.
        plain: An engine without a connector.
        connected: An engine at `pod`.
        embedded: An engine with a cache inside.
        at_peer: An engine at `peer`.
        at_far: An engine at `far`.
    """

    pod: Service
    peer: Service
    keeper: Service
    far: Service
    plain: TimedEngine
    connected: TimedEngine
    embedded: TimedEngine
    at_peer: TimedEngine
    at_far: TimedEngine

    @property
    def engines(self) -> Sequence[TimedEngine]:
        """All engines."""
        return (self.plain, self.connected, self.embedded, self.at_peer, self.at_far)

    def settle(self) -> None:
        """Wait until what was stored at `pod` is where it belongs: on the disk, announced, in
        storage.
        """
        eventually(
            lambda: self.pod.get("/v1/status")["settled"],
            "the sidecar does not settle",
            SETTLE_TIMEOUT_S,
        )


def empty_memory(service: Service) -> None:
    """Leave a sidecar nothing but its slower tiers."""
    service.post("/v1/admin/evict", {"num_bytes": EVERYTHING_BYTES})
    if num_chunks(service) != 0:
        raise AssertionError(f"the memory of {service.name} still has chunks")


@contextlib.contextmanager
def running_places(model: Path) -> Iterator[Places]:
    """Everything, running; nothing of it afterwards.

    Args:
        model: Directory of the model.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-") as scratch,
        tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir=IN_MEMORY) as arenas,
        Owner(Path(scratch)) as owner,
    ):
        places = _started(owner, model, Path(arenas))
        with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
            list(pool.map(TimedEngine.open, places.engines))
        places.connected.watch()
        try:
            yield places
        finally:
            for engine in places.engines:
                engine.kill()


@contextlib.contextmanager
def running_pair(model: Path) -> Iterator[tuple[TimedEngine, TimedEngine]]:
    """An engine without a connector and one at a sidecar, running; nothing of them afterwards.

    Args:
        model: Directory of the model.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-") as scratch,
        tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir=IN_MEMORY) as arenas,
        Owner(Path(scratch)) as owner,
    ):
        pod = _sidecar(owner, "pod", Path(arenas), arena_gb=ARENA_GB)
        pair = (
            TimedEngine(owner, "plain", model),
            TimedEngine(owner, "connected", model, _at(owner, pod)),
        )
        with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
            list(pool.map(TimedEngine.open, pair))
        try:
            yield pair
        finally:
            for engine in pair:
                engine.kill()


def _started(owner: Owner, model: Path, arenas: Path) -> Places:
    """The services; engines are still to be opened."""
    keeper = storage(owner, memory_gb=STORAGE_GB)
    kept = {"remote_url": f"lm://127.0.0.1:{keeper.ports['lm_port']}"}
    known = neighbourhood(owner)
    disk = {"disk_path": owner.directory / "disk", "disk_gb": DISK_GB}
    pod = _sidecar(owner, "pod", arenas, arena_gb=ARENA_GB, **disk, **kept, **known)
    peer = _sidecar(owner, "peer", arenas, **known)
    far = _sidecar(owner, "far", arenas, **kept)
    eventually(
        lambda: all(service.get("/v1/status")["registered"] for service in (pod, peer)),
        "the sidecars are not registered",
    )
    return Places(
        pod,
        peer,
        keeper,
        far,
        plain=TimedEngine(owner, "plain", model),
        connected=TimedEngine(owner, "connected", model, _at(owner, pod)),
        embedded=TimedEngine(owner, "embedded", model, INSIDE),
        at_peer=TimedEngine(owner, "at-peer", model, _at(owner, peer)),
        at_far=TimedEngine(owner, "at-far", model, _at(owner, far)),
    )


def _sidecar(owner: Owner, name: str, arenas: Path, **settings: Any) -> Service:
    arena = arenas / name
    arena.mkdir()
    return sidecar(owner, name, **{"arena_gb": NEIGHBOUR_ARENA_GB, "arena_path": arena} | settings)


def _at(owner: Owner, service: Service) -> dict[str, Any]:
    return {
        "sidecar_socket": str(socket_of(owner, service.name)),
        "chunk_size": CHUNK_SIZE,
    }
