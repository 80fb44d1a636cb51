"""What `helm test` runs: stores, fetches and removes a chunk, and tries every service with and without a token.

It uses what the storage's image has. Just after an installation services may not be ready, and policies that were made for this pod not
in force: what fails is tried again for a while. Ends with 1, and a line for each thing that is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from lmcache_core.errors import AuthenticationError, LMCacheError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import UNSEALED_DIGEST, Chunk, Miss, raw_header
from lmcache_core.security import ClientTls, TlsFiles, TokenFile, client_context
from lmcache_core.storage.remote import create_remote_backend
from lmcache_core.wire.client import ClientOptions, LmClient

CHUNK_BYTES = 256 << 10
CALL_TIMEOUT_S = 10.0
PAUSE_S = 1.0
NAME = "helm-test"


def parse_arguments() -> argparse.Namespace:
    """What the chart says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage-url", help="lm:// or lm+tls://; left out without cache_storage")
    parser.add_argument("--guarded-url", action="append", default=[], help="a URL that is answered to those with a token alone")
    parser.add_argument("--token-file", type=Path, help="left out where no tokens are asked for")
    parser.add_argument("--patience-s", type=float, default=30.0, help="how long what fails is tried again, from the start on, in seconds")
    parser.add_argument("--tls-ca-file", type=Path)
    parser.add_argument("--tls-cert-file", type=Path)
    parser.add_argument("--tls-key-file", type=Path)
    parser.add_argument("--tls-peer-name", help="what certificates behind lm+tls:// name")
    return parser.parse_args()


def make_chunk() -> Chunk:
    """A chunk of a model that no other client has."""
    engine_key = CacheEngineKey(NAME, f"{NAME}/{secrets.token_hex(8)}", 1, 0, hashlib.sha256(os.urandom(32)).hexdigest())
    header = raw_header(engine_key, (CHUNK_BYTES,), "uint8", UNSEALED_DIGEST)
    return Chunk.unsealed(ChunkKey.of("default", engine_key), header, BytesBufferMemoryObj(os.urandom(CHUNK_BYTES)), NAME).sealed()


async def check_storage(url: str, token: TokenFile | None, tls: ClientTls) -> None:
    """Store a chunk, fetch it, compare, remove it."""
    chunk = make_chunk()
    backend = create_remote_backend(url, token, CALL_TIMEOUT_S, NAME, tls=tls if urlsplit(url).scheme == "lm+tls" else None)
    await backend.open()
    try:
        if await backend.batched_put([chunk]) != [True]:
            raise LMCacheError("it did not keep a chunk")
        try:
            (found,) = await backend.batched_get([chunk.key], lambda size: BytesBufferMemoryObj(bytearray(size)), CALL_TIMEOUT_S)
            if isinstance(found, Miss):
                raise LMCacheError(f"a chunk that was stored is missing: {found.reason}")
            if bytes(found.memory.byte_array) != bytes(chunk.memory.byte_array):
                raise LMCacheError("a chunk came back with other bytes")
        finally:
            await backend.batched_remove([chunk.key])
        if await backend.batched_contains([chunk.key]) != [False]:
            raise LMCacheError("a chunk that was removed is still there")
    finally:
        await backend.close()


async def check_refusal(url: str, tls: ClientTls) -> None:
    """Without a token nothing is answered over lm://."""
    parts = urlsplit(url)
    options = ClientOptions(CALL_TIMEOUT_S, connect_timeout_s=CALL_TIMEOUT_S, name=NAME, tls=tls if parts.scheme == "lm+tls" else None)
    client = LmClient(parts.hostname or "", parts.port or 0, None, options)
    try:
        await client.contains([make_chunk().key])
    except AuthenticationError:
        return
    finally:
        await client.close()
    raise LMCacheError("it answers callers without a token")


async def check_guard(url: str, token: TokenFile | None, tls: ClientTls) -> None:
    """A URL of REST is answered with a token, and without one only where none is required."""
    context = tls.context if url.startswith("https:") else None
    expected = {True: 200, False: 200 if token is None else 401}
    for has_token, status in expected.items():
        headers = {"Authorization": f"Bearer {token.text}"} if has_token and token is not None else {}
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 (the URL is the chart's)
        try:
            answer = await asyncio.to_thread(urllib.request.urlopen, request, timeout=CALL_TIMEOUT_S, context=context)
        except urllib.error.HTTPError as exc:
            answer = exc
        answer.close()
        if answer.status != status:
            raise LMCacheError(f"it answers {answer.status} {'with' if has_token else 'without'} a token, not {status}")


async def check_all(arguments: argparse.Namespace) -> int:
    """Every check; gives how many failed."""
    token = None if arguments.token_file is None else TokenFile(arguments.token_file, "--token-file")
    files = TlsFiles(arguments.tls_cert_file, arguments.tls_key_file, arguments.tls_ca_file)
    tls = ClientTls(client_context(files), arguments.tls_peer_name)
    checks: list[tuple[str, Callable[[], Awaitable[None]]]] = []
    if arguments.storage_url is not None:
        url = arguments.storage_url
        checks.append((f"{url}: store, fetch, remove", partial(check_storage, url, token, tls)))
        if token is not None:
            checks.append((f"{url}: refuse who shows no token", partial(check_refusal, url, tls)))
    checks += [(f"{url}: {'open' if token is None else 'guarded'}", partial(check_guard, url, token, tls)) for url in arguments.guarded_url]
    deadline = time.monotonic() + arguments.patience_s
    num_failed = 0
    for name, check in checks:
        failure = await attempt(check, deadline)
        if failure is None:
            print(f"ok     {name}")
        else:
            num_failed += 1
            print(f"FAILED {name}: {failure}", file=sys.stderr)
    return num_failed


async def attempt(check: Callable[[], Awaitable[None]], deadline: float) -> Exception | None:
    """What is wrong, if it still is at the deadline (of the monotonic clock)."""
    while True:
        try:
            await check()
        except (LMCacheError, OSError, TimeoutError) as exc:
            if time.monotonic() + PAUSE_S > deadline:
                return exc
            await asyncio.sleep(PAUSE_S)
        else:
            return None


if __name__ == "__main__":
    sys.exit(min(1, asyncio.run(check_all(parse_arguments()))))
