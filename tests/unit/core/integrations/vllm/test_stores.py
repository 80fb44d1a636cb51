"""The chunk store behind a connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmcache_core.engine.stores import SidecarClient
from lmcache_core.integrations.vllm.stores import OpenStore, open_store
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.telemetry import Counters

from tests.fixtures.vllm_engine.parts import METADATA, options_of

KEY = CacheEngineKey("vllm", "m", 1, 0, "00" * 32)


def opened(engine_id: str, salts: list[str] | None = None, **options: Any) -> OpenStore:
    on_salt = (lambda salt: None) if salts is None else salts.append
    engine = options_of(**options).engine
    return open_store(SidecarClient(engine_id), engine, METADATA, Counters(), on_salt)


def has_room(store: OpenStore) -> bool:
    (memory,) = store.store.reserve([KEY], [(8,)], "uint8")
    if isinstance(memory, NotLent):
        return False
    store.store.abort([memory])
    return True


def test_sides_of_an_engine_share_tiers_inside_vllm() -> None:
    salts: list[str] = []
    worker, scheduler, other = (opened(name, salts, salt="s") for name in ("one", "one", "another"))
    assert worker.store is scheduler.store is not other.store
    assert salts == ["s"] * 3
    assert (worker.is_alone, scheduler.is_alone, other.is_alone) == (True, False, True)
    worker.close()
    worker.close()
    assert has_room(scheduler), "one of two has closed it"
    scheduler.close()
    other.close()
    assert not has_room(scheduler)
    again = opened("one")
    assert again.store is not scheduler.store
    again.close()


def test_connectors_of_one_engine_with_other_options_have_other_tiers() -> None:
    """As children of a `MultiConnector` have."""
    small, large = opened("one"), opened("one", max_local_cpu_size=0.004)
    assert small.store is not large.store
    small.close()
    assert has_room(large)
    large.close()


def test_absent_sidecar_is_no_error(tmp_path: Path) -> None:
    salts: list[str] = []
    socket = str(tmp_path / "s.sock")
    store = opened("one", salts, max_local_cpu_size=5.0, sidecar_socket=socket)
    assert isinstance(store.store, SidecarChunkStore)
    assert salts == []
    assert not has_room(store)
    store.close()
