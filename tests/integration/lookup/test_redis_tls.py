"""The index reaches its Redis over TLS and with a password, whichever kind of Redis it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.lookup import Holder
from lmcache_lookup.index import EventBatch, IndexEvent, LeaseClaim, LookupIndex, create_index
from lmcache_lookup.settings import LookupSettings
from pydantic import SecretStr

from tests.fixtures.redis_tls import QUOTED, redis_over_tls
from tests.fixtures.tls import Authority, Pair, replace, server_tls
from tests.fixtures.waiting import until

CHUNK = b"c" * 16


def index_of(url: str, authority: Authority, mine: Pair | None = None) -> LookupIndex:
    return create_index(
        LookupSettings(
            redis_url=SecretStr(url),
            redis_tls_ca_file=authority.file,
            redis_tls_cert_file=mine and mine.cert,
            redis_tls_key_file=mine and mine.key,
            redis_timeout_ms=10_000,
            redis_write_timeout_ms=10_000,
        )
    )


async def use(index: LookupIndex) -> None:
    """Everything that goes to another kind of server."""
    await index.open()
    try:
        await index.ping()
        await index.renew("t", LeaseClaim("a", 1, "sidecar", 60_000))
        await index.apply("t", EventBatch("a", 1, 0, [IndexEvent("store", "t", CHUNK, "hot", 5)]))
        assert await index.holders("t", [CHUNK]) == [[Holder("a", "sidecar", "hot", 5)]]
        assert (await index.stats("t")).num_chunks == 1
    finally:
        await index.close()


async def is_refused(index: LookupIndex) -> None:
    try:
        with pytest.raises(UnavailableError) as caught:
            await index.ping()
        assert "sesame" not in str(caught.value)
    finally:
        await index.close()


@pytest.mark.parametrize("kind", ["server", "sentinel", "cluster"])
async def test_both_sides_show_certificates_and_the_password_is_needed(
    kind: str, tmp_path: Path
) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    mine = authority.sign("lookup", "lookup.example")
    context = server_tls(authority.sign("redis"), clients=authority)
    async with redis_over_tls(kind, context, tmp_path) as rest:
        await use(index_of(f"rediss{rest}", authority, mine))
        await is_refused(index_of(f"rediss{rest}", stranger, mine))
        await is_refused(index_of(f"rediss{rest}", authority))
        await is_refused(
            create_index(LookupSettings(redis_url=SecretStr(f"redis{rest}"), redis_timeout_ms=500))
        )
        await is_refused(index_of(f"rediss{rest}".replace(QUOTED, "wrong-sesame"), authority, mine))


async def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with redis_over_tls(
        "server", server_tls(authority.sign("redis", "elsewhere.example")), tmp_path
    ) as rest:
        await is_refused(index_of(f"rediss{rest}", authority))


async def test_new_connections_read_replaced_files(tmp_path: Path) -> None:
    authority, later = Authority(tmp_path), Authority(tmp_path, "later")
    trusted = tmp_path / "trusted.pem"
    stranger = Authority(tmp_path, "stranger")
    replace(trusted, stranger.file.read_bytes())
    async with redis_over_tls("cluster", server_tls(later.sign("redis")), tmp_path) as rest:
        settings = LookupSettings(
            redis_url=SecretStr(f"rediss{rest}"), redis_tls_ca_file=trusted, redis_timeout_ms=10_000
        )
        index = create_index(settings)
        with pytest.raises(UnavailableError):
            await index.ping()
        replace(trusted, authority.file.read_bytes() + later.file.read_bytes())
        await until(lambda: answers(index))
        await index.close()


async def answers(index: LookupIndex) -> bool:
    try:
        await index.ping()
    except UnavailableError:
        return False
    return True


def test_files_that_cannot_be_read_fail_the_start(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing.pem", tmp_path / "empty.pem"
    empty.write_bytes(b"")
    for path in (missing, empty):
        with pytest.raises(ConfigError, match=path.name):
            create_index(LookupSettings(redis_url=SecretStr("rediss://h"), redis_tls_ca_file=path))
    for url in ("rediss-sentinel://h/s", "rediss-cluster://h"):
        with pytest.raises(ConfigError, match=r"missing\.pem"):
            create_index(LookupSettings(redis_url=SecretStr(url), redis_tls_cert_file=missing))
