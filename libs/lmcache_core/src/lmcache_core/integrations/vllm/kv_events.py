"""Tells routers which chunks the pod's sidecar has, as vLLM tells which blocks it has: which
chunks this engine has named are in the arena and on the pod's disk, as the sidecar says, never as
this engine would expect. Imports nothing of vLLM.

Once in `ROUND_S` a thread of its own asks what has changed, and where the changed chunks are now,
and some of the others; the difference from what was announced is published. What it may have
missed, because it was slow or the sidecar has been replaced, makes it ask about all chunks again.
What it cannot know, because the sidecar has not answered for `GONE_S`, it takes back.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.keys import CHUNK_HASH_BYTES, CacheEngineKey, Lane
from lmcache_core.names import DISK_TIER, MEMORY_TIER
from lmcache_core.wire.messages import Changes

logger = logging.getLogger(__name__)

ROUND_S: Final = 0.2
CHECK_ROUNDS: Final = 20
"""Everything announced is asked about again within so many rounds."""
GONE_S: Final = 0.5
"""A sidecar that restarts within this time is not reported as gone."""
MAX_CHUNKS: Final = 1 << 16
"""Chunks that are followed, those named latest; about 2 kB of memory each."""
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
        block_hashes: vLLM's hashes of its blocks, in order.
        parent: That of the block before it; None at the beginning of a prompt.
        token_ids: Its tokens, 4 bytes each.
        context: What else vLLM says of the blocks of such a request.
    """

    block_hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: array[int]
    context: Any


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
        self._chunks: OrderedDict[bytes, AnnouncedChunk] = OrderedDict()
        self._announced: dict[bytes, int] = {}
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
            self._announced.clear()
            self._last = None
        if self._must_forget:
            self._must_forget = False
            self._take_back()
            self._chunks.clear()
        new = self._follow_named()
        answer = self._source.changes(self._last)
        if answer is None:
            self._silent()
            return
        # What has been announced longest ago is asked about again: chunks also expire.
        again = itertools.islice(self._announced, -(-len(self._announced) // CHECK_ROUNDS))
        if answer.is_complete and self._last is not None:
            wanted = dict.fromkeys([*_split(answer.hashes), *new, *again])
            asked = [one for one in wanted if one in self._chunks]
        else:
            asked = list(self._chunks)
        places = self._places(asked)
        if places is None:
            self._last = None  # what has changed is asked again
            self._silent()
            return
        self._last, self._heard_at = answer, self._clock()
        self._announce(zip(asked, places, strict=True))

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

    def _follow_named(self) -> dict[bytes, None]:
        """Describe what was named since the last round; return the hashes of all of it."""
        new: dict[bytes, None] = {}
        while self._named:
            request, hashes, num_known = self._named.popleft()
            names = list(_split(hashes))
            for name in names[:num_known]:
                if name in self._chunks:
                    self._chunks.move_to_end(name)
            described = self._describe(request, num_known, len(names))
            for name, chunk in zip(names[num_known:], described, strict=False):
                self._chunks[name] = chunk
                self._chunks.move_to_end(name)
                new[name] = None
        excess = len(self._chunks) - MAX_CHUNKS
        if excess > 0:
            oldest = [name for name, _ in zip(self._chunks, range(excess), strict=False)]
            self._announce((name, 0) for name in oldest)
            for name in oldest:
                del self._chunks[name]
        return new

    def _places(self, names: Sequence[bytes]) -> list[int] | None:
        """Return where each chunk is; None if the sidecar does not say it of all."""
        keys = [lane.key(name) for lane in self._lanes for name in names]
        if not keys:
            return []
        in_memory = self._source.present(keys, MEMORY_TIER)
        on_disk = self._source.present(keys, DISK_TIER)
        if len(in_memory) < len(keys) or len(on_disk) < len(keys):
            return None
        places = []
        for at in range(len(names)):
            memory, disk = in_memory[at :: len(names)], on_disk[at :: len(names)]
            if all(memory):
                places.append(IN_MEMORY | (ON_DISK if all(disk) else 0))
            else:  # ranks may have their parts in different places: the slower one counts
                places.append(ON_DISK if all(map(max, memory, disk)) else 0)
        return places

    def _announce(self, found: Iterable[tuple[bytes, int]]) -> None:
        events: list[Announcement] = []
        for name, places in found:
            before = self._announced.pop(name, 0)
            if places:
                self._announced[name] = places
            events += (
                Announcement(self._chunks[name], place, bool(places & place))
                for place in (IN_MEMORY, ON_DISK)
                if (before ^ places) & place
            )
        self._publish(events)

    def _take_back(self) -> None:
        self._announce((name, 0) for name in list(self._announced))
        self._last = None

    def _silent(self) -> None:
        if self._clock() - self._heard_at > GONE_S:
            self._take_back()


def _split(hashes: bytes) -> Iterator[bytes]:
    for at in range(0, len(hashes), CHUNK_HASH_BYTES):
        yield hashes[at : at + CHUNK_HASH_BYTES]
