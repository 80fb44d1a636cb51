"""One of several engines at a sidecar, for `scale`: obeys the lines `store`, `lookup`,
`retrieve` and `check`, and answers each with the seconds of every call.

Usage: python -m tests.bench.scale_child SOCKET NUMBER NUM_PROMPTS
       python -m tests.bench.scale_child SOCKET NUMBER NUM_PROMPTS --bare
       python -m tests.bench.scale_child SOCKET --echo

With `--bare`, calls do only what no engine can leave out: the same number of requests, of a few
bytes, to the server that `--echo` is, and a copy of the KV.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import uvloop
from lmcache_core._typing import override
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.engine import LMCacheEngine
from lmcache_core.gpu_connectors import VLLMNestedTupleGPUConnector
from lmcache_core.token_database import ChunkedTokenDatabase

from tests.bench.shape import DTYPE, KVCaches, make_config

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 12, 2, 32
NUM_TOKENS = 256
PROMPT_BYTES = 2 * NUM_LAYERS * NUM_TOKENS * NUM_HEADS * HEAD_SIZE * 2
"""The demo's first model, one chunk."""
REQUEST_BYTES = 64


class Prompts:
    """The prompts of one engine.

    Args:
        engine: Stores and retrieves them; `BareCalls` checks nothing.
        number: Of the engine.
        num_prompts: How many.
    """

    def __init__(self, engine: LMCacheEngine | BareCalls, number: int, num_prompts: int) -> None:
        self._engine = engine
        first = number * num_prompts
        self._prompts = [
            torch.arange(NUM_TOKENS) + (first + i) * NUM_TOKENS for i in range(num_prompts)
        ]
        self._kv, self._out = _kv(number + 1), _kv(0)

    def store(self, tokens: torch.Tensor) -> None:
        """Store a prompt."""
        self._engine.store(tokens, kvcaches=self._kv)

    def lookup(self, tokens: torch.Tensor) -> None:
        """Look it up."""
        if self._engine.lookup(tokens) != NUM_TOKENS:
            raise AssertionError("a prompt is not found")

    def retrieve(self, tokens: torch.Tensor) -> None:
        """Load it."""
        if not self._engine.retrieve(tokens, kvcaches=self._out).all():
            raise AssertionError("a prompt does not come back")

    def check(self, tokens: torch.Tensor) -> None:
        """Load it, and compare."""
        for side in itertools.chain(*self._out):
            side.zero_()
        self.retrieve(tokens)
        for was, now in zip(itertools.chain(*self._kv), itertools.chain(*self._out), strict=True):
            if not torch.equal(was, now):
                raise AssertionError("other bytes than were stored came back")

    def all(self, call: Callable[[torch.Tensor], None]) -> list[float]:
        """Return the seconds of a call for each prompt."""
        seconds = []
        for tokens in self._prompts:
            began = time.perf_counter()
            call(tokens)
            seconds.append(time.perf_counter() - began)
        return seconds


class BareCalls:
    """Stands for an engine: what its calls cost at least.

    Args:
        path: Socket of the echo server.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._memory = torch.zeros(PROMPT_BYTES, dtype=torch.uint8)

    def store(self, tokens: torch.Tensor, kvcaches: KVCaches) -> None:
        """Ask for memory, fill it, and publish."""
        self._ask()
        self._copy(kvcaches, is_load=False)
        self._ask()

    def lookup(self, tokens: torch.Tensor) -> int:
        """Ask once."""
        self._ask()
        return NUM_TOKENS

    def retrieve(self, tokens: torch.Tensor, kvcaches: KVCaches) -> torch.Tensor:
        """Ask where it is, copy it, and say so."""
        self._ask()
        self._copy(kvcaches, is_load=True)
        self._ask()
        return torch.ones(1, dtype=torch.bool)

    def _ask(self) -> None:
        self._socket.sendall(bytes(REQUEST_BYTES))
        if len(self._socket.recv(REQUEST_BYTES)) != REQUEST_BYTES:
            raise AssertionError("an answer came in parts")

    def _copy(self, kvcaches: KVCaches, is_load: bool) -> None:
        sides = [side.view(torch.uint8).view(-1) for side in itertools.chain(*kvcaches)]
        for side, memory in zip(sides, self._memory.chunk(len(sides)), strict=True):
            (side.copy_(memory) if is_load else memory.copy_(side))


class _Echo(asyncio.Protocol):
    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    @override
    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def _echo(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(_Echo, path)
    print("ready", flush=True)
    await server.serve_forever()


def _kv(value: int) -> KVCaches:
    shape = (NUM_TOKENS, NUM_HEADS, HEAD_SIZE)
    return tuple(
        (torch.full(shape, value + i, dtype=DTYPE), torch.full(shape, -value - i, dtype=DTYPE))
        for i in range(NUM_LAYERS)
    )


def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    if sys.argv[2] == "--echo":
        uvloop.run(_echo(sys.argv[1]))
    path, number, num_prompts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if "--bare" in sys.argv:
        return _obey(Prompts(BareCalls(path), number, num_prompts))
    config = make_config(sidecar_socket=path, tier_timeout_s=60.0)
    shape = (NUM_LAYERS, 2, NUM_TOKENS, NUM_HEADS, HEAD_SIZE)
    metadata = LMCacheEngineMetadata("bench/small-prompts", 1, 0, "vllm", DTYPE, shape)
    connector = VLLMNestedTupleGPUConnector(NUM_HEADS * HEAD_SIZE, NUM_LAYERS)
    database = ChunkedTokenDatabase(config, metadata)
    with LMCacheEngine(config, metadata, None, database, connector) as engine:
        return _obey(Prompts(engine, number, num_prompts))


def _obey(prompts: Prompts) -> None:
    gc.collect()  # otherwise some call of some run pays 0.1 s for the objects of all imports
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(prompts.all(getattr(prompts, line.strip()))), flush=True)


if __name__ == "__main__":
    main()
