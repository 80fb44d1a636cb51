"""The connector at a real sidecar process: what it finds, and a worker that must not take part."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lmcache_core.engine import ChunkStore
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.buffer import BytesBufferMemoryObj

from tests.fixtures.neighbourhood import Sidecar
from tests.fixtures.vllm_engine import Engine, Limits, Shape, Status, running
from tests.fixtures.vllm_engine.stores import WrappedStore
from tests.fixtures.vllm_engine.worlds import prompt, with_sidecar

ROOT = Path(__file__).resolve().parents[3]


def check_nothing_held(sidecar: Sidecar) -> None:
    for client in sidecar.get("/v1/clients")["clients"]:
        assert (client["num_pins"], client["num_reservations"]) == (0, 0), client
    figures = sidecar.get("/v1/tiers")["tiers"]["memory"]
    assert figures["arena_used_bytes"] == figures["used_bytes"]


def hits(engine: Engine, number: int) -> int:
    """Tokens of a prompt that are loaded; vLLM forgets it again."""
    request = engine.ask(prompt(number, 43), 2)
    assert request.status is Status.FINISHED_STOPPED
    engine.forget()
    return engine.tally(request).num_external


def test_a_second_engine_finds_what_the_first_has_stored(
    any_module: ModuleType, own_model: Path, shared: Sidecar
) -> None:
    extra = with_sidecar(shared.socket)
    with running(any_module, own_model, extra, limits=Limits(16)) as engine:
        assert hits(engine, 1) == 0
        assert hits(engine, 1) == 40
    with running(any_module, own_model, extra) as engine:
        assert hits(engine, 1) == 40
        check_nothing_held(shared)


def test_a_worker_with_a_bad_canary_disables_the_cache(
    module: ModuleType, own_model: Path, shared: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """Its canary comes back with other bytes: from then on nothing is offered, not even what the
    other rank could load.
    """

    class Bending(WrappedStore):
        def __init__(self, inner: ChunkStore) -> None:
            super().__init__(inner)
            self.held: dict[int, MemoryObj] = {}

        def get(self, *args: Any, **kwargs: Any) -> Any:
            chunks = self.inner.get(*args, **kwargs)
            for chunk in chunks:
                held = chunk.memory
                chunk.memory = BytesBufferMemoryObj(
                    bytearray(byte ^ 1 for byte in held.byte_array), held.metadata
                )
                self.held[id(chunk)] = held
            return chunks

        def release(self, chunks: Any) -> bool:
            for chunk in chunks:
                chunk.memory = self.held.pop(id(chunk), chunk.memory)
            return self.inner.release(chunks)

    stores: list[Any] = []

    def wrap(store: Any) -> Any:
        stores.append(Bending(store) if len(stores) == 1 else store)
        return stores[-1]

    shape = Shape(num_ranks=2)
    with running(module, own_model, with_sidecar(shared.socket), shape=shape) as whole:
        assert hits(whole, 1) == 0
    with running(
        module, own_model, with_sidecar(shared.socket), shape=shape, wrap_store=wrap
    ) as engine:
        assert "this worker neither loads nor stores" in caplog.text
        engine.ask(prompt(2, 20))
        assert [hits(engine, 1), hits(engine, 1)] == [0, 0]
        assert all(tally.num_loads == 0 for tally in engine.scheduler.tallies.values())
