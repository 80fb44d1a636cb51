"""What vLLM's publisher tells routers of the sidecar's chunks, read as a router reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from lmcache_core.errors import ConfigError

from tests.vllm.engines import BLOCK_SIZE, CHUNK_SIZE, Ask, engine_options, running_engine
from tests.vllm.models import LLAMA, SLIDING
from tests.vllm.references import prompt
from tests.vllm.sidecars import eventually, socket_of
from tests.vllm.worlds import World

WEBHOOK = Path(__file__).resolve().parents[2] / "services" / "webhook" / "src"
ASK = Ask(prompt(900, 1000))
NUM_CHUNKS = 1000 // CHUNK_SIZE


class Router:
    """Reads one engine's events. Its index: hashes by medium, with the tokens of each."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.blocks: dict[str, dict[int, tuple[int, ...]]] = {}
        self.sequences: list[int] = []
        self.parents: dict[int, int | None] = {}
        self.events: list[dict[str, Any]] = []

    def read(self) -> None:
        """Apply what has arrived."""
        while self._socket.poll(0):
            _topic, sequence, payload = self._socket.recv_multipart()
            self.sequences.append(int.from_bytes(sequence, "big"))
            for event in msgspec.msgpack.decode(payload)[1]:
                self.events.append(event)
                self._apply(event)

    def holds(self, medium: str) -> int:
        """How many blocks the medium has, as far as it is told."""
        self.read()
        return len(self.blocks.get(medium, ()))

    def _apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                size, parent = event["block_size"], event["parent_block_hash"]
                for i, block in enumerate(event["block_hashes"]):
                    tokens = tuple(event["token_ids"][i * size : (i + 1) * size])
                    assert len(tokens) == size
                    self.blocks.setdefault(event["medium"], {})[block] = tokens
                    assert self.parents.setdefault(block, parent) == parent
                    parent = block
            case "BlockRemoved":
                for block in event["block_hashes"]:
                    self.blocks.setdefault(event["medium"], {}).pop(block, None)
            case "AllBlocksCleared":
                self.blocks.clear()


@contextmanager
def router_of(endpoint: str) -> Iterator[Router]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(endpoint)
        yield Router(socket)


