"""Several servers as one tier: where chunks are stored, and found when servers come, go, hang or
refuse; their addresses, and the home of each chunk.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import Holder, LookupAnswer
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, MissReason
from lmcache_core.storage.remote.base import Locate
from lmcache_core.storage.remote.members import (
    MAX_QUESTIONS,
    REFRESH_S,
    REST_INITIAL_S,
    Members,
    Resolver,
    ServerAddress,
    hosts_of,
    locate_by_lookup,
)
from lmcache_core.storage.remote.rendezvous import home, ranked, score
from lmcache_core.storage.remote.replicas import MAX_PUT_TIMEOUTS, ReplicatedBackend
from lmcache_core.wire.client import ClientOptions, LmClient
from lmcache_core.wire.server import LmServer

from tests.fixtures.waiting import until
from tests.fixtures.wire import MemoryStore, serving
from tests.suites.backend_suite import Arena, payload_of
from tests.suites.chunks import make_chunk, make_key, make_payload

pytestmark = pytest.mark.virtual_time

KEYS = [make_key(i) for i in range(40)]


class Server(MemoryStore):
    """A store that may refuse every chunk."""

    takes = True

    def allocate(self, num_bytes: int, tenant: str = "default") -> MemoryObj | None:
        return super().allocate(num_bytes) if self.takes else None


class Cluster:
    """Servers that come and go, and a tier over them."""

    def __init__(self, exits: AsyncExitStack, locate: Locate | None, timeout_s: float) -> None:
        self._exits = exits
        self._timeout_s = timeout_s
        self.stores: dict[str, Server] = {}
        self.addresses: dict[str, ServerAddress] = {}
        self._servers: dict[str, LmServer] = {}
        self.members = Members(self._find, self._client, "test")
        self.tier = ReplicatedBackend(self.members, timeout_s, locate)
        self.arena = Arena()

    async def start(self, *names: str) -> None:
        await self.appear(*names)
        await self.members.refresh()

    async def appear(self, *names: str) -> None:
        """Start servers; the tier has not looked for them yet."""
        for name in names:
            self.stores[name] = Server()
            self._servers[name] = await self._exits.enter_async_context(
                serving(self.stores[name], name=name)
            )
            self.addresses[name] = ServerAddress("127.0.0.1", self._servers[name].port, name)

    async def stop(self, name: str) -> None:
        await self._servers[name].close()

    def where(self, key: ChunkKey) -> list[str]:
        return [name for name, store in self.stores.items() if key in store.chunks]

    async def put(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self.tier.batched_put([make_chunk(KEYS.index(key)) for key in keys])

    async def got(
        self, keys: Sequence[ChunkKey], timeout_s: float | None = None
    ) -> list[bytes | MissReason]:
        return [
            payload_of(result)
            for result in await self.tier.batched_get(keys, self.arena, timeout_s)
        ]

    def num_connections(self, name: str) -> int:
        return self._servers[name].num_connections

    async def _find(self) -> list[ServerAddress]:
        if not self.addresses:
            raise UnavailableError("no such host")
        return list(self.addresses.values())

    def _client(self, address: ServerAddress) -> LmClient:
        return LmClient(
            address.host,
            address.port,
            options=ClientOptions(
                timeout_s=self._timeout_s, backoff_initial_s=0.01, backoff_cap_s=0.01
            ),
        )


@asynccontextmanager
async def cluster(
    *names: str, locate: Locate | None = None, timeout_s: float = 5.0
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as exits:
        made = Cluster(exits, locate, timeout_s)
        await made.tier.open()
        exits.push_async_callback(made.tier.close)
        await made.start(*names)
        yield made
    assert made.arena.allocator.used_bytes == 0, "a reference was not given back"


def payloads(keys: Sequence[ChunkKey]) -> list[bytes]:
    return [make_payload(KEYS.index(key)) for key in keys]


async def test_chunks_at_old_homes_are_found_when_servers_are_added() -> None:
    async with cluster("s-0", "s-1") as made:
        await made.put(KEYS)
        await made.start("s-2", "s-3")
        assert await made.got(KEYS) == payloads(KEYS)
        num_elsewhere = made.tier.stats()["found_elsewhere_chunks"]
        assert num_elsewhere > 5
        assert await made.got(KEYS) == payloads(KEYS)
        keys = [*KEYS, make_key("never")]
        assert await made.tier.batched_contains(keys) == [True] * len(KEYS) + [False]
        assert made.tier.stats()["found_elsewhere_chunks"] == num_elsewhere, "it is remembered"


async def test_unavailable_server_costs_its_own_chunks_only() -> None:
    async with cluster("s-0", "s-1", "s-2") as made:
        await made.put(KEYS[:20])
        await made.stop("s-1")
        lost = [made.where(key) == ["s-1"] for key in KEYS[:20]]
        assert any(lost)
        got = await made.got(KEYS[:20])
        assert [part for part in got if isinstance(part, bytes)] == [
            make_payload(i) for i in range(20) if not lost[i]
        ]
        assert await made.tier.batched_contains(KEYS[:20]) == [not is_lost for is_lost in lost]
        assert all(await made.put(KEYS[20:]))
        assert await made.got(KEYS[20:]) == payloads(KEYS[20:])
        for key in KEYS[20:]:
            first, second, _ = ranked(made.stores, key.key.chunk_id())
            assert made.where(key) == [second if first == "s-1" else first]
        assert made.tier.stats()["num_replicas_away"] == 1


NAMES = tuple(f"s-{number}" for number in range(6))


@pytest.mark.parametrize("num_left", [1, 2])
async def test_put_tries_servers_in_order_until_one_stores_the_chunk(num_left: int) -> None:
    async with cluster(*NAMES) as made:
        left = NAMES[-num_left:]
        for name in NAMES[:-num_left:2]:
            await made.stop(name)
        for name in NAMES[1:-num_left:2]:
            made.stores[name].takes = False
        assert await made.put(KEYS[:20]) == [True] * 20
        for key in KEYS[:20]:
            assert made.where(key) == [home(left, key.key.chunk_id())]
        for name in left:
            made.stores[name].takes = False
        assert await made.put(KEYS[20:]) == [False] * 20, "refused, which is no failure"
        for name in NAMES:
            await made.stop(name)
        with pytest.raises(UnavailableError, match=r"s-\d: "):
            await made.put(KEYS[20:])


async def test_put_at_hanging_servers_ends_within_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there are."""
    asked: list[str] = []
    put = LmClient.put

    async def noted(
        self: LmClient, chunks: Sequence[Chunk], timeout_s: float | None = None
    ) -> list[bool]:
        asked.append(str(self.server))
        return await put(self, chunks, timeout_s)

    monkeypatch.setattr(LmClient, "put", noted)
    async with cluster(*NAMES, timeout_s=0.2) as made:
        for store in made.stores.values():
            store.gate = asyncio.Event()
        with pytest.raises(UnavailableError):
            await made.put(KEYS[:1])
        assert 1 <= len(asked) <= MAX_PUT_TIMEOUTS
        assert asked == ranked(NAMES, KEYS[0].key.chunk_id())[: len(asked)]
        for store in made.stores.values():
            store.gate.set()


