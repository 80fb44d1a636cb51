"""Engines without sidecars among peers: `enable_p2p`, `lookup_url`, `broker_url`,
`distributed_url`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.engine import LMCacheEngine
from lmcache_core.wire.client import LmClient

from tests.fixtures.embedded import PATIENT, embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Neighbourhood, eventually, get_json
from tests.fixtures.ports import free_port
from tests.suites.chunks import make_chunk, make_key

NUM_TOKENS = 6 * CHUNK_SIZE
TOKENS = tokens_of(NUM_TOKENS)

Start = Callable[..., LMCacheEngine]


@pytest.fixture
def start(neighbourhood: Neighbourhood) -> Iterator[Start]:
    with ExitStack() as exits:

        def started(port: int | None = None, **options: Any) -> LMCacheEngine:
            peers = {
                **PATIENT,
                "enable_p2p": True,
                "lookup_url": neighbourhood.lookup_url,
                "broker_url": neighbourhood.broker_url,
                "distributed_url": f"lm://127.0.0.1:{port or free_port()}",
                "peer_ticket_keys_file": str(neighbourhood.ticket_keys),
            }
            return exits.enter_context(embedded_engine(**(peers | options))).engine

        yield started


def num_peers(neighbourhood: Neighbourhood) -> int:
    return len(get_json(f"{neighbourhood.broker_url}/v1/peers")["peers"])


def until_found(engine: LMCacheEngine) -> None:
    eventually(lambda: engine.lookup(TOKENS, ["P2PBackend"]) == NUM_TOKENS)


def retrieve(engine: LMCacheEngine) -> None:
    target = empty_kv(NUM_TOKENS)
    assert engine.retrieve(TOKENS, kvcaches=target).all()
    assert_equal_prefix(target, random_kv(NUM_TOKENS, 1), NUM_TOKENS)


def test_chunks_on_disk_are_announced_again_after_a_restart(start: Start, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    a = start(local_disk=f"file://{tmp_path / 'disk'}/", max_local_disk_size=0.01)
    b = start()
    a.store(TOKENS, kvcaches=random_kv(NUM_TOKENS, 1))
    until_found(b)
    a.close()
    eventually(lambda: b.lookup(TOKENS, ["P2PBackend"]) == 0)
    a.open()
    until_found(b)
    retrieve(b)


def test_an_engine_whose_address_is_taken_still_pulls(
    neighbourhood: Neighbourhood, start: Start
) -> None:
    port = free_port()
    a = start(port)
    a.store(TOKENS, kvcaches=random_kv(NUM_TOKENS, 1))
    b = start(port)
    eventually(lambda: num_peers(neighbourhood) == 1)
    c = start()
    until_found(c)
    retrieve(c)
    b.store(TOKENS, kvcaches=random_kv(NUM_TOKENS, 1))
    retrieve(b)


def test_an_engine_works_without_lookup_and_broker() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with embedded_engine(
        enable_p2p=True,
        lookup_url=nowhere,
        broker_url=nowhere,
        distributed_url=f"lm://127.0.0.1:{free_port()}",
    ) as made:
        made.engine.store(TOKENS, kvcaches=random_kv(NUM_TOKENS, 1))
        retrieve(made.engine)


async def test_an_engine_takes_no_chunks_of_others() -> None:
    nowhere, port = f"http://127.0.0.1:{free_port()}", free_port()
    url = f"lm://127.0.0.1:{port}"
    with embedded_engine(
        enable_p2p=True, lookup_url=nowhere, broker_url=nowhere, distributed_url=url
    ):
        client = LmClient("127.0.0.1", port, None)
        assert await client.put([make_chunk("a")]) == [False]
        assert await client.contains([make_key("a")]) == [False]
        await client.close()