def events_at(directory: Path) -> dict[str, Any]:
    """vLLM's `kv_events_config`."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{directory}/events",
    }


@pytest.mark.timeout(300)
def test_routers_learn_what_the_sidecar_gains_and_loses(world: World, tmp_path: Path) -> None:
    """Also while the engine has no request, and from a sidecar that is replaced."""
    sidecar = world.sidecar()
    config = events_at(tmp_path)
    options = world.options(lmcache_kv_events=True, kv_events_config=config)
    blocks = NUM_CHUNKS * CHUNK_SIZE // BLOCK_SIZE
    with router_of(config["endpoint"]) as router, running_engine(options) as engine:
        engine.ask(ASK)
        eventually(lambda: router.holds("CPU") == blocks, "what was stored is announced")
        on_gpu = router.blocks["GPU"]
        assert router.blocks["CPU"].items() <= on_gpu.items(), "under vLLM's own names"
        told = "".join(map(str, ASK.tokens[: NUM_CHUNKS * CHUNK_SIZE]))
        assert told == "".join(str(t) for one in router.blocks["CPU"].values() for t in one)
        sidecar.post("/v1/admin/clear", {"tiers": ["memory"]})
        eventually(lambda: router.holds("CPU") == 0, "what is gone is taken back")
        assert router.holds("GPU"), "named, not by clearing everything"
        engine.reset()
        engine.ask(ASK)
        eventually(lambda: router.holds("CPU") == blocks, "it is stored again")
        engine.reset(reset_connector=True)
        eventually(lambda: router.holds("CPU") == 0, "it will not be loaded")
        engine.ask(ASK)
        eventually(lambda: router.holds("CPU") == blocks, "it is stored for this engine")
        sidecar.kill()
        eventually(lambda: router.holds("CPU") == 0, "a sidecar that is gone has nothing")
        assert not any(event.get("ownership") or event.get("locality") for event in router.events)


@pytest.mark.timeout(300)
def test_another_engine_announces_what_it_finds(world: World, tmp_path: Path) -> None:
    sidecar = world.sidecar(disk_path=tmp_path / "disk", disk_gb=1)
    config = events_at(tmp_path)
    with running_engine(world.options()) as engine:
        engine.ask(ASK)
    options = world.options(lmcache_kv_events=True, kv_events_config=config)
    blocks = NUM_CHUNKS * CHUNK_SIZE // BLOCK_SIZE
    with router_of(config["endpoint"]) as router, running_engine(options) as engine:
        engine.ask(ASK)
        eventually(lambda: router.holds("CPU") == router.holds("STORAGE") == blocks, "both places")
        sidecar.post("/v1/admin/evict", {"num_bytes": 1 << 30})
        eventually(lambda: router.holds("CPU") == 0, "it is on disk alone")
        assert router.holds("STORAGE") == blocks


@pytest.mark.timeout(300)
def test_an_engine_that_starts_again_is_believed_at_once(world: World, tmp_path: Path) -> None:
    """Routers ignore numbers that they have passed, and the GPU is empty now."""
    world.sidecar()
    config = events_at(tmp_path)
    options = world.options(lmcache_kv_events=True, kv_events_config=config)
    blocks = NUM_CHUNKS * CHUNK_SIZE // BLOCK_SIZE
    with router_of(config["endpoint"]) as router:
        with running_engine(options) as engine:
            engine.ask(ASK)
            eventually(lambda: router.holds("CPU") == blocks, "what was stored is announced")
        num_before = len(router.sequences)
        with running_engine(options) as engine:
            eventually(lambda: not router.holds("GPU"), "a GPU that has just started is empty")
            engine.ask(ASK)
            eventually(lambda: router.holds("CPU") == blocks, "the sidecar still has it")
    before, after = router.sequences[:num_before], router.sequences[num_before:]
    assert max(before) < min(after)
    assert router.sequences == sorted(router.sequences)


@pytest.mark.timeout(300)
def test_a_model_that_routers_cannot_follow_is_served(world: World, tmp_path: Path) -> None:
    """One value switches events on for all models."""
    world.sidecar()
    config = events_at(tmp_path)
    windows = {"layer_types": 6 * ["sliding_attention"]}
    options = world.options(
        SLIDING, lmcache_kv_events=True, kv_events_config=config, hf_overrides=windows
    )
    with router_of(config["endpoint"]) as router, running_engine(options) as engine:
        engine.ask(ASK)
        eventually(lambda: router.holds("GPU") > 0, "vLLM publishes")
        assert not router.holds("CPU")


@pytest.mark.since("0.32")
@pytest.mark.timeout(300)
def test_routers_learn_of_the_sidecar_behind_vllms_own_offloading(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under vLLM's names, with the tokens, as the webhook switches it on."""
    monkeypatch.syspath_prepend(str(WEBHOOK))
    from lmcache_webhook.injection.sidecar import offloading_config, with_kv_events

    world.sidecar()
    config = events_at(tmp_path)
    transfer = with_kv_events(offloading_config(64 / 1024))
    extra = transfer["kv_connector_extra_config"]
    extra |= {"spec_name": "HostTieringSpec", "spec_module_path": "tests.vllm.host_offloading"}
    extra["secondary_tiers"][0]["sidecar_socket"] = str(socket_of(world.owner))
    options = engine_options(
        world.models / LLAMA, kv_transfer_config=transfer, kv_events_config=config
    )
    with router_of(config["endpoint"]) as router, running_engine(options) as engine:
        engine.ask(ASK)

        def is_told() -> bool:
            engine.ask(Ask(prompt(901, 40)))  # vLLM takes a tier's events in its steps
            return router.holds("STORAGE") >= len(ASK.tokens) // BLOCK_SIZE

        eventually(is_told, "what was stored is announced")
        on_gpu, stored = router.blocks["GPU"], router.blocks["STORAGE"]
        assert on_gpu.keys() & stored.keys()
        assert all(on_gpu.get(block, tokens) == tokens for block, tokens in stored.items())
    assert not any(event.get("ownership") or event.get("locality") for event in router.events)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "config", [None, {"publisher": "zmq"}, {"enable_kv_cache_events": True, "publisher": "null"}]
)
def test_an_engine_that_publishes_nothing_is_refused(config: dict[str, Any] | None) -> None:
    from lmcache_core.integrations.vllm.event_publisher import when_made
    from vllm.config import KVEventsConfig

    events = None if config is None else KVEventsConfig(**config)
    with pytest.raises(ConfigError, match=r"publishes no events; start it with --kv-events-config"):
        when_made(SimpleNamespace(kv_events_config=events), lambda publisher: None)
    assert events is None or events.publisher == (config or {})["publisher"], "it is as it was"


@pytest.mark.parametrize(("topic", "is_empty"), [("", False), ("kv@pod@model", True)])
def test_who_asks_for_every_batch_gets_those_that_there_are_but_for_llm_d(
    tmp_path: Path, topic: str, is_empty: bool
) -> None:
    """llm-d's router would believe nothing from then on."""
    from lmcache_core.integrations.vllm.event_publisher import Publisher

    replay = f"ipc://{tmp_path}/replay"
    publisher = Publisher(0, f"ipc://{tmp_path}/events", replay, topic=topic)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as socket:
        socket.connect(replay)

        def numbers(first: int) -> list[int]:
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            found = []
            while (answer := socket.recv_multipart())[-1]:
                assert answer[1] == topic.encode()
                found.append(int.from_bytes(answer[2], "big"))
            return found

        publisher.quiet()
        eventually(lambda: len(numbers(1)) == 2, "both batches are kept")
        first, second = numbers(1)
        assert numbers(0) == ([] if is_empty else [first, second])
        assert numbers(second) == [second]
    publisher.shutdown()
