"""What routers believe of a sidecar, against what the sidecar holds, while chunks are stored, read,
evicted, cleared and demoted, the sidecar is killed, the engine starts again, and batches are lost
or late: `python -m tests.vllm.routing_judge --operations 100000 --seed 1`. The routers are Dynamo's
indexer and a reader with llm-d's rules.

The engine is its connector's side that tells routers, with vLLM's own publisher, without a model.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
import zmq
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.engine.stores import SidecarClient, sidecar_store
from lmcache_core.integrations.vllm.event_publisher import Describer, Publisher
from lmcache_core.integrations.vllm.groups import CacheGroup
from lmcache_core.integrations.vllm.kv_events import Announcement, KVEvents
from lmcache_core.keys import DEFAULT_TENANT, ChunkKey, Lane
from lmcache_core.memory.base import MemoryObj
from lmcache_core.names import DISK_TIER, MEMORY_TIER
from lmcache_core.record import Chunk, encode_head, payload_digest, raw_header
from lmcache_core.telemetry import Counters
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.vllm.models import LLAMA, made_models
from tests.vllm.processes import ROOT, EngineProcess, Owner, Service
from tests.vllm.sidecars import sidecar, socket_of

CHUNK_TOKENS, BLOCK_TOKENS = 256, 16
CHUNK_BYTES = 16 << 10
LANE = Lane("vllm", "model", 1, 0, "")
NUM_PROMPTS, PROMPT_CHUNKS = 400, 8
ARENA_GB, DISK_GB = 0.016, 0.032
"""About 1,000 and 2,000 chunks: of the prompts' 2,400 some are always being evicted."""
SETTLED_S, CERTAIN_S = 1.0, 5.0
"""When the judge is asked, after the last operation."""
RESTART_SHARE = 0.0005
JUDGES = {"Dynamo's indexer": "judge_child", "llm-d's rules": "llmd_reader"}
LIFE_S = 3.0
"""No engine ends sooner after its start: this indexer waits for ever for a replay that the end of
an engine has cut off, until the engine is registered again.
"""
LOST_SHARE, LATE_SHARE = 0.02, 0.05
"""Of the batches between publisher and judge."""


