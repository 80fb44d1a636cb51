"""Questions to several servers at once, and where chunks are as the answers tell."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lmcache_core.concurrency import cancel_and_join
from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.storage.remote.members import Member
from lmcache_core.storage.remote.rendezvous import home

MAX_REMEMBERED = 65536
"""Chunks that were found elsewhere than at home, whose place is remembered."""

T = TypeVar("T")
Servers = Mapping[str, Member]
Places = Mapping[str, Sequence[int]]
"""Which of some chunks are a matter of which server: their numbers by its name."""


@dataclass(frozen=True, slots=True)
class Answers(Generic[T]):
    """What came of a round of questions.

    Attributes:
        by_name: Answers, by server.
        failure: Why a server did not answer, if one did not.
    """

    by_name: Mapping[str, T]
    failure: UnavailableError | None

    def require_one(self) -> Mapping[str, T]:
        """The answers. Raises `UnavailableError` when everybody was silent who was asked."""
        if self.failure is not None and not self.by_name:
            raise self.failure
        return self.by_name


async def ask(servers: Servers, questions: Mapping[str, Awaitable[T]]) -> Answers[T]:
    """Ask several servers side by side. Those that do not answer, or refuse, are left alone for
    a while.
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
    """Which chunks are where they are asked for: their numbers, by server."""
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
    """For each chunk that some server has, the one that suits it best."""
    holders: dict[int, list[str]] = {}
    for name, at in found.items():
        for i in at:
            holders.setdefault(i, []).append(name)
    return {i: home(names, keys[i].key.chunk_id()) for i, names in holders.items()}


class Remembered:
    """Where chunks are that are not at home, as far as they have been seen."""

    def __init__(self) -> None:
        self._places: OrderedDict[ChunkKey, str] = OrderedDict()

    def note(self, key: ChunkKey, name: str, servers: Servers) -> None:
        """A chunk was found there."""
        if name == home(list(servers), key.key.chunk_id()):
            self._places.pop(key, None)
            return
        self._places[key] = name
        self._places.move_to_end(key)
        if len(self._places) > MAX_REMEMBERED:
            self._places.popitem(last=False)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """These are gone, or somewhere else."""
        for key in keys:
            self._places.pop(key, None)

    def places(self, keys: Sequence[ChunkKey], servers: Servers) -> dict[str, list[int]]:
        """Where each chunk is asked for first: where it was seen, or at home."""
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
    """The chunks with these numbers, by their homes among these servers."""
    found: dict[str, list[int]] = {}
    for i in which:
        found.setdefault(home(names, keys[i].key.chunk_id()), []).append(i)
    return found
