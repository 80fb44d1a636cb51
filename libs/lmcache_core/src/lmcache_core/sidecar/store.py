"""The engine's chunk store in sidecar mode: no tier of its own, everything goes through the pod's
sidecar.

The sidecar may be absent, hang, be killed or be restarted at any moment. Every call then answers
like an empty cache, and the store reconnects when the sidecar is back. A hanging sidecar costs one
call its deadline; the calls after it cost nothing (`SidecarLink`). A late answer is not waited for
if that costs more than it can save (`SidecarConnection.is_worth`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lmcache_core._typing import override
from lmcache_core.concurrency import Workers
from lmcache_core.errors import IdentityError, LMCacheError, ProtocolError, UnavailableError
from lmcache_core.keys import CacheEngineKey, ChunkChain, Lane
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.names import MEMORY_TIER, documented_tier, tier_name
from lmcache_core.record import Chunk, MissReason, Staged
from lmcache_core.record.chunk_store import ChunkStore, NotLent
from lmcache_core.sidecar.connection import Question, SidecarConnection
from lmcache_core.sidecar.extent import ArenaExtent, lent, loaded_chunk, reserved_extents
from lmcache_core.sidecar.link import SidecarLink
from lmcache_core.sidecar.mapping import ArenaMappings
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, PINNED_BYTES, Counters
from lmcache_core.wire import messages as m

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TURN_S = 0.5
"""Longest wait for other threads' requests before a call proceeds without the cache."""
CALL_MARGIN_S = 0.5
"""Extra time for an answer, beyond the deadline given to the sidecar."""
STEP_SHARE = 8
"""A question that involves no tier may take one part in this many of a tier's deadline: an engine
step waits for it.
"""
CHUNK_S = 0.001
"""Extra time for each chunk of a question to a busy sidecar; that much is not late."""
UNANSWERED = Staged(False, ())
NO_ANSWER = (UnavailableError, ProtocolError)
"""If the connection is lost, it has reported that itself."""

A = TypeVar("A", bound=m.Message)
T = TypeVar("T")


@dataclass(frozen=True)
class _Asked:
    """A question about chunks that was sent without waiting for the answer."""

    connection: SidecarConnection
    question: Question[m.Promise]
    request: m.Stage

    def is_about(self, connection: SidecarConnection, request: m.Stage) -> bool:
        """Return whether it asks the same on that connection. The cost of recomputing may differ:
        its estimate improves over time.
        """
        mine = self.request
        return self.connection is connection and (mine.chains, mine.is_prefix) == (
            request.chains,
            request.is_prefix,
        )


