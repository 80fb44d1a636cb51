"""Keep a release busy until a file appears, then count what was lost.

Runs in a pod of the cluster with the image of cache_storage, and takes the arguments of the chart's
release test, so that it reaches the same services. Prints `ready` when every kind of call has
succeeded once, a line of progress every few seconds, and at last `REPORT {…}`, which
`tests.cluster.oracle` judges. Every loop has a bound. It needs `ask.py` in the same folder.

A disturbance of a kind of call begins with a call that is not ok. It ends with the last such call
before STEADY_CALLS good ones in a row.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import secrets
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from ask import complete, prompt
from lmcache_core.errors import LMCacheError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.lookup import LookupClient
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.p2p import BrokerClient
from lmcache_core.record import UNSEALED_DIGEST, Chunk, Miss, raw_header
from lmcache_core.security import ClientTls, TlsFiles, TokenFile, client_context
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.storage.remote.members import locate_by_lookup

NAME = "traffic"
CHUNK_BYTES = 32 << 10
MAX_CHUNKS = 1000
MAX_CALLS = 50_000
PAUSE_S = 0.1
CALL_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 90.0
POLL_S = 0.2
SETTLE_POLL_S = 2.0
MAX_FAILURES = 5
STEADY_CALLS = 20
NUM_PROMPTS, PROMPT_TOKENS = 12, 600
FAILURES = (LMCacheError, OSError, TimeoutError, ValueError)

Call = Callable[[], Awaitable[str]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage-url", required=True, help="lm:// or lm+tls://")
    parser.add_argument("--guarded-url", action="append", default=[], help="of lookup and broker")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--tls-ca-file", type=Path)
    parser.add_argument("--tls-cert-file", type=Path)
    parser.add_argument("--tls-key-file", type=Path)
    parser.add_argument("--tls-peer-name")
    parser.add_argument("--completions-url", help="base URL of a vLLM server")
    parser.add_argument("--model", default="", help="its served name")
    parser.add_argument("--stop-file", type=Path, required=True, help="ends the traffic")
    parser.add_argument("--max-seconds", type=float, default=1800.0, help="ends it too")
    parser.add_argument("--settle-seconds", type=float, default=90.0, help="limit of the last look")
    parser.add_argument("--progress-seconds", type=float, default=5.0)
    return parser.parse_args()


class Storage:
    """Chunks that were stored, and whether they can be read.

    Args:
        backend: The storage service, opened.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._run = os.urandom(8).hex()
        self._num_tried = 0
        self.acknowledged: list[int] = []

    def _chunk(self, number: int) -> Chunk:
        digest = hashlib.sha256(f"{self._run}/{number}".encode()).hexdigest()
        engine_key = CacheEngineKey(NAME, f"{NAME}/{self._run}", 1, 0, digest)
        header = raw_header(engine_key, (CHUNK_BYTES,), "uint8", UNSEALED_DIGEST)
        payload = BytesBufferMemoryObj(random.Random(digest).randbytes(CHUNK_BYTES))
        return Chunk.unsealed(ChunkKey.of("default", engine_key), header, payload, NAME).sealed()

    async def put(self) -> str:
        """Store one more chunk; after MAX_CHUNKS, read one instead."""
        if self._num_tried >= MAX_CHUNKS:
            return await self.get()
        number, self._num_tried = self._num_tried, self._num_tried + 1
        if await self._backend.batched_put([self._chunk(number)]) != [True]:
            return "refused"
        self.acknowledged.append(number)
        return "ok"

    async def get(self) -> str:
        """Read an acknowledged chunk and compare it."""
        if not self.acknowledged:
            return "missed"
        return await self._read(random.choice(self.acknowledged))

    async def _read(self, number: int) -> str:
        chunk = self._chunk(number)
        (found,) = await self._backend.batched_get(
            [chunk.key], lambda size: BytesBufferMemoryObj(bytearray(size)), CALL_TIMEOUT_S
        )
        if isinstance(found, Miss):
            return "missed"
        same = bytes(found.memory.byte_array) == bytes(chunk.memory.byte_array)
        return "ok" if same else "wrong"

    async def lost(self, deadline: float) -> list[str]:
        """Return the acknowledged chunks that cannot be read before the deadline, and why."""
        pending = dict.fromkeys(self.acknowledged, "not read")
        while pending:
            for number in list(pending):
                try:
                    pending[number] = await self._read(number)
                except FAILURES as exc:
                    pending[number] = f"{type(exc).__name__}: {exc}"
                    break  # the service is unavailable: ask again later
                if pending[number] == "ok":
                    del pending[number]
            if pending and time.monotonic() > deadline:
                break
            await asyncio.sleep(SETTLE_POLL_S if pending else 0)
        return [f"{self._run}/{number}: {why}" for number, why in sorted(pending.items())]

    async def remove_all(self) -> None:
        """Free the space, if storage answers."""
        for begin in range(0, len(self.acknowledged), 100):
            keys = [self._chunk(number).key for number in self.acknowledged[begin : begin + 100]]
            try:
                await self._backend.batched_remove(keys)
            except FAILURES as exc:
                print(f"the chunks stay: {exc}", flush=True)
                return


