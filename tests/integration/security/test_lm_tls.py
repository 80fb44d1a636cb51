"""lm:// under TLS over real sockets: what goes through, who is not let in, files that are
replaced while connections stand.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.security import ClientTls
from lmcache_core.security.watched_files import Reloaded
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_core.wire.served import ServerLimits
from lmcache_core.wire.server import LmServer

from tests.fixtures.tls import Authority, client_tls, server_tls
from tests.fixtures.wire import MemoryStore, client_in
from tests.suites.chunks import make_chunk

pytestmark = pytest.mark.virtual_time


@pytest.fixture(autouse=True)
def _reads_replaced_files_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reloaded.__init__, "__defaults__", (0.0,))


@asynccontextmanager
async def serving(
    tls: ssl.SSLContext | None, store: MemoryStore | None = None, **limits: object
) -> AsyncIterator[LmServer]:
    kept = store or MemoryStore()
    server = LmServer(kept, lambda token: client_in("default"), limits=ServerLimits(**limits))  # type: ignore[arg-type]
    await server.open(tls)
    try:
        yield server
    finally:
        await server.close()
        for chunk in kept.chunks.values():
            chunk.release()


@asynccontextmanager
async def client(
    port: int, tls: ClientTls | None, host: str = "127.0.0.1"
) -> AsyncIterator[LmClient]:
    made = LmClient(
        host,
        port,
        None,
        ClientOptions(tls=tls, timeout_s=20.0, backoff_initial_s=0.001, backoff_cap_s=0.002),
    )
    try:
        yield made
    finally:
        await made.close()


async def test_tokens_and_payloads_are_unreadable_on_the_way(tmp_path: Path) -> None:
    """A relay between client and server looks for the token and the payload."""
    authority, seen = Authority(tmp_path), bytearray()
    token, payload = "a-secret-token-0123456789", b"a payload of 28 bytes, secret" * 100

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: int) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", to)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                seen.extend(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, back), pump(onward, writer))

    for tls, is_readable in ((server_tls(authority.sign("server")), False), (None, True)):
        seen.clear()
        async with serving(tls) as server:
            port = server.port
            listener = await asyncio.start_server(
                lambda r, w, port=port: relay(r, w, port), "127.0.0.1", 0
            )
            options = ClientOptions(
                tls=None if tls is None else client_tls(authority), timeout_s=10.0
            )
            lm = LmClient("127.0.0.1", listener.sockets[0].getsockname()[1], token, options)
            try:
                assert await lm.put([make_chunk("a", payload=payload)]) == [True]
            finally:
                await lm.close()
                listener.close()
                await listener.wait_closed()
        assert len(seen) > len(payload)
        assert (token.encode() in seen, payload[:28] in seen) == (is_readable, is_readable)


async def test_a_server_without_the_right_certificate_is_refused(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server_pair = ours.sign("server", "storage.example")
    async with serving(server_tls(server_pair)) as server:
        async with client(server.port, client_tls(theirs)) as lm:
            with pytest.raises(UnavailableError, match="certificate verify failed"):
                await lm.ping()
        async with client(server.port, client_tls(ours)) as lm:
            with pytest.raises(
                UnavailableError, match=r"certificate is not valid for '127\.0\.0\.1'"
            ):
                await lm.ping()
        async with client(server.port, client_tls(ours, name="storage.example")) as lm:
            await lm.ping()
        async with client(server.port, None) as lm:
            with pytest.raises(UnavailableError):
                await lm.ping()
    async with serving(None) as server, client(server.port, client_tls(ours)) as lm:
        with pytest.raises(UnavailableError):
            await lm.ping()


async def test_half_a_replacement_leaves_the_old_pair_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    tls, trusted = server_tls(pair), client_tls(authority)
    caplog.set_level("INFO")
    async with serving(tls) as server:
        pair.cert.write_bytes(other.cert.read_bytes())
        for _ in range(3):
            async with client(server.port, trusted) as lm:
                await lm.ping()
        assert caplog.text.count("keeping what was read before: files=certificates") == 1
        pair.key.write_bytes(other.key.read_bytes())
        async with client(server.port, trusted) as lm:
            await lm.ping()
        assert "files reread: files=certificates" in caplog.text
    assert "PRIVATE KEY" not in caplog.text