async def test_hanging_server_costs_one_deadline_and_is_then_skipped_for_a_while() -> None:
    async with cluster("s-0", "s-1", timeout_s=2.0) as made:
        await made.put(KEYS)
        made.stores["s-0"].gate = asyncio.Event()
        now = asyncio.get_running_loop().time
        first = await made.got(KEYS)
        assert {part for part in first if isinstance(part, MissReason)} == {MissReason.DEADLINE}
        began = now()
        second = await made.got(KEYS)
        assert now() - began < 0.1, "it was asked again"
        assert [isinstance(part, bytes) for part in second] == [
            made.where(key) == ["s-1"] for key in KEYS
        ]
        made.stores["s-0"].gate.set()
        await asyncio.sleep(REST_INITIAL_S)  # real time: virtual
        assert await made.got(KEYS) == payloads(KEYS)


async def test_lookup_is_asked_before_further_servers() -> None:
    asked: list[int] = []
    is_away = False

    async def locate(keys: Sequence[ChunkKey]) -> list[list[str]]:
        asked.append(len(keys))
        if is_away:
            raise UnavailableError("away")
        return [[*made.where(key), "an unknown server"] for key in keys]

    async with cluster("s-0", "s-1", locate=locate) as made:
        await made.put(KEYS)
        assert not asked
        await made.start("s-2")
        is_away = True
        assert await made.got(KEYS[:5]) == payloads(KEYS[:5]), "the next choices are asked"
        is_away = False
        asked.clear()
        # Now the old homes are beyond the further choices of some chunks.
        await made.start(*(f"s-{i}" for i in range(3, 9)))
        assert await made.got(KEYS[5:]) == payloads(KEYS[5:])
        homes = [home(list(made.stores), key.key.chunk_id()) for key in KEYS[5:]]
        assert asked == [sum(name not in ("s-0", "s-1") for name in homes)]


