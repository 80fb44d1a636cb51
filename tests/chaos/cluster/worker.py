"""One engine process at a sidecar: requests that share prefixes, each answer compared with what
its tokens must give.

It reads commands from standard input and writes what happened to standard output, both as JSON
lines.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMPagedMemGPUConnectorV2
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL
from lmcache_core.token_database import ChunkedTokenDatabase

NUM_LAYERS, NUM_HEADS, HEAD_SIZE, CHUNK_SIZE, BLOCK_SIZE = 4, 2, 32, 32, 16
HIDDEN = NUM_HEADS * HEAD_SIZE
CHUNK_BYTES = 2 * NUM_LAYERS * CHUNK_SIZE * HIDDEN * 4
NUM_FAMILIES, NUM_BRANCHES = 12, 6
HEAD_CHUNKS, BRANCH_CHUNKS, MAX_TAIL_CHUNKS = 4, 3, 2
MAX_CHUNKS = HEAD_CHUNKS + BRANCH_CHUNKS + MAX_TAIL_CHUNKS
NUM_BLOCKS = 2 * MAX_CHUNKS * CHUNK_SIZE // BLOCK_SIZE
TIMEOUT_S = 1.0
PREFILL_TOKENS_PER_S = 150.0
"""Slow enough that whatever comes within `TIMEOUT_S` is worth its wait."""
BOUND_S = 4.0
"""Its turn, 0.5, an answer, `TIMEOUT_S` + 0.5, and then some for a busy machine. A call that
waited twice would be longer still.
"""
REPORT_S = 0.5
PAUSE_S = 0.08


def prompt_of(family: int, branch: int, tail: int, num_tail_tokens: int) -> torch.Tensor:
    """Tokens `[n]`: the family's, the branch's behind them, then some that only `tail` has."""
    pieces = (
        (family, HEAD_CHUNKS * CHUNK_SIZE),
        (1000 + 100 * family + branch, BRANCH_CHUNKS * CHUNK_SIZE),
        (100_000 + tail, num_tail_tokens),
    )
    return torch.cat(
        [
            torch.randint(0, 50_000, (num,), generator=torch.Generator().manual_seed(seed))
            for seed, num in pieces
        ]
    )


def kv_of(tokens: torch.Tensor, model: int = 0) -> torch.Tensor:
    """`[layers, 2, n, heads, head_size]` float32: for each token a number that no other prefix
    has, nor another model, and for each place in it another.
    """
    state, values = model, []
    for token in tokens.tolist():
        state = (state * 1_000_003 + token + 1) % 16_777_213  # exact in float32
        values.append(state)
    places = (
        torch.arange(NUM_LAYERS * 2 * HIDDEN, dtype=torch.float32).view(
            NUM_LAYERS, 2, 1, NUM_HEADS, HEAD_SIZE
        )
        + 1
    )
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1, 1) * places


class Pages:
    """The engine's memory: a prompt lies in random blocks of it."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.layers = [
            torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE) for _ in range(NUM_LAYERS)
        ]

    def slots(self, num_tokens: int) -> torch.Tensor:
        """int64 `[num_tokens]`."""
        blocks = torch.tensor(self._dice.sample(range(NUM_BLOCKS), -(-num_tokens // BLOCK_SIZE)))
        return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:num_tokens]

    def poison(self) -> None:
        """Fill them so that a token that was never written shows."""
        for layer in self.layers:
            layer.fill_(float("nan"))

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """See `kv_of`."""
        return torch.stack([layer.flatten(1, 2)[:, slots] for layer in self.layers])

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """See `kv_of`."""
        for layer, values in zip(self.layers, kv, strict=True):
            layer.flatten(1, 2)[:, slots] = values


class Worker:
    """The engine's one thread.

    Args:
        engine: Open.
        seed: Of its prompts.
        model: What its KV differs in from that of other engines; see `kv_of`.
    """

    def __init__(self, engine: LMCacheEngine, seed: int, model: int = 0) -> None:
        self._engine = engine
        self._model = model
        self._dice = random.Random(seed)
        self._pages = Pages(self._dice)
        self._seed = seed
        self._num_tails = 0
        self._totals: Counter[str] = Counter()
        self._longest_s = 0.0
        self._faults: list[str] = []
        self._reported_s = time.monotonic()

    def request(self) -> None:
        """What a request of a client does: load what is there, compute the rest, store it."""
        self._num_tails += 1
        family = min(int(self._dice.expovariate(0.25)), NUM_FAMILIES - 1)
        tail = self._seed * 1_000_000 + self._num_tails
        tokens = prompt_of(
            family,
            self._dice.randrange(NUM_BRANCHES),
            tail,
            self._dice.randint(0, MAX_TAIL_CHUNKS * CHUNK_SIZE),
        )
        if self._dice.random() < 0.2:
            self._timed("lookup", lambda: self._engine.lookup(tokens))
        num = self.retrieve(tokens)
        self._totals["requests"] += 1
        self._totals["wanted"] += HEAD_CHUNKS * CHUNK_SIZE + BRANCH_CHUNKS * CHUNK_SIZE
        self._totals["hit"] += min(num, (HEAD_CHUNKS + BRANCH_CHUNKS) * CHUNK_SIZE)
        if num < len(tokens):
            self.store(tokens)

    def retrieve(self, tokens: torch.Tensor) -> int:
        """Load and check; how many tokens there were."""
        slots = self._pages.slots(len(tokens))
        self._pages.poison()
        mask = self._timed(
            "retrieve",
            lambda: self._engine.retrieve(tokens, kvcaches=self._pages.layers, slot_mapping=slots),
        )
        num = 0 if mask is None else int(mask.sum())
        if num and not (
            bool(mask[:num].all())
            and torch.equal(self._pages.read(slots[:num]), kv_of(tokens[:num], self._model))
        ):
            self._faults.append(
                f"wrong: the KV of {num} of {len(tokens)} tokens is not what they give"
            )
        return num

    def store(self, tokens: torch.Tensor) -> None:
        """Compute and store."""
        slots = self._pages.slots(len(tokens))
        self._pages.write(slots, kv_of(tokens, self._model))
        self._timed(
            "store",
            lambda: self._engine.store(tokens, kvcaches=self._pages.layers, slot_mapping=slots),
        )

    def report(self, **more: object) -> None:
        """Tell what has happened since the last time."""
        misses = {
            reason: num
            for (name, reason), num in self._engine.counters.snapshot().items()
            if name == MISSED_CHUNKS_TOTAL and num
        }
        at_s = self._reported_s = time.monotonic()
        line = {
            "at_s": at_s,
            **self._totals,
            "longest_s": self._longest_s,
            "faults": self._faults,
            "misses": misses,
            **more,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        self._totals.clear()
        self._faults, self._longest_s = [], 0.0

    @property
    def is_due(self) -> bool:
        """Whether it should report."""
        return time.monotonic() - self._reported_s > REPORT_S

    def _timed(self, name: str, call: Any) -> Any:
        begin_s = time.monotonic()
        try:
            return call()
        except Exception as exc:
            self._faults.append(f"error: {name} raised {type(exc).__name__}: {exc}")
            return None
        finally:
            lasted_s = time.monotonic() - begin_s
            self._longest_s = max(self._longest_s, lasted_s)
            self._totals["calls"] += 1
            if lasted_s > BOUND_S:
                self._faults.append(
                    f"late: {name} lasted {lasted_s:.2f} s, the bound is {BOUND_S} s"
                )


def open_engine(socket_path: str) -> LMCacheEngine:
    """In sidecar mode."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_SIZE,
        remote_url=None,
        sidecar_socket=socket_path,
        tier_timeout_s=TIMEOUT_S,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
    )
    shape = (NUM_LAYERS, 2, CHUNK_SIZE, NUM_HEADS, HEAD_SIZE)
    metadata = LMCacheEngineMetadata("org/model", 1, 0, "vllm", torch.float32, shape)
    engine = LMCacheEngine(
        config,
        metadata,
        None,
        ChunkedTokenDatabase(config, metadata),
        VLLMPagedMemGPUConnectorV2(HIDDEN, NUM_LAYERS),
    )
    engine.open()
    return engine


def serve(worker: Worker, commands: queue.Queue[dict[str, Any]]) -> None:
    """Do as told until told to end: `work`, `pause`, `store` and `retrieve` of one prompt,
    `end`.
    """
    is_working = False
    while True:
        try:
            command = commands.get(timeout=PAUSE_S)
        except queue.Empty:
            if is_working:
                worker.request()
            if worker.is_due:
                worker.report()
            continue
        match command["do"]:
            case "end":
                worker.report(done="end")
                return
            case "work" | "pause" as mode:
                is_working = mode == "work"
                worker.report(done=mode)
            case "store":
                worker.store(prompt_of(command["family"], 0, 0, 0))
                worker.report(done="store")
            case "retrieve":
                worker.report(
                    done="retrieve",
                    num_tokens=worker.retrieve(prompt_of(command["family"], 0, 0, 0)),
                )


def main() -> None:
    """Arguments: the sidecar's socket, a seed."""
    torch.set_num_threads(1)
    engine = open_engine(sys.argv[1])
    commands: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        commands.put({"do": "end"})

    threading.Thread(target=listen, daemon=True).start()
    try:
        serve(Worker(engine, int(sys.argv[2])), commands)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