class Completions:
    """Prompts of this run only: vLLM computes each once, and must then answer with the same text.

    Args:
        url: Base URL of a vLLM server.
        model: Its served name.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._texts: dict[int, str] = {}
        self._num_calls = 0

    async def ask(self) -> str:
        """Ask a new prompt, then one that was answered before, in turn."""
        self._num_calls += 1
        is_new = len(self._texts) < NUM_PROMPTS and self._num_calls % 2 == 1
        # A prompt without an answer may have been computed: the next new one is another.
        seed = secrets.randbits(60) if is_new or not self._texts else secrets.choice([*self._texts])
        tokens = prompt(seed, PROMPT_TOKENS)
        answer = await asyncio.to_thread(complete, self._url, self._model, tokens)
        if seed not in self._texts and answer.num_cached:
            return "stale"
        return "ok" if answer.text == self._texts.setdefault(seed, answer.text) else "wrong"


class Traffic:
    """Callers of every kind, and the outcomes of their calls.

    Args:
        kinds: What to call, by kind.
        arguments: When it ends.
    """

    def __init__(self, kinds: dict[str, Call], arguments: argparse.Namespace) -> None:
        self._kinds = kinds
        self._arguments = arguments
        self._begin = time.monotonic()
        self.calls: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self.failures: list[str] = []
        self.disturbed_s = dict.fromkeys(kinds, 0.0)

    async def run(self) -> None:
        """Call until the end."""
        async with asyncio.TaskGroup() as tasks:
            for kind, call in self._kinds.items():
                tasks.create_task(self._caller(kind, call))
            tasks.create_task(self._tell())

    async def succeeds(self, kind: str, deadline: float, in_a_row: int = 1) -> bool:
        """Call until it has succeeded that often in a row; False at the deadline."""
        num_ok = 0
        while num_ok < in_a_row:
            try:
                outcome = await self._kinds[kind]()
            except FAILURES as exc:
                outcome = f"{type(exc).__name__}: {exc}"
            num_ok = num_ok + 1 if outcome == "ok" else 0
            if num_ok:
                continue
            if time.monotonic() > deadline:
                print(f"{kind}: {outcome}", flush=True)
                return False
            await asyncio.sleep(SETTLE_POLL_S)
        return True

    def _is_over(self) -> bool:
        has_time = time.monotonic() - self._begin < self._arguments.max_seconds
        return self._arguments.stop_file.exists() or not has_time

    async def _caller(self, kind: str, call: Call) -> None:
        disturbed_since, num_ok = None, 0
        for _ in range(MAX_CALLS):
            if self._is_over():
                return
            begin = time.monotonic()
            try:
                outcome = await call()
            except FAILURES as exc:
                outcome = "failed"
                if self.calls[kind][outcome] < MAX_FAILURES:
                    at = time.monotonic() - self._begin
                    self.failures.append(f"{kind} after {at:.1f} s: {type(exc).__name__}: {exc}")
            self.calls[kind][outcome] += 1
            num_ok = num_ok + 1 if outcome == "ok" else 0
            if num_ok == STEADY_CALLS:
                disturbed_since = None
            elif not num_ok:
                disturbed_since = begin if disturbed_since is None else disturbed_since
                lasted_s = time.monotonic() - disturbed_since
                self.disturbed_s[kind] = max(self.disturbed_s[kind], lasted_s)
            await asyncio.sleep(PAUSE_S)

    async def _tell(self) -> None:
        for _ in range(MAX_CALLS):
            for _ in range(int(self._arguments.progress_seconds / POLL_S)):
                if self._is_over():
                    return
                await asyncio.sleep(POLL_S)
            print(json.dumps(self.calls), flush=True)


def service_url(urls: list[str], path: str) -> str:
    """Return scheme, host and port of the URL with that path."""
    found = next(urlsplit(url) for url in urls if urlsplit(url).path == path)
    return f"{found.scheme}://{found.netloc}"


async def main(arguments: argparse.Namespace) -> int:
    token = None if arguments.token_file is None else TokenFile(arguments.token_file, "token")
    files = TlsFiles(arguments.tls_cert_file, arguments.tls_key_file, arguments.tls_ca_file)
    context = client_context(files)
    async with AsyncExitStack() as stack:
        kinds, storage = await open_all(arguments, token, context, stack)
        traffic = Traffic(kinds, arguments)
        ready_by = time.monotonic() + READY_TIMEOUT_S
        for kind in kinds:
            if not await traffic.succeeds(kind, ready_by):
                return 1
        print("ready", flush=True)
        await traffic.run()
        deadline = time.monotonic() + arguments.settle_seconds
        not_recovered = [
            kind for kind in kinds if not await traffic.succeeds(kind, deadline, STEADY_CALLS)
        ]
        report = {
            "calls": traffic.calls,
            "failures": traffic.failures,
            "disturbed_s": traffic.disturbed_s,
            "acknowledged": len(storage.acknowledged),
            "lost": await storage.lost(deadline),
            "not_recovered": not_recovered,
        }
        await storage.remove_all()
    print(f"REPORT {json.dumps(report)}", flush=True)
    return 0


async def open_all(
    arguments: argparse.Namespace,
    token: TokenFile | None,
    context: ssl.SSLContext | None,
    stack: AsyncExitStack,
) -> tuple[dict[str, Call], Storage]:
    """Return the calls by kind, and the record of chunks; the stack closes the clients."""
    lookup = LookupClient(
        service_url(arguments.guarded_url, "/v1/instances"), token, CALL_TIMEOUT_S, tls=context
    )
    broker = BrokerClient(
        service_url(arguments.guarded_url, "/v1/peers"), token, CALL_TIMEOUT_S, tls=context
    )
    url = arguments.storage_url
    tls = ClientTls(context, arguments.tls_peer_name) if url.startswith("lm+tls:") else None
    backend = create_remote_backend(
        url, token, CALL_TIMEOUT_S, NAME, locate=partial(locate_by_lookup, lookup), tls=tls
    )
    for client in (lookup, broker, backend):
        await client.open()
        stack.push_async_callback(client.close)
    storage = Storage(backend)

    async def look_up() -> str:
        return "degraded" if (await lookup.lookup([os.urandom(16)])).degraded else "ok"

    async def list_peers() -> str:
        await broker.peers()
        return "ok"

    kinds: dict[str, Call] = {"put": storage.put, "get": storage.get}
    kinds |= {"lookup": look_up, "broker": list_peers}
    if arguments.completions_url:
        kinds["completion"] = Completions(arguments.completions_url, arguments.model).ask
    return kinds, storage


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse_arguments())))
