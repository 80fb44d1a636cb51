"""Loads that fail after they were promised; stores that fail, lie, or forge."""

from __future__ import annotations

import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lmcache_core.engine import ChunkStore
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import Chunk

from tests.fixtures.vllm_engine import (
    FULL,
    STATE,
    Engine,
    Limits,
    Shape,
    Status,
    WrongKV,
    running,
    window,
)
from tests.fixtures.vllm_engine.stores import METHODS, ForgingStore, RaisingStore, WrappedStore
from tests.fixtures.vllm_engine.worlds import embedded, prompt

SHAPES = pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape((window(6),)),
        Shape((FULL, window(6)), num_blocks=96),
        Shape((FULL, STATE), block_size=8),
        Shape((FULL, STATE), block_size=8, num_drafts=3),
    ],
    ids=["full", "windowed", "hybrid", "state", "drafts"],
)
MAX_STEPS = 300
"""A connector that offered a failed load again would need thousands: vLLM asks in every step."""


class LosingStore(WrappedStore):
    """Delivers only so many chunks of each load, once `num_kept` is set."""

    def __init__(self, inner: ChunkStore) -> None:
        super().__init__(inner)
        self.num_kept: int | None = None

    def get(self, keys: list[CacheEngineKey], *args: Any, **kwargs: Any) -> list[Chunk]:
        wanted = keys if self.num_kept is None else keys[: self.num_kept]
        return self.inner.get(wanted, *args, **kwargs) if wanted else []


class Wrapped:
    """Remembers what was put around the store of each connector."""

    def __init__(self, kind: type[Any], *args: Any) -> None:
        self._make = lambda store: kind(store, *args)
        self.all: list[Any] = []

    def __call__(self, store: ChunkStore) -> Any:
        self.all.append(self._make(store))
        return self.all[-1]

    def set(self, name: str, value: object) -> None:
        for wrapper in self.all:
            setattr(wrapper, name, value)


@SHAPES
@pytest.mark.parametrize("num_kept", [0, 3])
def test_a_failed_load_is_recomputed(
    module: ModuleType, model: Path, shape: Shape, num_kept: int
) -> None:
    stores = Wrapped(LosingStore)
    with running(
        module, model, embedded(), shape=shape, wrap_store=stores, limits=Limits(16)
    ) as engine:
        engine.ask(prompt(1, 40))
        engine.forget()
        stores.set("num_kept", num_kept)
        failed, branch, other = (
            engine.add(prompt(1, 43), 4),
            engine.add(prompt(1, 20) + prompt(2, 9), 4),
            engine.add(prompt(3, 20), 4),
        )
        engine.run(MAX_STEPS)
        assert engine.tally(failed).num_loads == 1, "what failed was offered again"
        assert engine.tally(branch).num_loads <= 1
        assert engine.tally(other).num_loads == 0
        stores.set("num_kept", None)
        engine.forget()
        assert engine.tally(engine.ask(prompt(1, 43))).num_external == 40, (
            "what was computed instead was not stored again"
        )


@pytest.mark.parametrize(
    "methods", [METHODS, *((name,) for name in METHODS)], ids=["all", *METHODS]
)
def test_the_connector_never_raises(
    module: ModuleType, model: Path, methods: tuple[str, ...]
) -> None:
    shape = Shape((FULL, window(6)), num_blocks=96)
    stores = Wrapped(RaisingStore, methods)
    engine = Engine(module, model, embedded(), shape=shape, wrap_store=stores, limits=Limits(16))
    try:
        engine.ask(prompt(1, 40))
        engine.forget()
        stores.set("is_armed", True)
        aborted = engine.add(prompt(5, 30), 20)
        requests = [engine.add(prompt(number, 43), 3) for number in (1, 2)]
        for _ in range(4):
            engine.step()
        engine.abort(aborted)
        engine.run(MAX_STEPS)
        assert [request.status for request in requests] == [Status.FINISHED_STOPPED] * 2
        engine.check_idle()
    finally:
        stores.set("is_armed", False)
        engine.close()


def test_a_store_that_raises_when_vllm_starts(module: ModuleType, model: Path) -> None:
    class Armed(RaisingStore):
        def __init__(self, inner: ChunkStore) -> None:
            super().__init__(inner)
            self.is_armed = True

    with running(module, model, embedded(), wrap_store=Armed) as engine:
        for _ in range(2):
            assert engine.ask(prompt(1, 43), 3).status is Status.FINISHED_STOPPED
            engine.forget()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape((window(10),)),
        Shape((FULL, window(10)), num_blocks=96),
        Shape((FULL, STATE), block_size=8),
        Shape((FULL, STATE), block_size=8, num_drafts=3),
    ],
    ids=["full", "windowed", "hybrid", "state", "drafts"],
)
def test_the_engine_notices_forged_kv(module: ModuleType, model: Path, shape: Shape) -> None:
    """The negative control: one number of a chunk is changed, and the digest fits."""

    def forge(payload: bytes) -> bytes:
        at = len(payload) // 8 * 4
        return (
            payload[:at]
            + struct.pack("<f", struct.unpack_from("<f", payload, at)[0] + 1.0)
            + payload[at + 4 :]
        )

    stores = Wrapped(ForgingStore, forge)
    engine = Engine(module, model, embedded(), shape=shape, wrap_store=stores)
    try:
        engine.ask(prompt(1, 40))
        engine.forget()
        stores.set("is_armed", True)
        engine.add(prompt(1, 43))
        with pytest.raises(WrongKV, match=r"reads wrong KV of token|continues from a wrong state"):
            engine.run(MAX_STEPS)
    finally:
        engine.close()


def test_a_damaged_chunk_is_a_failed_load(module: ModuleType, model: Path) -> None:
    class Damaging(WrappedStore):
        """Flips a byte of the third chunk before the first load."""

        is_armed = False

        def get(self, keys: list[CacheEngineKey], *args: Any, **kwargs: Any) -> list[Chunk]:
            if self.is_armed:
                self.is_armed = False
                (chunk,) = self.inner.get(keys[2:3], *args, **kwargs)
                chunk.memory.byte_array[5] ^= 1
                self.inner.release([chunk])
            return self.inner.get(keys, *args, **kwargs)

    stores = Wrapped(Damaging)
    with running(module, model, embedded(verify_hot="always"), wrap_store=stores) as engine:
        engine.ask(prompt(1, 40))
        engine.forget()
        stores.set("is_armed", True)
        hit = engine.add(prompt(1, 43), 3)
        engine.run(MAX_STEPS)
        assert engine.tally(hit).num_loads == 1