async def test_two_addresses_of_one_server_are_one_server() -> None:
    async with cluster("s-0") as made:
        made.addresses["the same"] = ServerAddress("localhost", made.addresses["s-0"].port, "")
        await made.members.refresh()
        assert list(made.members.by_name()) == ["s-0"]
        assert all(await made.put(KEYS))


async def test_servers_that_cannot_be_found_at_first_are_found_soon() -> None:
    """Such as storages that start with the engine, and have no addresses yet."""
    async with cluster() as made:
        await made.appear("s-0")
        now = asyncio.get_running_loop().time
        began = now()
        await until(made.members.by_name)
        assert now() - began < REFRESH_S / 2


async def test_server_without_an_address_is_no_home_and_its_connection_ends() -> None:
    async with cluster("s-0", "s-1") as made:
        assert all(await made.put(KEYS[:20]))
        del made.addresses["s-1"]
        await made.members.refresh()
        assert all(await made.put(KEYS[20:]))
        assert {*map(tuple, map(made.where, KEYS[20:]))} == {("s-0",)}
        await until(lambda: made.num_connections("s-1") == 0)
        assert made.num_connections("s-0") == 1


async def test_chunk_that_has_moved_is_found_again() -> None:
    async with cluster("s-0", "s-1", "s-2") as made:
        await made.put(KEYS)
        for key in KEYS:
            first, second, _ = ranked(made.stores, key.key.chunk_id())
            made.stores[second].chunks[key] = made.stores[first].chunks.pop(key)
        assert await made.got(KEYS) == payloads(KEYS)
        for key in KEYS:
            first, second, _ = ranked(made.stores, key.key.chunk_id())
            made.stores[first].chunks[key] = made.stores[second].chunks.pop(key)
        assert await made.got(KEYS) == payloads(KEYS)


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


NAMED = [make_key(i) for i in range(12)]


class ScriptedLookup:
    def __init__(self, held: set[int], degraded: bool = False) -> None:
        self._held = {NAMED[i].key.chunk_id() for i in held}
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
    found = await located(lookup, NAMED[:7])
    assert [bool(names) for names in found] == [True, True, False, True, False, True, True]
    assert found[0] == ["s-1", "s-2"]
    assert lookup.num_questions == 3


async def test_number_of_questions_is_bounded() -> None:
    lookup = ScriptedLookup({0, *range(8, 12)})
    found = await located(lookup, NAMED)
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
    assert await located(ScriptedLookup({0}, degraded=True), NAMED) == [[] for _ in NAMED]
    assert await located(ScriptedLookup(set()), []) == []
