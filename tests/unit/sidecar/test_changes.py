"""Who follows a sidecar knows what its local tiers hold, whatever came or went, and why."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.integrations.vllm.kv_events import (
    IN_MEMORY,
    ON_DISK,
    AnnouncedChunk,
    Announcement,
    KVEvents,
)
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.names import DISK_TIER, MEMORY_TIER
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.telemetry import Counters
from lmcache_core.token_database import ChunkedTokenDatabase

from tests.fixtures.frames import HELLO
from tests.fixtures.kv import (
    CHUNK_SIZE,
    empty_kv,
    make_config,
    make_metadata,
    random_kv,
    tokens_of,
)
from tests.fixtures.sidecar import TIMEOUT_S, engine_at, running_socket
from tests.fixtures.waiting import wait_until

NUM_CHUNKS = 12


def described(names: Sequence[bytes], first: int, last: int) -> Iterator[AnnouncedChunk]:
    for name in names[first:last]:
        yield AnnouncedChunk((name,), None, array("I"), None)


@pytest.mark.parametrize("seed", range(3))
def test_a_follower_knows_what_the_tiers_hold(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    announcer = TierAnnouncer(DEFAULT_TENANT)
    gone_from_memory, gone_from_disk = map(announcer.removed_from, (MEMORY_TIER, DISK_TIER))
    disk = DiskBackend(tmp_path / "disk", 1 << 24, on_removed=gone_from_disk)
    known: dict[bytes, int] = {}

    def told(announcements: Sequence[Announcement]) -> None:
        for one in announcements:
            (name,) = one.chunk.block_hashes
            before = known.get(name, 0) & ~one.place
            known[name] = before | one.place if one.is_here else before

    with (
        running_socket(
            tmp_path,
            lower=[disk],
            listener=announcer,
            on_removed=gone_from_memory,
            changes=announcer.changes,
        ) as running,
        engine_at(running.path) as engine,
    ):
        store = SidecarChunkStore(running.path, HELLO, TIMEOUT_S, Counters())
        prompts = [tokens_of(CHUNK_SIZE, seed=number) for number in range(NUM_CHUNKS)]
        database = ChunkedTokenDatabase(make_config(), make_metadata())
        keys = [key for prompt in prompts for _, _, key in database.process_tokens(prompt)]
        names = [bytes.fromhex(key.chunk_hash) for key in keys]
        events = KVEvents(
            store, [keys[0].lane()], described, told, DegradingGuard(Counters(), raised=())
        )
        store.open(lambda salt: None)
        events.named(names, b"".join(names), 0)

        def is_known(keys: Sequence[CacheEngineKey] = keys) -> bool:
            events.round()
            whole = [ChunkKey.of(DEFAULT_TENANT, key) for key in keys]
            memory, there = running.hot.contains_many(whole), disk.contains_now(whole)
            held = [IN_MEMORY * a | ON_DISK * b for a, b in zip(memory, there, strict=True)]
            return [known.get(name, 0) for name in names] == held

        for _ in range(40):
            number = rng.randrange(NUM_CHUNKS)
            match rng.randrange(6):
                case 0 | 1 | 2:
                    engine.store(prompts[number], kvcaches=random_kv(CHUNK_SIZE))
                case 3:
                    engine.retrieve(prompts[number], kvcaches=empty_kv(CHUNK_SIZE))
                case 4:
                    running.loop.run(running.hot.evict(rng.choice((1, 1 << 20))), TIMEOUT_S)
                case 5:
                    tier = rng.choice((running.hot, disk))
                    running.loop.run(
                        tier.batched_remove([ChunkKey.of(DEFAULT_TENANT, keys[number])]), TIMEOUT_S
                    )
            wait_until(is_known, complaint="what the tiers hold is not known")
        store.close()