def prompts(rng: random.Random) -> list[list[int]]:
    """Return prompts of whole chunks that share beginnings, as turns of a conversation do."""
    made: list[list[int]] = []
    for _ in range(NUM_PROMPTS):
        parent = rng.choice(made) if made and rng.random() < 0.7 else []
        kept = rng.randint(0, min(len(parent) // CHUNK_TOKENS, PROMPT_CHUNKS - 1))
        num_new = rng.randint(1, PROMPT_CHUNKS - kept) * CHUNK_TOKENS
        new = [rng.randrange(32_000) for _ in range(num_new)]
        made.append(parent[: kept * CHUNK_TOKENS] + new)
    return made


class Request(SimpleNamespace):
    """Of vLLM's request, what is needed to describe its blocks."""

    def __init__(self, tokens: Sequence[int]) -> None:
        hashes, before = [], b""
        for at in range(0, len(tokens), BLOCK_TOKENS):
            block = repr(tokens[at : at + BLOCK_TOKENS]).encode()
            before = hashlib.sha256(before + block).digest()
            hashes.append(before)
        absent = dict.fromkeys(("lora_request", "cache_salt", "prompt_embeds"))
        super().__init__(all_token_ids=tokens, block_hashes=hashes, mm_features=[], **absent)


def describer() -> Describer:
    """Describe a model's only group of layers."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    group = CacheGroup(0, 0, "", BLOCK_TOKENS, None, (), spec, ())
    return Describer(group, CHUNK_TOKENS, BLOCK_TOKENS)


class Relay:
    """Passes batches on from the publisher to the judge; some are lost, some are late."""

    def __init__(self, publisher: str, judge: str, rng: random.Random) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._from = self._context.socket(zmq.SUB)
        self._from.subscribe(b"")
        self._from.connect(publisher)
        self._to = self._context.socket(zmq.PUB)
        self._to.bind(judge)
        self._rng = rng
        self.fates: Counter[str] = Counter()
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            if not self._from.poll(50):
                continue
            frames = self._from.recv_multipart()
            dice = self._rng.random()
            fate = "lost" if dice < LOST_SHARE else "late" if dice < LATE_SHARE else "passed"
            self.fates[fate] += 1
            if fate == "late":
                time.sleep(0.05)
            if fate != "lost":
                self._to.send_multipart(frames)

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self._context.destroy(linger=0)


class Engine:
    """An engine's side that tells routers, and a store of its own to put and read by."""

    def __init__(self, socket: Path, endpoint: str, replay: str) -> None:
        config = LMCacheEngineConfig.from_defaults(
            sidecar_socket=str(socket), chunk_size=CHUNK_TOKENS
        )
        self._metadata = LMCacheEngineMetadata(*("model", 1, 0, "vllm", "uint8", (1, 1, 1, 1, 64)))
        self.store, followed = (
            sidecar_store(config, self._metadata, Counters(), None, SidecarClient(name, ()))
            for name in ("judged", "events/judged")
        )
        describe = describer()
        self._publisher = Publisher(0, endpoint, replay, topic="kv@pod@model")

        def tell(told: Sequence[Announcement]) -> None:
            if told:
                self._publisher.tell([describe.event(one) for one in told])
            else:
                self._publisher.quiet()

        guard = DegradingGuard(Counters(), raised=())
        self.events = KVEvents(followed, [LANE], describe.describe, tell, guard)
        self._followed = followed
        for store in (self.store, followed):
            store.open(lambda salt: None)
        self.events.open()

    def put(self, names: Sequence[bytes]) -> None:
        """Store what is missing of these chunks."""
        keys = [LANE.key(name) for name in names]
        given = self.store.reserve(keys, [(CHUNK_BYTES,)] * len(keys), "uint8")
        payload = bytes(CHUNK_BYTES)
        chunks = []
        for key, memory in zip(keys, given, strict=True):
            if isinstance(memory, MemoryObj):
                memory.byte_array[:] = payload
                header = raw_header(key, (CHUNK_BYTES,), "uint8", payload_digest(payload))
                head, whole = encode_head(header, CHUNK_BYTES), ChunkKey.of(DEFAULT_TENANT, key)
                chunks.append(Chunk(whole, header, head, memory, MEMORY_TIER))
        self.store.put(chunks)

    def read(self, names: Sequence[bytes]) -> None:
        """Load the first of these chunks that are there."""
        self.store.release(self.store.get([LANE.key(name) for name in names]))

    def close(self) -> None:
        self.events.close()
        for store in (self.store, self._followed):
            store.close()
        self._publisher.shutdown()


@dataclass
class Belief:
    """Chunks that a judge claims and are not there, that are there and it does not claim, and that
    are there.
    """

    too_many: int = 0
    too_few: int = 0
    there: int = 0

    def add(self, claimed: int, actual: int) -> None:
        """Add a prompt in a medium."""
        self.too_many += max(0, claimed - actual)
        self.too_few += max(0, actual - claimed)
        self.there += actual

    def __iadd__(self, other: Belief) -> Self:
        self.too_many += other.too_many
        self.too_few += other.too_few
        self.there += other.there
        return self

    def __str__(self) -> str:
        there = self.there or 1
        return (
            f"claimed and not there {self.too_many / there:.3%},"
            f" there and not claimed {self.too_few / there:.3%} of {self.there}"
        )


class Run:
    """Operations drawn from a seed, and the judge's belief at checkpoints."""

    def __init__(self, directory: Path, owner: Owner, seed: int) -> None:
        self._rng = random.Random(seed)
        self._prompts = prompts(self._rng)
        self._requests = [Request(tokens) for tokens in self._prompts]
        self._names = [names_of(tokens) for tokens in self._prompts]
        self._named: set[int] = set()
        places = ("published", "judged", "replay")
        self._endpoints = [f"ipc://{directory}/{place}" for place in places]
        self._sidecar: Service = sidecar(
            owner, arena_gb=ARENA_GB, disk_path=directory / "disk", disk_gb=DISK_GB
        )
        self._socket = socket_of(owner)
        self._judges = {
            name: EngineProcess(
                module, directory, command=(sys.executable, "-m", f"tests.vllm.{module}")
            )
            for name, module in JUDGES.items()
        }
        published, judged, replay = self._endpoints
        self._relay = Relay(published, judged, random.Random(seed + 1))
        self._engine = Engine(self._socket, published, replay)
        for name in JUDGES:
            self._register(name)
        self.operations: Counter[str] = Counter()

    def close(self) -> None:
        self._engine.close()
        self._relay.close()
        for judge in self._judges.values():
            judge.end()

    def load(self, num_engines: int) -> None:
        """Let simulated engines publish to Dynamo's indexer as well."""
        model = str(made_models(ROOT / ".vllm") / LLAMA)
        self._judges["Dynamo's indexer"].call(
            300.0, do="load", num_engines=num_engines, model=model
        )

    def loaded(self) -> dict[str, int]:
        """End that; return how many requests they had, and blocks the indexer knows."""
        return self._judges["Dynamo's indexer"].call(120.0, do="loaded")

    @property
    def fates(self) -> Counter[str]:
        """What became of the batches."""
        return self._relay.fates

    def operate(self) -> None:
        """Do one thing."""
        rng = self._rng
        dice = rng.random()
        number = min(int(rng.paretovariate(0.6)) - 1, NUM_PROMPTS - 1)
        names = self._names[number]
        if dice < RESTART_SHARE:
            self._do("sidecar killed", self._kill_sidecar)
        elif dice < 2 * RESTART_SHARE:
            self._do("engine started again", self._restart_engine)
        elif dice < 0.0015:
            tier = rng.choice(("memory", "disk"))
            self._do("cleared", lambda: self._sidecar.post("/v1/admin/clear", {"tiers": [tier]}))
        elif dice < 0.02:
            body = {"num_bytes": CHUNK_BYTES * rng.randint(1, 60)}
            self._do("evicted", lambda: self._sidecar.post("/v1/admin/evict", body))
        elif dice < 0.5:
            self._name(number)
            self._do("stored", lambda: self._engine.put(names))
        else:
            self._name(number)
            self._do("read", lambda: self._engine.read(names))

    def check(self) -> dict[str, Belief]:
        """Return what each judge is wrong about."""
        numbers = sorted(self._named)
        asked = [self._prompts[number] for number in numbers]
        found = {name: Belief() for name in self._judges}
        matches = {
            name: judge.call(300.0, do="match", prompts=asked)
            for name, judge in self._judges.items()
        }
        for at, number in enumerate(numbers):
            keys = [LANE.key(name) for name in self._names[number]]
            memory = self._engine.store.present(keys, MEMORY_TIER)
            disk = self._engine.store.present(keys, DISK_TIER)
            somewhere = [a or b for a, b in zip(memory, disk, strict=True)]
            for medium, held in (("cpu", memory), ("disk", somewhere)):
                actual = (*held, False).index(False)
                for name, belief in found.items():
                    belief.add(matches[name][at][medium] // CHUNK_TOKENS, actual)
        return found

    def _do(self, name: str, call: Any) -> None:
        self.operations[name] += 1
        call()

    def _register(self, judge: str) -> None:
        _, judged, replay = self._endpoints
        self._judges[judge].call(60.0, do="register", endpoint=judged, replay=replay)

    def _name(self, number: int) -> None:
        if number not in self._named:
            self._named.add(number)
            self._engine.events.named(self._requests[number], b"".join(self._names[number]), 0)

    def _kill_sidecar(self) -> None:
        self._sidecar.kill()
        self._sidecar.start()

    def _restart_engine(self) -> None:
        time.sleep(LIFE_S)
        self._engine.close()
        self._engine = Engine(self._socket, self._endpoints[0], self._endpoints[2])
        self._register("llm-d's rules")  # a pod whose engine starts is not ready meanwhile
        self._named.clear()


def names_of(tokens: Sequence[int]) -> list[bytes]:
    """Return the names of a prompt's chunks."""
    names, before = [], b"judged"
    for at in range(0, len(tokens), CHUNK_TOKENS):
        before = hashlib.sha256(before + repr(tokens[at : at + CHUNK_TOKENS]).encode()).digest()
        names.append(before)
    return names


def checked(
    run: Run, num_operations: int, every: int
) -> Iterator[tuple[int, dict[str, Belief], dict[str, Belief]]]:
    """Do so many operations; yield, after each part of them, what each judge is wrong about one and
    five seconds after the last.
    """
    for number in range(1, num_operations + 1):
        run.operate()
        if number % every == 0 or number == num_operations:
            time.sleep(SETTLED_S)
            settled = run.check()
            time.sleep(CERTAIN_S - SETTLED_S)
            yield number, settled, run.check()


def main() -> None:
    """Run, and print a line for each part, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=2_000, help="operations between two checks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--mockers",
        type=int,
        default=0,
        help="so many of Dynamo's simulated engines publish to its indexer meanwhile",
    )
    options = parser.parse_args()
    sums = {(name, after): Belief() for name in JUDGES for after in (SETTLED_S, CERTAIN_S)}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = Run(directory, stack.enter_context(Owner(directory)), options.seed)
        stack.callback(run.close)
        if options.mockers:
            run.load(options.mockers)
        for number, settled, certain in checked(run, options.operations, options.every):
            for after, found in ((SETTLED_S, settled), (CERTAIN_S, certain)):
                for name, belief in found.items():
                    sums[name, after] += belief
                    print(f"{number}: {name}, after {after:g} s: {belief}", flush=True)
        print(f"operations: {dict(run.operations)}; batches: {dict(run.fates)}")
        if options.mockers:
            print(f"meanwhile, of {options.mockers} simulated engines: {run.loaded()}")
    for (name, after), belief in sums.items():
        print(f"{name}, after {after:g} s: {belief}")


if __name__ == "__main__":
    main()
