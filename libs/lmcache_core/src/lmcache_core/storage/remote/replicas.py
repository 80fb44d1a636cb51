"""The remote tier over several lm:// servers, each chunk at one of them: its home."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lmcache_core._typing import override
from lmcache_core.concurrency import cancel_and_join
from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result, release_all
from lmcache_core.storage.remote.base import Locate, RemoteBackend
from lmcache_core.storage.remote.members import Member, Members
from lmcache_core.storage.remote.rendezvous import home, ranked
from lmcache_core.storage.sealing import seal_all

MAX_FURTHER_CHOICES = 3
"""Servers other than its home that are asked for a chunk: the ones that would be its home if the
home did not exist, or had not existed.
"""
LOCATE_TIMEOUT_S = 0.25
MAX_PUT_TIMEOUTS = 2
"""Deadlines of a call that a put may take in all, so that the next choice has one of its own where
the home hangs.
"""

_MAY_BE_ELSEWHERE = frozenset(
    {
        MissReason.NEVER_STORED,
        MissReason.EVICTED,
        MissReason.EXPIRED,
        MissReason.UNAVAILABLE,
        MissReason.CORRUPT,
    }
)
_IS_SILENCE = frozenset({MissReason.UNAVAILABLE, MissReason.DEADLINE})


class ReplicatedBackend(RemoteBackend):
    """Chunks in servers that speak lm://. A chunk is put at its home; one that is not there is
    looked for at its next choices.

    A server that does not answer is left alone for a while, and its chunks belong to their next
    choices until then.

    Args:
        members: The servers; opened and closed with this tier.
        locate: Finds chunks that are not at home; without it, or where it does not know, the next
            choices are asked.
    """

    def __init__(self, members: Members, timeout_s: float, locate: Locate | None = None) -> None:
        super().__init__("lm")
        self._timeout_s = timeout_s
        self._members = members
        self._locate = locate
        self._seen = Remembered()
        self._num_found_elsewhere = 0

    @property
    @override
    def keeps_tails(self) -> bool:
        return True

    async def open(self) -> None:
        """Find the servers; those that are unavailable now are found later."""
        await self._members.open()

    async def close(self) -> None:
        """Close all connections."""
        await self._members.close()

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        servers = self._servers()
        places = self._seen.places(keys, servers)
        answers = await whereabouts(servers, keys, places, self._timeout_s)
        found = best_places(
            keys, answers.by_name if len(places) < len(servers) else answers.require_one()
        )
        found |= await self._search(
            keys, [i for i in range(len(keys)) if i not in found], places, servers, self._timeout_s
        )
        for i, name in found.items():
            self._seen.note(keys[i], name, servers)
        return [i in found for i in range(len(keys))]

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        now = asyncio.get_running_loop().time
        deadline = now() + (self._timeout_s if timeout_s is None else timeout_s)
        servers = self._servers()
        results: list[Result] = [Miss(MissReason.UNAVAILABLE)] * len(keys)

        async def read(name: str, at: Sequence[int]) -> None:
            left_s = max(0.0, deadline - now())
            client = servers[name].client
            got = await client.get([keys[i] for i in at], allocate, timeout_s=left_s)
            for i, result in zip(at, got, strict=True):
                results[i] = result
            if all(isinstance(result, Miss) and result.reason in _IS_SILENCE for result in got):
                silent.add(name)

        async def fetch(places: Places) -> Answers[None]:
            answers = await ask(servers, {name: read(name, at) for name, at in places.items()})
            while silent:
                servers[silent.pop()].failed()
            return answers

        silent: set[str] = set()
        try:
            places = self._seen.places(keys, servers)
            answers = await fetch(places)
            if len(places) == len(servers):  # else a silent server may have them
                answers.require_one()
            missing = [
                i
                for i, result in enumerate(results)
                if isinstance(result, Miss) and result.reason in _MAY_BE_ELSEWHERE
            ]
            self._seen.forget(keys[i] for i in missing)
            elsewhere: dict[str, list[int]] = {}
            for i, name in (
                await self._search(keys, missing, places, servers, deadline - now())
            ).items():
                elsewhere.setdefault(name, []).append(i)
                self._seen.note(keys[i], name, servers)
            await fetch(elsewhere)
        except BaseException:
            release_all(results)
            raise
        self._num_found_elsewhere += sum(
            isinstance(results[i], Chunk) for at in elsewhere.values() for i in at
        )
        self._count_got(results)
        return results

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store chunks. Those that their home does not accept, because it is full, shutting down or
        unreachable, go to their next choices, one after the other, while there are any.

        Returns:
            Which are stored: none of those that every server refused.

        Raises:
            UnavailableError: No server has answered.
        """
        await seal_all(chunks)
        servers = self._servers()
        keys = [chunk.key for chunk in chunks]
        stored = [False] * len(chunks)
        asked: list[set[str]] = [set() for _ in chunks]
        failure: UnavailableError | None = None
        has_answer = False
        now = asyncio.get_running_loop().time
        deadline = now() + MAX_PUT_TIMEOUTS * self._timeout_s
        places = homes(keys, range(len(keys)), list(servers))
        while places and (left_s := deadline - now()) > 0:  # each server once for each chunk
            timeout_s = min(self._timeout_s, left_s)
            answers = await self._put(chunks, places, servers, stored, timeout_s)
            failure = answers.failure or failure
            has_answer = has_answer or bool(answers.by_name)
            for name, at in places.items():
                for i in at:
                    asked[i].add(name)
            awake = {name for name, server in servers.items() if not server.is_resting}
            places = {}
            for i in range(len(chunks)):
                if not stored[i] and (choices := awake - asked[i]):
                    places.setdefault(home(list(choices), keys[i].key.chunk_id()), []).append(i)
        if failure is not None and not has_answer:
            raise failure
        self._stored_chunks += sum(stored)
        return stored

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks from all servers: a chunk may be at more than one."""
        servers = self._servers()
        there = await whereabouts(
            servers, keys, dict.fromkeys(servers, range(len(keys))), self._timeout_s
        )
        (
            await ask(
                servers,
                {
                    name: server.client.remove(keys, self._timeout_s)
                    for name, server in servers.items()
                },
            )
        ).require_one()
        self._seen.forget(keys)
        return len({keys[i] for at in there.by_name.values() for i in at})

    @override
    def stats(self) -> dict[str, int]:
        servers = self._members.by_name().values()
        return super().stats() | {
            "num_replicas": len(servers),
            "num_replicas_away": sum(
                server.is_resting or not server.client.is_connected for server in servers
            ),
            "found_elsewhere_chunks": self._num_found_elsewhere,
        }

    def _servers(self) -> Servers:
        """Return the servers to ask now; all of them if none has answered recently."""
        known = self._members.by_name()
        if not known:
            raise UnavailableError("no server of this remote tier has been reached yet")
        return {name: server for name, server in known.items() if not server.is_resting} or known

    async def _put(
        self,
        chunks: Sequence[Chunk],
        places: Places,
        servers: Servers,
        stored: list[bool],
        timeout_s: float,
    ) -> Answers[list[bool]]:
        """Put chunks at these servers, and record in `stored` which were stored."""
        puts = {
            name: servers[name].client.put([chunks[i] for i in at], timeout_s)
            for name, at in places.items()
        }
        answers = await ask(servers, puts)
        for name, taken in answers.by_name.items():
            for i, is_stored in zip(places[name], taken, strict=True):
                stored[i] = is_stored
        return answers

    async def _search(
        self,
        keys: Sequence[ChunkKey],
        missing: Sequence[int],
        asked: Places,
        servers: Servers,
        timeout_s: float,
    ) -> dict[int, str]:
        """Return which other servers hold these chunks: as `locate` reports, or else by asking
        their next choices concurrently.
        """
        if not missing or len(servers) == 1 or timeout_s <= 0:
            return {}
        already = {i: name for name, at in asked.items() for i in at}
        found = await self._located(keys, missing, already, servers)
        choices: dict[str, list[int]] = {}
        for i in missing:
            if i not in found:
                others = [name for name in servers if name != already[i]]
                for name in ranked(others, keys[i].key.chunk_id())[:MAX_FURTHER_CHOICES]:
                    choices.setdefault(name, []).append(i)
        return found | best_places(
            keys, (await whereabouts(servers, keys, choices, timeout_s)).by_name
        )

    async def _located(
        self,
        keys: Sequence[ChunkKey],
        missing: Sequence[int],
        already: dict[int, str],
        servers: Servers,
    ) -> dict[int, str]:
        if self._locate is None:
            return {}
        try:
            async with asyncio.timeout(LOCATE_TIMEOUT_S):
                holders = await self._locate([keys[i] for i in missing])
        except (UnavailableError, TimeoutError):
            return {}
        found = {}
        for i, names in zip(missing, holders, strict=True):
            others = [name for name in names if name in servers and name != already[i]]
            if others:
                found[i] = home(others, keys[i].key.chunk_id())
        return found


MAX_REMEMBERED = 65536
"""Chunks found away from home whose places are remembered."""

T = TypeVar("T")
Servers = Mapping[str, Member]
Places = Mapping[str, Sequence[int]]
"""The chunks of each server: their indices by the server's name."""


