"""The grammar of Redis URLs, and that no password in one is ever shown."""

from __future__ import annotations

import pytest
from lmcache_lookup.index import create_index
from lmcache_lookup.settings import LookupSettings
from lmcache_servicekit.redis_settings import RedisUrl
from pydantic import SecretStr, ValidationError


@pytest.mark.parametrize(
    "url",
    [
        *("http://h", "hunter2", "redis:/h", "redis://u:hunter2@h:port", "redis://[::1"),
        *("redis-sentinel://,:1/s", "redis-cluster://u:hunter2@,b", "redis-cluster://h:1/2"),
        *("redis://u:hunter2@h:99999", "rediss://u:hunter2@h/1/2", "redis://h/-1"),
    ],
)
def test_an_unreadable_url_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        LookupSettings(redis_url=SecretStr(url))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://h", "rediss://u:p@h:1/2", "unix:///tmp/s"),
        *("redis-sentinel://u:p%40@a:1,b/main", "redis-sentinel://a", "rediss-sentinel://a"),
        *("redis-cluster://u:p%40@a:1,b", "rediss-cluster://[::1]:7000"),
    ],
)
def test_readable_urls(url: str) -> None:
    assert create_index(LookupSettings(redis_url=SecretStr(url))).name == "redis"


def test_addresses() -> None:
    cluster = RedisUrl.parse("redis-cluster://u:p@a:1,[::1]:2,b")
    assert cluster.addresses == (("a", 1), ("::1", 2), ("b", 6379))
    sentinels = RedisUrl.parse("rediss-sentinel://a,b:3/main")
    assert sentinels.addresses == (("a", 26379), ("b", 3))
    assert (sentinels.service, sentinels.is_cluster) == ("main", False)
    assert "hunter2" not in repr(RedisUrl.parse("redis://:hunter2@h"))


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://u:hunter2@h/3", "redis at h:6379"),
        ("unix://u:hunter2@/tmp/s", "redis at /tmp/s"),
        ("redis-sentinel://u:hunter2@a:1,b/main", "redis main of the sentinels a:1, b:26379"),
        ("rediss-cluster://u:hunter2@a:1,b", "redis cluster at a:1, b:6379"),
    ],
)
def test_url_for_messages(url: str, where: str) -> None:
    assert RedisUrl.parse(url).where == where
