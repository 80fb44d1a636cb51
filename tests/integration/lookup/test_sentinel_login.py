"""The index finds its Redis by sentinels that answer only callers with name and password, over
TLS or not.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_lookup.index import LookupIndex, create_index
from lmcache_lookup.settings import LookupSettings
from pydantic import SecretStr, ValidationError

from tests.fixtures.redis_sentinel import SERVICE, WatchedRedis, watched_redis
from tests.fixtures.redis_tls import behind_tls
from tests.fixtures.tls import Authority, replace, server_tls

PASSWORD = "tell-me-where"


def index_of(
    url: str, password_file: Path | None, username: str | None = None, ca_file: Path | None = None
) -> LookupIndex:
    return create_index(
        LookupSettings(
            redis_url=SecretStr(url),
            redis_sentinel_username=username,
            redis_sentinel_password_file=password_file,
            redis_tls_ca_file=ca_file,
            redis_timeout_ms=10_000,
        )
    )


async def answers(index: LookupIndex) -> bool:
    try:
        await index.ping()
    except UnavailableError:
        return False
    finally:
        await index.close()
    return True


@pytest.mark.parametrize("name", ["default", "lookup"])
async def test_sentinels_answer_callers_with_the_password(name: str, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(f"{PASSWORD}\n")
    wrong.write_text("guessed")
    username = None if name == "default" else name
    with watched_redis(down_after_ms=10_000, login=(name, PASSWORD)) as watched:
        assert await answers(index_of(watched.url, right, username))
        assert not await answers(index_of(watched.url, wrong, username))
        assert not await answers(index_of(watched.url, None))
        await check_over_tls(watched, right, username, tmp_path)


async def check_over_tls(
    watched: WatchedRedis, password_file: Path, username: str | None, directory: Path
) -> None:
    authority = Authority(directory)
    context = server_tls(authority.sign("redis"))
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(behind_tls(watched.master.port, context))
        renamed = (watched.master.port, master)
        sentinel = await stack.enter_async_context(
            behind_tls(watched.sentinel_ports[0], context, renamed=renamed)
        )
        url = f"rediss-sentinel://127.0.0.1:{sentinel}/{SERVICE}"
        assert await answers(index_of(url, password_file, username, authority.file))
        assert not await answers(index_of(url, None, None, authority.file))


def test_a_login_that_cannot_be_used_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="redis_sentinel_password_file="):
        index_of("redis-sentinel://h", tmp_path / "missing")
    with pytest.raises(ValidationError, match="redis_sentinel_password_file is not"):
        index_of("redis-sentinel://h", None, "lookup")
    with pytest.raises(ValidationError, match="rediss-sentinel://"):
        index_of("redis://h", tmp_path / "password")


async def test_a_password_that_is_replaced_is_read_for_the_next_connection(tmp_path: Path) -> None:
    file = tmp_path / "password"
    replace(file, b"of-yesterday")
    with watched_redis(down_after_ms=10_000, login=("default", PASSWORD)) as watched:
        index = index_of(watched.url, file)
        with pytest.raises(UnavailableError):
            await index.ping()
        replace(file, PASSWORD.encode())
        await index.ping()
        replace(file, b"")
        assert await answers(index)