@dataclass(frozen=True, slots=True)
class Answers(Generic[T]):
    """The results of asking several servers.

    Attributes:
        failure: Why a server did not answer; None if all did.
    """

    by_name: Mapping[str, T]
    failure: UnavailableError | None

    def require_one(self) -> Mapping[str, T]:
        """Return the answers. Raises `UnavailableError` if no server has answered."""
        if self.failure is not None and not self.by_name:
            raise self.failure
        return self.by_name


async def ask(servers: Servers, questions: Mapping[str, Awaitable[T]]) -> Answers[T]:
    """Ask several servers concurrently. Those that do not answer, or refuse, are left alone for a
    while.
    """
    tasks = {name: asyncio.ensure_future(question) for name, question in questions.items()}
    try:
        if tasks:
            await asyncio.wait(tasks.values())
    finally:
        await cancel_and_join(tasks.values())
    answers: dict[str, T] = {}
    failure: UnavailableError | None = None
    for name, task in tasks.items():
        try:
            answers[name] = task.result()
        except (AuthenticationError, ProtocolError, UnavailableError) as exc:
            servers[name].failed()
            failure = UnavailableError(f"{name}: {exc}")
        else:
            servers[name].answered()
    return Answers(answers, failure)


async def whereabouts(
    servers: Servers, keys: Sequence[ChunkKey], places: Places, timeout_s: float
) -> Answers[Sequence[int]]:
    """Return which chunks are found where they were asked for: their indices, by server."""
    questions = {
        name: servers[name].client.contains([keys[i] for i in at], timeout_s)
        for name, at in places.items()
    }
    answers = await ask(servers, questions)
    present = {
        name: [i for i, is_there in zip(places[name], answer, strict=True) if is_there]
        for name, answer in answers.by_name.items()
    }
    return Answers(present, answers.failure)