class SidecarChunkStore(ChunkStore):
    """Reaches the tiers of the pod's sidecar. A call waits at most `TURN_S` + `timeout_s` +
    `CALL_MARGIN_S` for them, however many requests it takes.

    Args:
        hello: First message of each connection.
        timeout_s: Longest wait for chunks from the sidecar's tiers.
        counters: Counters for misses.
        workers: Threads that check digests; opened and closed by their owner.
        describe: Given the sidecar's salt, returns how this client names KV; None: the sidecar does
            not learn it.
        loads_beside: Whether one thread loads while another one stores: loads then use a connection
            of their own, since a chunk being lifted from a slow tier keeps its connection busy.
    """

    def __init__(
        self,
        path: Path,
        hello: m.Hello,
        timeout_s: float,
        counters: Counters,
        workers: Workers | None = None,
        describe: Callable[[str], m.Describe] | None = None,
        loads_beside: bool = False,
    ) -> None:
        self._timeout_s = timeout_s
        self._counters = counters
        self._workers = workers or Workers("lmcache-digest")
        self._on_salt: Callable[[str], None] = lambda salt: None
        self._describe = describe
        mappings = ArenaMappings()
        counters.watch(PINNED_BYTES, lambda: mappings.num_pinned_bytes)
        self._link = SidecarLink(path, hello, timeout_s, self._greeted, self._lost, mappings)
        self._load_link = (
            SidecarLink(path, hello, timeout_s, lambda connection: None, self._lost, mappings)
            if loads_beside
            else self._link
        )
        # What a link has lent is returned through that link.
        self._links = (self._link, self._load_link) if loads_beside else (self._link,)
        self._step_s = timeout_s / STEP_SHARE
        self._deadline_ms = _milliseconds(timeout_s)
        self._asked: dict[str, _Asked] = {}

    @override
    def open(self, on_salt: Callable[[str], None]) -> None:
        self._on_salt = on_salt
        for link in self._links:
            link.open()

    @override
    def close(self) -> None:
        for link in self._links:
            link.close()

    @override
    def pin_memory(self, device: torch.device) -> None:
        for link in self._links:
            link.pin_memory(device)

    @override
    def is_worth(self, saving_s: float) -> bool:
        connection = self._link.connection
        return connection is not None and connection.is_worth(saving_s)

    @override
    def lookup(self, keys: Sequence[CacheEngineKey], search_range: Sequence[str] | None) -> int:
        num_prefix = 0
        connection = self._link.connection
        if connection is None or search_range == []:
            return 0
        deadline = time.monotonic() + self._timeout_s
        for batch in _batches(keys):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            tiers = tuple(documented_tier(tier) for tier in search_range or ())
            request = m.Lookup(connection.names(batch), tiers, _milliseconds(left_s))
            if search_range is not None and set(search_range) <= {MEMORY_TIER}:
                answer = self._ask_in_step(connection, request, m.ContainsOk, len(batch))
            else:
                answer = _ask(connection, request, m.ContainsOk, left_s + CALL_MARGIN_S)
            if answer is None:
                break
            found = answer.present[: len(batch)]
            num_found = next((i for i, there in enumerate(found) if not there), len(found))
            num_prefix += num_found
            if num_found < len(batch):
                break
        return num_prefix

    def contains(self, keys: Sequence[CacheEngineKey]) -> list[bool]:
        """Return whether each chunk is in some tier; those about which the sidecar does not answer
        are not. Waits up to `timeout_s` for other requests on the connection, and as long again
        for the answer.
        """
        present = self.present(keys)
        return present + [False] * (len(keys) - len(present))

    def present(self, keys: Sequence[CacheEngineKey], tier: str | None = None) -> list[bool]:
        """Return whether each chunk is in a tier, by default in any, as far as the sidecar answers:
        the list may be shorter. Waits as `contains` does.
        """
        present: list[bool] = []
        connection = self._link.connection
        deadline = time.monotonic() + self._timeout_s
        tiers = () if tier is None else (documented_tier(tier),)
        if connection is not None:
            for batch in _batches(keys):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                wait_s = left_s + CALL_MARGIN_S
                request = m.Lookup(connection.names(batch), tiers, _milliseconds(left_s))
                answer = _ask(connection, request, m.ContainsOk, wait_s, wait_s)
                if answer is None or len(answer.present) < len(batch):
                    break
                present += answer.present[: len(batch)]
        return present

    def changes(self, since: m.Changes | None) -> m.Changes | None:
        """Return which chunks have come or gone in the sidecar's tiers since an earlier answer;
        None if it does not answer.
        """
        connection = self._link.connection
        if connection is None:
            return None
        watch = m.Watch() if since is None else m.Watch(since.log, since.place)
        return _ask(connection, watch, m.Changes, self._timeout_s)

    @override
    def prefetch(self, keys: Sequence[CacheEngineKey]) -> None:
        connection = self._link.connection
        if connection is not None:
            for batch in _batches(keys):
                _ask(connection, m.Prefetch(connection.names(batch)), m.Ok)

    @override
    def stage(
        self,
        ticket: str,
        chains: Sequence[ChunkChain],
        *,
        is_prefix: bool = True,
        recompute_s: float | None = None,
        wait_s: float | None = None,
        saving_s: float = 0.0,
        source: str | None = None,
    ) -> Staged | None:
        if len(chains) > m.MAX_CHAINS:
            raise ValueError(f"{len(chains)} chains in one question; the limit is {m.MAX_CHAINS}")
        connection = self._link.connection
        if connection is None:
            self._asked.pop(ticket, None)
            return None
        asked = _fitted_chains(chains)
        request = self._stage_request(connection, ticket, asked, is_prefix, recompute_s, source)
        if request is None:
            return None
        if wait_s is None:
            if not connection.say_unstaged():
                return None
            answer = _ask(connection, request, m.Promise, self._step_s, self._step_s)
        else:
            known = self._send_stage(connection, ticket, request, saving_s)
            if known is None:
                return None
            answer = None
            with contextlib.suppress(*NO_ANSWER):
                answer = connection.answer_to(
                    known.question, wait_s if connection.is_quick else 0.0
                )
            if answer is None and connection.is_open:
                return self._unanswered(ticket, known, saving_s)
            del self._asked[ticket]
        staged = None if answer is None else _staged(answer, asked, chains)
        if answer is not None and staged is None:
            connection.give_up("the sidecar answered STAGE for other chunks")
        return staged

    @override
    def unstage(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self._asked.pop(ticket, None)
        connection = self._link.connection
        if connection is not None:  # tickets belong to a connection
            connection.unstage([*map(_fitted_ticket, tickets)])

    @override
    def reserve(
        self, keys: Sequence[CacheEngineKey], shapes: Sequence[Sequence[int]], dtype: str
    ) -> list[MemoryObj | NotLent]:
        connection = self._link.connection
        extents: list[MemoryObj | NotLent] = []
        while connection is not None and len(extents) < len(shapes):
            batch = slice(len(extents), len(extents) + m.MAX_NAMES)
            given = self._reserve_batch(connection, keys[batch], shapes[batch], dtype)
            if not given:
                break
            extents += given
        return extents + [NotLent.NO_ROOM] * (len(shapes) - len(extents))

    @property
    @override
    def instance(self) -> str:
        connection = self._link.connection
        return "" if connection is None else connection.welcome.server

    @property
    @override
    def needs_digests(self) -> bool:
        return True  # every chunk leaves this process

    @override
    def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        stored: list[bool] = []
        for at in range(0, len(chunks), m.MAX_NAMES):
            batch = chunks[at : at + m.MAX_NAMES]
            extents = lent([chunk.memory for chunk in batch])
            assert len(extents) == len(batch), "each chunk is put once, in this store's memory"
            commit = m.Commit(
                tuple(
                    (extent.handle, chunk.head)
                    for extent, chunk in zip(extents, batch, strict=True)
                )
            )
            begin = time.monotonic()
            answer = self._return(extents, commit, m.ContainsOk)
            connection = extents[0].connection
            connection.took(time.monotonic() - begin - len(batch) * CHUNK_S)
            if answer is not None and len(answer.present) != len(batch):
                connection.give_up("the sidecar answered COMMIT for another number of chunks")
                answer = None
            stored += [False] * len(batch) if answer is None else answer.present
        return stored

    @override
    def get(
        self,
        keys: Sequence[CacheEngineKey],
        recompute_s: float | None = None,
        check_later: bool = False,
    ) -> list[Chunk]:
        connection = self._load_link.connection
        chunks: list[Chunk] = []
        reason: str = MissReason.UNAVAILABLE
        deadline = time.monotonic() + self._timeout_s
        while connection is not None and len(chunks) < len(keys):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                reason = MissReason.DEADLINE
                break
            batch = keys[len(chunks) : len(chunks) + m.MAX_NAMES]
            good, reason = self._load(connection, batch, left_s, recompute_s, check_later)
            chunks += good
            if len(good) < len(batch):
                break
        if len(chunks) < len(keys):
            self._counters.add(MISSED_CHUNKS_TOTAL, len(keys) - len(chunks), reason)
        return chunks

    @override
    def reject(self, chunk: Chunk) -> None:
        # The sidecar checks for itself, and stops serving the chunk if it is damaged.
        logger.warning(
            "chunk in the sidecar's arena is damaged, recomputing it: chunk=%s",
            chunk.key.key.chunk_hash,
        )
        extent = chunk.memory
        if isinstance(extent, ArenaExtent) and extent.is_lent:
            _ask(extent.connection, m.Reject((extent.handle,)), m.Ok, self._step_s)

    @override
    def forget(self, keys: Sequence[CacheEngineKey]) -> None:
        pass  # the sidecar evicts them itself

    @override
    def holds(self, chunks: Sequence[Chunk]) -> bool:
        connections = {extent.connection for extent in lent([one.memory for one in chunks])}
        return all(one.is_open and not one.has_ended for one in connections)

    @override
    def release(self, chunks: Sequence[Chunk]) -> bool:
        return self._give_back(lent([chunk.memory for chunk in chunks]))

    @override
    def abort(self, memories: Sequence[MemoryObj]) -> None:
        self._give_back(lent(memories))

    @override
    def stats(self) -> dict[str, dict[str, int]]:
        connection = self._link.connection
        answer = None if connection is None else _ask(connection, m.Stats(), m.StatsOk)
        return {} if answer is None else {tier_name(name): n for name, n in answer.stats.items()}

    def _stage_request(
        self,
        connection: SidecarConnection,
        ticket: str,
        chains: Sequence[ChunkChain],
        is_prefix: bool,
        recompute_s: float | None,
        source: str | None,
    ) -> m.Stage | None:
        m.check_chains(chains)
        try:
            runs = tuple(
                (
                    connection.lane_number(
                        Lane(chain.fmt, chain.model_name, chain.world_size, 0, chain.group)
                    ),
                    chain.hashes,
                )
                for chain in chains
            )
        except (IdentityError, UnavailableError) as exc:
            logger.debug("ticket not asked for: error=%s", exc)
            return None
        fields = (
            _fitted_ticket(ticket),
            runs,
            is_prefix,
            self._deadline_ms,
            _microseconds(recompute_s),
        )
        return m.Stage(*fields) if source is None else m.Expect(*fields, source)

    def _send_stage(
        self, connection: SidecarConnection, ticket: str, request: m.Stage, saving_s: float
    ) -> _Asked | None:
        """Send a question unless the same one is on its way; None if it is not worth it or cannot
        be sent.
        """
        known = self._asked.get(ticket)
        if known is not None and known.is_about(connection, request):
            return known
        self._asked.pop(ticket, None)
        # A released ticket may be asked for again: the sidecar must receive both in that order.
        may_ask = connection.is_worth(saving_s) and connection.say_unstaged()
        question = _send(connection, request, m.Promise) if may_ask else None
        if question is None:
            return None
        self._asked[ticket] = _Asked(connection, question, request)
        return self._asked[ticket]

    def _unanswered(self, ticket: str, asked: _Asked, saving_s: float) -> Staged | None:
        """Wait for the answer to a question, or proceed without it."""
        connection = asked.connection
        waited_s = time.monotonic() - asked.question.sent_at
        if waited_s <= connection.patience_s(saving_s):
            if connection.is_quick:
                connection.took(waited_s)
            return UNANSWERED
        del self._asked[ticket]
        connection.wasted(waited_s)
        return None

    def _ask_in_step(
        self, connection: SidecarConnection, request: m.Message, expected: type[A], num_chunks: int
    ) -> A | None:
        """Ask a question that a step waits for, and record how long it took; None without an
        answer.
        """
        begin = time.monotonic()
        answer = _ask(connection, request, expected, self._step_s + num_chunks * CHUNK_S)
        connection.took(time.monotonic() - begin - num_chunks * CHUNK_S)
        return answer

    def _greeted(self, connection: SidecarConnection) -> None:
        """Prepare a connection before any other use."""
        salt = connection.arena_info.salt
        self._on_salt(salt)
        took_s = connection.greeting_s
        if self._describe is not None:
            begin = time.monotonic()
            connection.call(self._describe(salt), m.Ok)
            took_s = time.monotonic() - begin
        connection.took(took_s)

    def _lost(self, connection: SidecarConnection, cause: LMCacheError, cost_s: float) -> None:
        """Report the loss to all links: a sidecar that is gone has closed the other connections,
        too. They reconnect immediately, not at their next call.
        """
        for link in self._links:
            link.lost(connection, cause, cost_s)
            current = link.connection
            if current is not None and current.has_ended:
                current.close()
                link.lost(current, cause, 0.0)

    def _reserve_batch(
        self,
        connection: SidecarConnection,
        keys: Sequence[CacheEngineKey],
        shapes: Sequence[Sequence[int]],
        dtype: str,
    ) -> list[MemoryObj | NotLent]:
        sizes = tuple(num_bytes(shape, dtype) for shape in shapes)
        request = m.ReserveExtents(sizes, connection.names(keys))
        extents: list[MemoryObj | NotLent] = []
        connection.hold(len(sizes))
        try:
            answer = self._ask_in_step(connection, request, m.Extents, len(sizes))
            if answer is None:
                return []
            given = reserved_extents(connection, answer.items, shapes, dtype)
            if given is None:
                connection.give_up(
                    "the sidecar answered RESERVE with memory that was not requested or does not"
                    " exist"
                )
                return []
            extents = given
        finally:
            connection.release(
                len(sizes) - sum(not isinstance(extent, NotLent) for extent in extents)
            )
        return extents

    def _load(
        self,
        connection: SidecarConnection,
        keys: Sequence[CacheEngineKey],
        left_s: float,
        recompute_s: float | None,
        check_later: bool,
    ) -> tuple[list[Chunk], str]:
        request = m.LoadExtents(
            connection.names(keys), _milliseconds(left_s), _microseconds(recompute_s)
        )
        good: list[Chunk] = []
        connection.hold(len(keys))
        try:
            limit_s = left_s if recompute_s is None else min(left_s, recompute_s * len(keys))
            answer = _ask(connection, request, m.Extents, limit_s + CALL_MARGIN_S)
            if answer is None:
                return good, MissReason.UNAVAILABLE
            reason: str = MissReason.NEVER_STORED
            for key, item in zip(keys, answer.items, strict=False):
                if isinstance(item, str):
                    is_known = item in MissReason.__members__.values()
                    reason = item if is_known else MissReason.UNAVAILABLE
                    break
                chunk = loaded_chunk(connection, key, item)
                if chunk is None:
                    reason = MissReason.CORRUPT
                    break
                good.append(chunk)
            if check_later:
                good = [
                    chunk.unchecked() if connection.verifier.chooses() else chunk for chunk in good
                ]
            else:
                num_intact = connection.verifier.num_intact(good, self._workers)
                if num_intact < len(good):
                    self.reject(good[num_intact])
                    good, reason = good[:num_intact], MissReason.CORRUPT
            unused = tuple(
                item.id for item in answer.items[len(good) :] if isinstance(item, m.Extent)
            )
            if unused:
                _ask(connection, m.DoneWith(unused), m.Ok, self._step_s)
        finally:
            connection.release(len(keys) - len(good))
        return good, reason

    def _give_back(self, extents: Sequence[ArenaExtent]) -> bool:
        answers = [
            self._return(batch, m.DoneWith(tuple(extent.handle for extent in batch)), m.Ok)
            for batch in _batches(extents)
        ]
        return all(answer is not None for answer in answers)

    def _return(
        self, extents: Sequence[ArenaExtent], request: m.Message, expected: type[A]
    ) -> A | None:
        """Return lent memory by a request or, if that cannot be delivered, by closing the
        connection.
        """
        connection = extents[0].connection
        limit_s = self._step_s + len(extents) * CHUNK_S
        answer = _ask(connection, request, expected, limit_s, self._timeout_s)
        if answer is None:
            connection.give_up(f"could not deliver {request.frame_type.name}")
        for extent in extents:
            extent.end()
        return answer


def _ask(
    connection: SidecarConnection,
    request: m.Message,
    expected: type[A],
    timeout_s: float | None = None,
    turn_s: float = TURN_S,
) -> A | None:
    """Call `SidecarConnection.call`; return None if no answer arrives, for any reason."""
    with contextlib.suppress(*NO_ANSWER):
        return connection.call(request, expected, timeout_s, turn_s)
    return None


def _send(
    connection: SidecarConnection, request: m.Message, expected: type[A]
) -> Question[A] | None:
    with contextlib.suppress(*NO_ANSWER):
        return connection.send(request, expected)
    return None


def _batches(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[at : at + m.MAX_NAMES] for at in range(0, len(items), m.MAX_NAMES)]


def _milliseconds(left_s: float) -> int:
    return max(1, int(left_s * 1000))


def _microseconds(recompute_s: float | None) -> int:
    return 0 if recompute_s is None else max(1, min(int(recompute_s * 1e6), m.MAX_RECOMPUTE_US))


def _staged(
    answer: m.Promise, asked: Sequence[ChunkChain], chains: Sequence[ChunkChain]
) -> Staged | None:
    """Return what is staged of these chains; None if the answer does not match the question.

    Args:
        asked: The question: a prefix of each chain. The rest counts as absent.
    """
    if [len(tiers) for tiers in answer.tiers] != [chain.num_chunks for chain in asked]:
        return None
    tiers = tuple(
        tiers.ljust(chain.num_chunks, b"\0")
        for tiers, chain in zip(answer.tiers, chains, strict=True)
    )
    return Staged(answer.is_ready, tiers)


def _fitted_chains(chains: Sequence[ChunkChain]) -> tuple[ChunkChain, ...]:
    """Return prefixes of these chains, equally many chunks of each, that fit into one request."""
    num_keys = sum(chain.num_chunks * chain.world_size for chain in chains)
    if num_keys <= m.MAX_STAGE_KEYS:
        return tuple(chains)
    num_chunks = m.MAX_STAGE_KEYS // sum(chain.world_size for chain in chains)
    return tuple(chain.part(0, num_chunks) for chain in chains)


def _fitted_ticket(ticket: str) -> str:
    """Return the ticket's name, shortened to fit into a request; serving engines accept request ids
    of any length from their users.
    """
    if 0 < len(ticket) <= m.MAX_TICKET_NAME_CHARS and ticket.isascii():
        return ticket
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).hexdigest()
