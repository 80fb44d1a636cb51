"""Servers of a remote tier: hosts in a URL, addresses of names, and the home of each chunk."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import Holder, LookupAnswer
from lmcache_core.storage.remote.members import MAX_QUESTIONS, Resolver, hosts_of, locate_by_lookup
from lmcache_core.storage.remote.rendezvous import home, ranked, score

from tests.suites.chunks import make_key


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str] | int]:
    """Answers of the system's resolver: addresses of a name, or an error number."""
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


async def test_every_address_of_a_name_counts_once(names: dict[str, list[str] | int]) -> None:
    names["s"] = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert await Resolver(hosts_of("lm://s:5,10.9.9.9:6"))() == [
        ("10.0.0.1", 5, "s"),
        ("10.0.0.2", 5, "s"),
        ("10.9.9.9", 6, "10.9.9.9"),
    ]


async def test_unresolvable_name_keeps_its_addresses_and_a_deleted_one_does_not(
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


KEYS = [make_key(i) for i in range(12)]


class ScriptedLookup:
    def __init__(self, held: set[int], degraded: bool = False) -> None:
        self._held = {KEYS[i].key.chunk_id() for i in held}
        self._degraded = degraded
        self.num_questions = 0

    async def lookup(self, chunk_ids: Sequence[bytes]) -> LookupAnswer:
        self.num_questions += 1
        if self._degraded:
            return LookupAnswer(0, [], degraded=True)
        num_prefix = next(
            (i for i, chunk_id in enumerate(chunk_ids) if chunk_id not in self._held),
            len(chunk_ids),
        )
        return LookupAnswer(
            num_prefix,
            [[Holder("s-1", "storage", "memory", 5), Holder("s-2", "storage", "memory", 5)]]
            * num_prefix,
        )


async def located(lookup: ScriptedLookup, keys: Sequence[ChunkKey]) -> list[list[str]]:
    return await locate_by_lookup(lookup, keys)  # type: ignore[arg-type]


async def test_chunk_after_a_gap_is_found() -> None:
    lookup = ScriptedLookup({0, 1, 3, 5, 6})
    found = await located(lookup, KEYS[:7])
    assert [bool(names) for names in found] == [True, True, False, True, False, True, True]
    assert found[0] == ["s-1", "s-2"]
    assert lookup.num_questions == 3


async def test_number_of_questions_is_bounded() -> None:
    lookup = ScriptedLookup({0, *range(8, 12)})
    found = await located(lookup, KEYS)
    assert [bool(names) for names in found] == [True] + [False] * 11
    assert lookup.num_questions == MAX_QUESTIONS


GOLDEN = Path(__file__).parents[3] / "contract" / "golden" / "rendezvous.json"
VECTORS: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["chunk_id"])
def test_golden_vectors(case: dict[str, Any]) -> None:
    chunk_id = bytes.fromhex(case["chunk_id"])
    for name, expected in case["scores"].items():
        assert f"{score(name, chunk_id):016x}" == expected
        assert xxhash.xxh3_64_hexdigest(name.encode() + b"\0" + chunk_id) == expected
    assert ranked(reversed(case["ranked"]), chunk_id) == case["ranked"]
    assert home(sorted(case["ranked"]), chunk_id) == case["ranked"][0]


async def test_degraded_lookup_locates_nothing() -> None:
    assert await located(ScriptedLookup({0}, degraded=True), KEYS) == [[] for _ in KEYS]
    assert await located(ScriptedLookup(set()), []) == []


@pytest.mark.parametrize(
    "url", ["lm://a,,b", "lm://a,b/path", "lm://user:secret@a,b", "lm://a:70000,b"]
)
def test_invalid_list_of_hosts_is_refused_and_shows_no_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hosts_of(url)
    assert "secret" not in str(caught.value)
