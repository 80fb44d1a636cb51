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
from lmcache_core.errors import AuthenticationError, UnavailableError
from lmcache_core.record import Chunk
from lmcache_core.security import ClientTls, Principal
from lmcache_core.security.watched_files import LOOK_INTERVAL_S
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_core.wire.served import ServerLimits
from lmcache_core.wire.server import LmServer

from tests.fixtures.tls import Authority, client_tls, server_tls
from tests.fixtures.wire import Arena, MemoryStore, client_in
from tests.suites.chunks import make_chunk, make_key, make_payload

SIZES = (0, 1, 4096, 70_000, (1 << 20) + 1, 9_000_000)


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


async def test_chunks_of_any_size_go_there_and_back_encrypted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    arena = Arena(32 << 20)
    chunks = [make_chunk(size, payload=make_payload(size, size)) for size in SIZES]
    async with (
        serving(server_tls(authority.sign("server")), MemoryStore(32 << 20)) as server,
        client(server.port, client_tls(authority)) as lm,
    ):
        assert await lm.put(chunks) == [True] * len(chunks)
        results = await lm.get([make_key("other"), *(chunk.key for chunk in chunks)], arena)
        for size, result in zip(SIZES, results[1:], strict=True):
            assert isinstance(result, Chunk)
            assert bytes(result.memory.byte_array) == make_payload(size, size)
            result.release()
    arena.check_empty()


async def test_nothing_of_it_can_be_read_on_the_way(tmp_path: Path) -> None:
    """A relay between client and server looks for the token and the payload."""
    authority, seen = Authority(tmp_path), bytearray()
    token, payload = "a-token-that-nobody-may-read", b"payload that nobody may read" * 100

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


async def test_who_is_not_what_it_says_is_not_spoken_to(tmp_path: Path) -> None:
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


async def test_replaced_certificates_hold_for_new_connections_and_standing_ones_go_on(
    tmp_path: Path,
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    pair, mine = old.sign("server"), old.sign("mine", "pod.example")
    asked, trusted = server_tls(pair, clients=old), client_tls(old, mine)
    async with serving(asked) as server, client(server.port, trusted) as standing:
        await standing.ping()
        new.publish(old.file)
        new.renew(pair)
        await asyncio.sleep(LOOK_INTERVAL_S + 0.1)
        async with client(server.port, trusted) as fresh:
            with pytest.raises(UnavailableError):
                # both read the new files, and this client shows a certificate of the old authority
                await fresh.ping()
            new.renew(mine, "pod.example")
            await asyncio.sleep(LOOK_INTERVAL_S + 0.1)
            await fresh.ping()
        await standing.ping()


async def test_half_a_replacement_leaves_the_old_pair_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    tls, trusted = server_tls(pair), client_tls(authority)
    caplog.set_level("INFO")
    async with serving(tls) as server:
        pair.cert.write_bytes(other.cert.read_bytes())
        await asyncio.sleep(LOOK_INTERVAL_S + 0.1)
        for _ in range(3):
            async with client(server.port, trusted) as lm:
                await lm.ping()
        assert caplog.text.count("keeping what was read before: files=certificates") == 1
        pair.key.write_bytes(other.key.read_bytes())
        await asyncio.sleep(LOOK_INTERVAL_S + 0.1)
        async with client(server.port, trusted) as lm:
            await lm.ping()
        assert "files reread: files=certificates" in caplog.text
    assert "PRIVATE KEY" not in caplog.text


async def test_a_client_that_never_shakes_hands_is_let_go(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(server_tls(authority.sign("server")), hello_timeout_s=0.3) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(9):
            assert await reader.read() == b""
        writer.close()
        async with client(server.port, client_tls(authority)) as lm:
            await lm.ping()


async def test_handshakes_above_the_bound_end_at_once_and_others_are_served(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trusted = client_tls(authority)
    async with (
        serving(
            server_tls(authority.sign("server")), hello_timeout_s=20.0, max_handshakes=4
        ) as server,
        client(server.port, trusted) as standing,
        client(server.port, trusted) as newcomer,
    ):
        await standing.ping()
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
        await asyncio.sleep(0.1)
        reader, late = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(9):
            assert await reader.read() == b"", "one too many"
        late.close()
        with pytest.raises(UnavailableError):
            await newcomer.ping()
        await standing.ping()
        for _, writer in silent:
            writer.write(b"no TLS at all")
            writer.close()
        await asyncio.sleep(0.1)
        await newcomer.ping()


async def test_a_standing_connection_ends_with_its_token() -> None:
    owners: dict[str | None, str] = {"good": "acme"}

    def authenticate(token: str | None) -> Principal:
        if token not in owners:
            raise AuthenticationError("the token is unknown")
        return client_in(owners[token])

    server = LmServer(MemoryStore(), authenticate, limits=ServerLimits(reauthenticate_s=0.1))
    await server.open()
    lm = LmClient(
        "127.0.0.1",
        server.port,
        "good",
        ClientOptions(backoff_initial_s=0.001, backoff_cap_s=0.002),
    )
    try:
        await lm.ping()
        await asyncio.sleep(0.15)
        await lm.ping()
        assert lm.is_connected, (
            "a token that is still good is asked about again, and nothing happens"
        )
        del owners["good"]
        await asyncio.sleep(0.15)
        with pytest.raises((AuthenticationError, UnavailableError)):
            await lm.ping()
        await asyncio.sleep(0.01)
        with pytest.raises(AuthenticationError):
            await lm.ping()
        owners["good"] = "rival"
        await asyncio.sleep(0.01)
        await lm.ping()
        owners["good"] = "acme"
        await asyncio.sleep(0.15)
        with pytest.raises((AuthenticationError, UnavailableError)):
            await lm.ping()
    finally:
        await lm.close()
        await server.close()


async def test_close_does_not_wait_for_a_client_that_never_begins_its_handshake(
    tmp_path: Path,
) -> None:
    server = LmServer(
        MemoryStore(), lambda token: client_in("default"), limits=ServerLimits(hello_timeout_s=3600)
    )
    await server.open(server_tls(Authority(tmp_path).sign("server")))
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        await asyncio.sleep(0.05)  # the server has accepted it
        async with asyncio.timeout(10):
            await server.close()
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