def best_places(keys: Sequence[ChunkKey], found: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """Return, for each chunk that some server has, the server with the best score."""
    holders: dict[int, list[str]] = {}
    for name, at in found.items():
        for i in at:
            holders.setdefault(i, []).append(name)
    return {i: home(names, keys[i].key.chunk_id()) for i, names in holders.items()}


class Remembered:
    """Remembers where chunks were seen away from home."""

    def __init__(self) -> None:
        self._places: OrderedDict[ChunkKey, str] = OrderedDict()

    def note(self, key: ChunkKey, name: str, servers: Servers) -> None:
        """Record that a chunk was found at a server."""
        if name == home(list(servers), key.key.chunk_id()):
            self._places.pop(key, None)
            return
        self._places[key] = name
        self._places.move_to_end(key)
        if len(self._places) > MAX_REMEMBERED:
            self._places.popitem(last=False)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Forget the places of chunks that are gone or have moved."""
        for key in keys:
            self._places.pop(key, None)

    def places(self, keys: Sequence[ChunkKey], servers: Servers) -> dict[str, list[int]]:
        """Return where to ask first for each chunk: where it was seen, or at home."""
        names = list(servers)
        found: dict[str, list[int]] = {}
        for i, key in enumerate(keys):
            seen_at = self._places.get(key)
            name = (
                seen_at
                if seen_at is not None and seen_at in servers
                else home(names, key.key.chunk_id())
            )
            found.setdefault(name, []).append(i)
        return found


def homes(
    keys: Sequence[ChunkKey], which: Iterable[int], names: Sequence[str]
) -> dict[str, list[int]]:
    """Return the chunks with these indices, by their homes among these servers."""
    found: dict[str, list[int]] = {}
    for i in which:
        found.setdefault(home(names, keys[i].key.chunk_id()), []).append(i)
    return found
