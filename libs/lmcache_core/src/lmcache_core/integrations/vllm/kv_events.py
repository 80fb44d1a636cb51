"""Tells routers which chunks the pod's sidecar has, as vLLM tells which blocks it has: which
chunks this engine has named are in the arena and on the pod's disk, as the sidecar says, never as
this engine would expect. Imports nothing of vLLM.

Once in `ROUND_S` a thread of its own asks what has changed, and where the changed chunks are now,
and some of the others; the difference from what was announced is published. What it may have
missed, because it was slow or the sidecar has been replaced, makes it ask about all chunks again.
What it cannot know, because the sidecar has not answered for `GONE_S`, it takes back.

Some routers ignore a chunk if they do not know the one before it in its prompt. So chunks are
announced from the beginning of prompts on, and one without the chunk before it is announced again
once that is there. Some count references: what is announced is taken back first.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.keys import CacheEngineKey, Lane, each_hash
from lmcache_core.names import DISK_TIER, MEMORY_TIER
from lmcache_core.wire.messages import Changes

logger = logging.getLogger(__name__)
T = TypeVar("T")

ROUND_S: Final = 0.2
CHECK_ROUNDS: Final = 20
"""Everything announced is asked about again within so many rounds."""
GONE_S: Final = 0.5
"""A sidecar that restarts within this time is not reported as gone."""
MAX_CHUNKS: Final = 1 << 16
"""Chunks that are followed, those named latest; about 2 kB of memory each."""
SLICE, ASKED_SLICE, PAUSE_S = 16, 512, 1e-4
"""Chunks that are described or published, and those that are asked about, before the thread pauses
so long: it shares the GIL with the engine's steps, which would wait for it.
"""
MAX_NAMED: Final = 1 << 14
"""Requests that may wait to be described while the sidecar does not answer."""
IN_MEMORY, ON_DISK = 1, 2
"""Where a chunk is, for all ranks; it may be in both places."""


class Source(Protocol):
    """What the sidecar says; see `SidecarChunkStore`."""

    def changes(self, since: Changes | None) -> Changes | None:
        """Return which chunks have come or gone."""

    def present(self, keys: Sequence[CacheEngineKey], tier: str | None = None) -> list[bool]:
        """Return whether each chunk is in a tier, as far as it is known."""


@dataclass(frozen=True, slots=True)
class AnnouncedChunk:
    """A chunk as routers are told of it: in vLLM's blocks.

    Attributes:
        block_hashes: What routers know its blocks by, in order.
        parent: The same of the block before it; None at the beginning of a prompt.
        token_ids: Its tokens, 4 bytes each.
        context: What else vLLM says of the blocks of such a request.
    """

    block_hashes: tuple[Any, ...]
    parent: Any
    token_ids: array[int]
    context: Any


@dataclass(frozen=True, slots=True)
class _Followed:
    """A chunk, its number in its prompt, and the name of the chunk before it."""

    chunk: AnnouncedChunk
    number: int
    before: bytes | None


@dataclass(frozen=True, slots=True)
class Announcement:
    """That a place has a chunk now, or has it no more."""

    chunk: AnnouncedChunk
    place: int
    is_here: bool


class KVEvents:
    """Follows the chunks that an engine names.

    Args:
        source: Used by the thread alone.
        lanes: The keys of a chunk: one lane for each rank.
        describe: Returns the chunks `[first, last)` of a request as routers are told of them.
        publish: Called by the thread, with what to tell them; without news, with nothing.
        guard: Ends the thread at an unexpected error, instead of the engine.
    """

    def __init__(
        self,
        source: Source,
        lanes: Sequence[Lane],
        describe: Callable[[Any, int, int], Iterable[AnnouncedChunk]],
        publish: Callable[[Sequence[Announcement]], None],
        guard: DegradingGuard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._lanes = tuple(lanes)
        self._describe = describe
        self._publish = publish
        self._guard = guard
        self._clock = clock
        self._named: deque[tuple[Any, bytes, int]] = deque(maxlen=MAX_NAMED)
        self._chunks: OrderedDict[bytes, _Followed] = OrderedDict()
        self._announced: dict[bytes, int] = {}
        # Those of them that were announced without the chunk before them.
        self._orphans: set[bytes] = set()
        # Named, and not asked about yet.
        self._new: dict[bytes, None] = {}
        self._last: Changes | None = None
        self._heard_at = clock()
        self._is_cleared = False
        self._must_forget = False
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="lmcache-kv-events", daemon=True)

    def open(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """Stop. What was announced stays announced: routers forget an engine that has ended."""
        self._is_closed = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def named(self, request: Any, hashes: bytes, num_known: int) -> None:
        """Note the names of a request's chunks, packed, of which it had `num_known` before. Called
        in a step, by any thread: all work is done later.
        """
        self._named.append((request, hashes, num_known))

    def cleared(self) -> None:
        """Note that routers were told to forget every block of this engine. From any thread."""
        self._is_cleared = True

    def forget(self) -> None:
        """Take back everything: no chunk named so far will be loaded again. From any thread."""
        self._must_forget = True

    def round(self) -> None:
        """Publish what has changed since the last round."""
        if self._is_cleared:
            self._is_cleared = False
            # Routers may have been told of some of it since: it stays to be taken back.
            announced, self._announced = self._announced, {}
            self._orphans.clear()
            self._announce(announced)
        if self._must_forget:
            self._must_forget = False
            self._take_back()
            self._chunks.clear()
        self._follow_named()
        answer = self._source.changes(self._last)
        if answer is None:
            self._silent()
            return
        # What has been announced longest ago is asked about again: chunks also expire.
        again = itertools.islice(self._announced, -(-len(self._announced) // CHECK_ROUNDS))
        if answer.is_complete and self._last is not None:
            wanted = dict.fromkeys([*each_hash(answer.hashes), *self._new, *again])
            asked = [one for one in wanted if one in self._chunks]
        else:
            asked = list(self._chunks)
        places = self._places(asked)
        if places is None:
            self._last = None  # what has changed is asked again
            self._silent()
            return
        self._last, self._heard_at = answer, self._clock()
        self._new.clear()
        self._announce(dict(zip(asked, places, strict=True)))

    def _run(self) -> None:
        has_failed = True
        with self._guard("kv_events"):
            while not self._is_closed:
                self._wake.wait(ROUND_S)
                self.round()
            has_failed = False
        if has_failed:
            logger.error("routers are told nothing more of the cache")
            with self._guard("kv_events"):
                self._take_back()

    def _follow_named(self) -> None:
        """Describe what was named since the last round."""
        while self._named:
            request, hashes, num_known = self._named.popleft()
            names = each_hash(hashes)
            for name in names[:num_known]:
                if name in self._chunks:
                    self._chunks.move_to_end(name)
            described = self._in_slices(self._describe(request, num_known, len(names)), SLICE)
            for number, chunk in enumerate(itertools.chain.from_iterable(described), num_known):
                name = names[number]
                self._chunks[name] = _Followed(chunk, number, names[number - 1] if number else None)
                self._chunks.move_to_end(name)
                self._new[name] = None
        excess = len(self._chunks) - MAX_CHUNKS
        if excess > 0:
            oldest = [name for name, _ in zip(self._chunks, range(excess), strict=False)]
            self._announce(dict.fromkeys(oldest, 0))
            for name in oldest:
                del self._chunks[name]
                self._new.pop(name, None)

    def _places(self, names: Sequence[bytes]) -> list[int] | None:
        """Return where each chunk is; None if the sidecar does not say it of all."""
        places: list[int] = []
        for some in self._in_slices(names, ASKED_SLICE):
            keys = [lane.key(name) for lane in self._lanes for name in some]
            in_memory = self._source.present(keys, MEMORY_TIER)
            on_disk = self._source.present(keys, DISK_TIER)
            if len(in_memory) < len(keys) or len(on_disk) < len(keys):
                return None
            for at in range(len(some)):
                memory, disk = in_memory[at :: len(some)], on_disk[at :: len(some)]
                if all(memory):
                    places.append(IN_MEMORY | (ON_DISK if all(disk) else 0))
                else:  # ranks may have their parts in different places: the slower one counts
                    places.append(ON_DISK if all(map(max, memory, disk)) else 0)
        return places

    def _announce(self, found: Mapping[bytes, int]) -> None:
        """Publish where these chunks are, as far as it differs from what was announced."""
        events: list[Announcement] = []
        has_begun = False
        for name in sorted(found, key=lambda name: self._chunks[name].number):
            followed, places = self._chunks[name], found[name]
            before = self._announced.pop(name, 0)
            if places:
                self._announced[name] = places
            else:
                self._orphans.discard(name)
            if places & ~before and not self._follows_on(followed):
                self._orphans.add(name)
            has_begun |= bool(places and not before)
            events += _differences(followed.chunk, before, places)
        if has_begun and self._orphans:
            for name in sorted(self._orphans, key=lambda name: self._chunks[name].number):
                followed, places = self._chunks[name], self._announced[name]
                if self._follows_on(followed):
                    self._orphans.remove(name)
                    events += _differences(followed.chunk, 0, places)
        if not events:
            self._publish([])
        for some in self._in_slices(events, SLICE):
            self._publish(some)

    def _in_slices(self, items: Iterable[T], size: int) -> Iterator[list[T]]:
        rest = iter(items)
        while some := list(itertools.islice(rest, size)):
            yield some
            if len(some) == size:
                self._wake.wait(PAUSE_S)

    def _follows_on(self, followed: _Followed) -> bool:
        """Return whether routers know the chunk before this one."""
        before = followed.before
        return before is None or (before in self._announced and before not in self._orphans)

    def _take_back(self) -> None:
        self._announce(dict.fromkeys(self._announced, 0))
        self._last = None

    def _silent(self) -> None:
        if self._clock() - self._heard_at > GONE_S:
            self._take_back()


def _differences(chunk: AnnouncedChunk, before: int, now: int) -> Iterator[Announcement]:
    """Take a chunk back before it is announced: a router that counts references may still have one
    of an engine that ran here before, or may have missed that it has gone.
    """
    for place in (IN_MEMORY, ON_DISK):
        if (before ^ now) & place:
            yield Announcement(chunk, place, is_here=False)
            if now & place:
                yield Announcement(chunk, place, is_here=True)
