"""What operators and routers see: figures in vLLM's own metrics and log, where hits came from,
and whose events there are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tests.vllm.engines import CHUNK_SIZE, Ask, Engine, release, running_engine
from tests.vllm.references import prompt
from tests.vllm.sidecars import Growth, eventually, storage
from tests.vllm.worlds import World, fill


@pytest.mark.smoke
def test_metrics(world: World) -> None:
    sidecar = world.sidecar()
    ask = Ask(prompt(220, 1000))
    with running_engine(world.options()) as engine:
        fill(engine, sidecar, ask)
        before = engine.metrics()
        assert engine.ask(ask).num_cached == 3 * CHUNK_SIZE
        engine.ask(
            Ask(prompt(221, 300))
        )  # another step, after which the figures of the one before have been taken
        grown = growth(before, engine.metrics())
    assert before["vllm:lmcache_stored_chunks"] == 3
    assert before["vllm:lmcache_store_bytes_sum"] == before["vllm:lmcache_stored_bytes"] > 0
    assert before["vllm:lmcache_store_seconds_count"] == 1
    assert grown["vllm:prompt_tokens_by_source{source=external_kv_transfer}"] == 3 * CHUNK_SIZE
    assert grown["vllm:lmcache_failed_calls"] == 0
    if release() >= (
        0,
        32,
    ):  # older ones, in one process, lose the figures of steps in which no token is made
        assert grown["vllm:external_prefix_cache_hits"] == 3 * CHUNK_SIZE
        assert grown["vllm:lmcache_retrieved_chunks"] == 3
        assert grown["vllm:lmcache_retrieved_tokens"] == 3 * CHUNK_SIZE
        assert grown["vllm:lmcache_retrieved_bytes"] > 0
        assert grown["vllm:lmcache_load_bytes_sum"] == grown["vllm:lmcache_retrieved_bytes"]
        assert grown["vllm:lmcache_load_seconds_count"] == 1
        assert grown["vllm:lmcache_lookup_seconds_count"] == 2


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """How much each figure has grown."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


@pytest.mark.since("0.32")
def test_where_hits_came_from(world: World) -> None:
    """vLLM tells apart what came from memory, from a disk and from others. Releases before 0.32
    have one word for all.
    """
    keeper = storage(world.owner)
    disk = {"disk_path": world.owner.directory / "disk", "disk_gb": 0.5}
    remote = {"remote_url": f"lm://127.0.0.1:{keeper.ports['lm_port']}"}
    first = world.sidecar("first", **disk, **remote)
    ask, other = Ask(prompt(222, 1000)), Ask(prompt(223, 600))
    with running_engine(world.options(at="first")) as engine:
        stored = Growth(keeper)
        fill(engine, first, ask)
        fill(engine, first, other)
        stored.reaches(5)
        assert source(engine, ask) == "host"
        eventually(lambda: first.get("/v1/status")["settled"], "written to the disk")
        first.post("/v1/admin/evict", {"num_bytes": 1 << 30})
        assert source(engine, ask) == "disk"


def source(engine: Engine, ask: Ask) -> str:
    """Where vLLM says that the cached part of a prompt came from."""
    before = engine.metrics()
    engine.reset()
    assert engine.ask(ask).num_cached == 3 * CHUNK_SIZE
    grown = growth(before, engine.metrics())
    (name,) = [
        name
        for name, value in grown.items()
        if name.startswith("vllm:prompt_tokens_cached_by_source{") and value
    ]
    return name.removeprefix("vllm:prompt_tokens_cached_by_source{source=").removesuffix("}")


class Subscriber:
    """Of vLLM's KV events.

    Args:
        endpoint: Where they are published.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self.events: list[Any] = []

    def receive(self, seconds: float) -> list[Any]:
        """All events of the time until then."""
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            if self._socket.poll(left_s * 1000):
                *_, payload = self._socket.recv_multipart()
                self.events += decoder.decode(payload).events
        return self.events

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def subscriber(tmp_path: Any) -> Iterator[tuple[str, Subscriber]]:
    endpoint = f"ipc://{tmp_path}/events"
    subscriber = Subscriber(endpoint)
    yield endpoint, subscriber
    subscriber.close()


def test_only_vllms_own_cache_is_announced(
    world: World, subscriber: tuple[str, Subscriber]
) -> None:
    """No event would follow when a sidecar evicts a chunk that was announced."""
    endpoint, events = subscriber
    sidecar = world.sidecar()
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    with running_engine(world.options(kv_events_config=publish)) as engine:
        fill(engine, sidecar, Ask(prompt(224, 1000)))
        engine.ask(Ask(prompt(225, 200)))
        stored = [event for event in events.receive(1.0) if type(event).__name__ == "BlockStored"]
    assert stored
    assert all(event.medium != "CPU" for event in stored)
