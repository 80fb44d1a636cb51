"""Hosts in a URL, and the addresses behind names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.storage.remote.addresses import Resolver, hosts_of


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str] | int]:
    """What the system's resolver answers: addresses of a name, or the number of its error."""
    known: dict[str, list[str] | int] = {}

    async def answer(
        self: asyncio.AbstractEventLoop, host: str, port: int, **options: Any
    ) -> Sequence[Any]:
        found = known[host]
        if isinstance(found, int):
            raise socket.gaierror(found, "no")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", answer)
    return known


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("lm://a", [("a", 65432)]),
        ("lm://a:1,b", [("a", 1), ("b", 65432)]),
        ("lm://[::1]:7,10.0.0.1:8/", [("::1", 7), ("10.0.0.1", 8)]),
    ],
)
def test_hosts(url: str, hosts: list[tuple[str, int]]) -> None:
    assert [(address.host, address.port) for address in hosts_of(url)] == hosts
    assert all(address.name == address.host for address in hosts_of(url))


@pytest.mark.parametrize(
    "url",
    [
        "lm://a,,b",
        "lm://a,b/path",
        "lm://user:secret@a,b",
        "lm://a:0x1",
        "lm://a:70000,b",
        "lm://,",
        "lm://a?b",
    ],
)
def test_what_is_no_list_of_hosts(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hosts_of(url)
    assert "secret" not in str(caught.value)


async def test_every_address_of_a_name_counts_once(names: dict[str, list[str] | int]) -> None:
    names["s"] = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert await Resolver(hosts_of("lm://s:5,10.9.9.9:6"))() == [
        ("10.0.0.1", 5, "s"),
        ("10.0.0.2", 5, "s"),
        ("10.9.9.9", 6, "10.9.9.9"),
    ]


async def test_a_name_that_nobody_can_tell_now_stays_and_one_that_is_no_more_goes(
    names: dict[str, list[str] | int],
) -> None:
    names |= {"s-0": ["10.0.0.1"], "s-1": ["10.0.0.2"]}
    resolver = Resolver(hosts_of("lm://s-0:5,s-1:5"))
    assert len(await resolver()) == 2
    names["s-0"] = socket.EAI_AGAIN
    assert await resolver() == [("10.0.0.1", 5, "s-0"), ("10.0.0.2", 5, "s-1")]
    names["s-1"] = socket.EAI_NONAME
    assert await resolver() == [("10.0.0.1", 5, "s-0")]
    names["s-0"] = socket.EAI_NONAME
    with pytest.raises(UnavailableError, match="s-0, s-1"):
        await resolver()
