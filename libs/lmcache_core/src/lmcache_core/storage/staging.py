"""Staging: a request announces early what it is going to load, under a ticket. Hot chunks are held
for it from then on, and the rest is lifted from slower tiers while the request waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from lmcache_core.keys import TAIL, ChunkChain, ChunkKey
from lmcache_core.names import DISK_TIER, MEMORY_TIER, PEER_TIER, STORAGE_TIER
from lmcache_core.record import Chunk, Staged, StagedFrom
from lmcache_core.storage.expected import EXPECTED_FROM, EXPECTED_S
from lmcache_core.storage.stack import TierStack

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields at safe preemption points. State read before a yield may be stale after
it; closing the generator at a yield releases everything that it holds.
"""
MAX_TICKETS = 4096
STAGE_LEASE_S = 120.0
"""Time after the client's last query at which a ticket is forgotten."""
SWEEP_INTERVAL_S = 5.0
"""How often an owner calls `expire`."""
HOT_BLOCK_KEYS = 512
"""Chunks taken or released in one step."""
LIFT_BLOCK_KEYS = 4096
"""Keys looked up together: if little of a long chain is stored, the rest costs nothing."""
PROBE_SHARE = 2
"""Locating chunks may take one part in this many of a lift's time: if a tier hangs, time is left to
read from the others.
"""
STAGED_SHARE = 2
"""Staged chunks may hold one part in this many of the host memory; the rest is for stores, loads
and lifts.
"""
MAX_LIFTS = 64
AGAIN_S = 0.02
"""Time after which chunks that are still to come are looked for again."""

_CODES = MappingProxyType(
    {
        MEMORY_TIER: StagedFrom.HOT,
        DISK_TIER: StagedFrom.DISK,
        PEER_TIER: StagedFrom.PEER,
        STORAGE_TIER: StagedFrom.REMOTE,
    }
)


StartLift = Callable[[Coroutine[Any, Any, None]], bool]


class ChunkBudget:
    """Bounds the memory of chunks held for tickets, and the number of concurrent lifts. A chunk
    held several times counts once. Thread-safe.

    Attributes:
        lifts: Semaphore that each lift holds.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._num_holders: dict[int, int] = {}
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.lifts = threading.Semaphore(MAX_LIFTS)

    def take(self, chunks: Sequence[Chunk], unit: int) -> int:
        """Count chunks as held, as many from the first as there is room for.

        Args:
            chunks: The caller owns their references, and keeps them as long as they are counted
                here.
            unit: Number of consecutive chunks that are taken together or not at all.

        Returns:
            The number of units taken.
        """
        num_holders = self._num_holders
        with self._lock:
            for at in range(0, len(chunks), unit):
                together = chunks[at : at + unit]
                for chunk in together:
                    name = id(chunk.memory)
                    if name not in num_holders:
                        num_holders[name] = 0
                        self.used_bytes += chunk.memory.metadata.phy_size
                    num_holders[name] += 1
                if self.used_bytes > self.max_bytes:
                    self._forget(together)
                    return at // unit
        return len(chunks) // unit

    def give(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Undo `take` and return the chunks that are no longer held."""
        with self._lock:
            return self._forget(chunks)

    def _forget(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        num_holders = self._num_holders
        unheld = []
        for chunk in chunks:
            name = id(chunk.memory)
            num_left = num_holders[name] - 1
            if num_left:
                num_holders[name] = num_left
            else:
                del num_holders[name]
                self.used_bytes -= chunk.memory.metadata.phy_size
                unheld.append(chunk)
        return unheld


class StagedChain:
    """One chain of a ticket, and the tail that is asked for with it, as its last chunk: a tail is
    of use behind the whole chain only, and one question to each tier is enough for both.

    Attributes:
        num_whole: Number of chunks without the tail.
        tiers: A `StagedFrom` for each chunk, 0 while it is not held.
    """

    def __init__(self, tenant: str, chain: ChunkChain, tail: ChunkChain | None = None) -> None:
        self.num_ranks = chain.world_size
        self.num_whole = chain.num_chunks
        self._tenant = tenant
        self._chain = chain
        self._tail = tail or chain.part(0, 0)
        self.tiers = bytearray(self.num_whole + self._tail.num_chunks)

    def names_of(self, numbers: Sequence[int]) -> list[ChunkKey]:
        """Return the names of these chunks, in ascending order, the ranks of one chunk together."""
        start, end = numbers[0], numbers[-1] + 1
        names = self._chain.part(start, end).chunk_keys(self._tenant)
        if end > self.num_whole:
            of_tail = self._tail.part(max(0, start - self.num_whole), end - self.num_whole)
            names += of_tail.chunk_keys(self._tenant)
        if len(numbers) == end - start:
            return names
        num_ranks = self.num_ranks
        return [
            name
            for i in numbers
            for name in names[(i - start) * num_ranks : (i - start + 1) * num_ranks]
        ]

    def blocks(self, numbers: Sequence[int], num_keys: int) -> Iterator[Sequence[int]]:
        """Split these chunks into blocks of about `num_keys` keys."""
        step = max(1, num_keys // self.num_ranks)
        return (numbers[at : at + step] for at in range(0, len(numbers), step))


class StageTicket:
    """A staging request: its chains, what is known about them, and the chunks held for it."""

    def __init__(
        self,
        tenant: str,
        chains: Sequence[ChunkChain],
        is_prefix: bool,
        source: str | None = None,
    ) -> None:
        self.asked = (tuple(chains), is_prefix)
        self.is_prefix = is_prefix
        self.source = source
        heads = _heads_of_tails(chains)
        tails = {head: chains[i] for i, head in heads.items()}
        staged = {
            i: StagedChain(tenant, chain, tails.get(i))
            for i, chain in enumerate(chains)
            if i not in heads
        }
        self.chains = list(staged.values())
        self._answers = [(staged[heads.get(i, i)], i in heads) for i in range(len(chains))]
        self.held: list[Chunk] = []
        self.is_ready = True
        self.is_over = False
        self.last_asked_at = 0.0

    def staged(self) -> Staged:
        """Return the current answer."""
        tiers = (
            chain.tiers[chain.num_whole :] if is_tail else chain.tiers[: chain.num_whole]
            for chain, is_tail in self._answers
        )
        return Staged(self.is_ready, tuple(map(bytes, tiers)))


class Stager:
    """The tickets of one client. Thread-safe; no call waits for a tier.

    Each operation is a generator of steps of at most a few hundred chunks each. `run` takes all
    steps in a row; `run_cooperatively` yields to the event loop between them.

    Args:
        room: Budget shared with other clients.
        start_lift: Runs a lift on the stack's event loop; False if it will not, and has closed the
            coroutine.
        clock: Seconds, for the age of tickets.

    Attributes:
        may_lift: Set to False to stage only hot chunks from now on.
        most_bytes: Size of the largest payload that the client can use; larger ones are not lifted.
            None: unknown.
    """

    def __init__(
        self,
        stack: TierStack,
        tenant: str,
        room: ChunkBudget,
        start_lift: StartLift,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack = stack
        self._tenant = tenant
        self._room = room
        self._start_lift = start_lift
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: OrderedDict[str, StageTicket] = OrderedDict()
        self._is_closed = False
        self.may_lift = True
        self.most_bytes: int | None = None

    @property
    def num_tickets(self) -> int:
        """Return the number of known tickets."""
        return len(self._tickets)

    def run(self, steps: Steps[T]) -> T:
        """Run all steps of an operation in a row."""
        with self._lock:
            return _run(steps)

    async def run_cooperatively(self, steps: Steps[T]) -> T:
        """Run the steps of an operation, yielding to the event loop between them. If cancelled
        between two steps, the operation is closed.
        """
        try:
            while True:
                with self._lock:
                    try:
                        next(steps)
                    except StopIteration as done:
                        result: T = done.value
                        return result
                await asyncio.sleep(0)
        finally:
            with self._lock:
                steps.close()

    def stage(
        self,
        name: str,
        chains: Sequence[ChunkChain],
        *,
        deadline_s: float,
        is_prefix: bool = True,
        recompute_s: float | None = None,
        source: str | None = None,
    ) -> Steps[Staged]:
        """Hold those of these chunks that are in host memory for all ranks, and begin to lift the
        rest.

        A chunk removed between two steps counts as it was seen. If the generator is closed or the
        task is cancelled, the ticket holds nothing.

        Args:
            name: Name of the ticket: that of the request.
            chains: Chunks to stage; none, or the same as before, to poll the progress of the lift.
            deadline_s: Longest time that the lift may take.
            is_prefix: Ignore everything after the first missing chunk of a chain. Otherwise each
                chunk counts individually.
            recompute_s: Cost of recomputing one chunk (of all ranks and chains); the lift takes no
                longer than that for each chunk.
            source: Another engine has just computed these chunks. Those that are missing are looked
                for again until `EXPECTED_S` have passed, first at this instance, named by its id or
                host; "": anywhere. None: nothing is known to be on its way.
        """
        yield from self.expire()
        known = self._tickets.get(name)
        if known is not None and (not chains or known.asked == (tuple(chains), is_prefix)):
            known.last_asked_at = self._clock()
            self._tickets.move_to_end(name)
            return known.staged()
        ticket = StageTicket(self._tenant, chains, is_prefix, source)
        if not chains or not self._takes(name):
            return ticket.staged()
        try:
            for chain in ticket.chains:
                yield from self._holding_hot(ticket, chain)
            if not self._takes(name):  # the state may have changed at a yield
                _run(self._ending(ticket))
                return StageTicket(self._tenant, chains, is_prefix).staged()
        except BaseException:
            _run(self._ending(ticket))
            raise
        known = self._tickets.pop(name, None)
        ticket.last_asked_at = self._clock()
        self._tickets[name] = ticket
        self._begin_lift(ticket, deadline_s, recompute_s)
        staged = ticket.staged()
        if known is not None:
            # After the new ticket has taken its references, so that chunks in both stay held
            # throughout.
            yield from self._ending(known)
        return staged

    def _takes(self, name: str) -> bool:
        return not self._is_closed and (name in self._tickets or len(self._tickets) < MAX_TICKETS)

    def unstage(self, names: Sequence[str]) -> Steps[None]:
        """Release everything held for these tickets; unknown ones are ignored. Reads in progress
        finish, and their chunks stay hot.
        """
        for name in names:
            ticket = self._tickets.pop(name, None)
            if ticket is not None:
                yield from self._ending(ticket)

    def expire(self) -> Steps[None]:
        """Forget tickets that no client has queried for `STAGE_LEASE_S`."""
        while self._tickets:
            name, ticket = next(iter(self._tickets.items()))
            if self._clock() - ticket.last_asked_at < STAGE_LEASE_S:
                return
            del self._tickets[name]
            yield from self._ending(ticket)

    def close(self) -> Steps[None]:
        """Forget every ticket and refuse new ones. Idempotent. If cancelled between two steps, some
        may remain: close again.
        """
        self._is_closed = True
        while self._tickets:
            yield from self._ending(self._tickets.popitem()[1])

    def _ending(self, ticket: StageTicket) -> Steps[None]:
        """Release what a forgotten ticket holds, one block of chunks per step; if closed, the rest
        in one go.
        """
        ticket.is_over = True
        try:
            while len(ticket.held) > HOT_BLOCK_KEYS:
                self._give_back(ticket, HOT_BLOCK_KEYS)
                yield
        finally:
            self._give_back(ticket, len(ticket.held))

    def _give_back(self, ticket: StageTicket, num_chunks: int) -> None:
        given = ticket.held[:num_chunks]
        del ticket.held[:num_chunks]
        unheld = self._room.give(given)
        if not self._stack.keep_hot:
            self._stack.hot.remove_many([chunk.key for chunk in unheld])
        for chunk in given:
            chunk.release()

    def _holding_hot(self, ticket: StageTicket, chain: StagedChain) -> Steps[None]:
        for numbers in chain.blocks(range(len(chain.tiers)), HOT_BLOCK_KEYS):
            if numbers[0]:
                yield
            self._hold(ticket, chain, numbers)
            if ticket.is_prefix and not chain.tiers[numbers[-1]]:
                return

    def _hold(
        self,
        ticket: StageTicket,
        chain: StagedChain,
        numbers: Sequence[int],
        codes: Sequence[int] | None = None,
    ) -> None:
        """Take references on those of these chunks that are hot for all ranks and fit in the
        budget.

        Args:
            numbers: Their indices in the chain.
            codes: Source of each chunk; None: all from host memory.
        """
        found = self._stack.hot.get_many(chain.names_of(numbers))
        complete = _whole(found, chain.num_ranks, ticket.is_prefix)
        num_ranks = chain.num_ranks
        runs = (
            [found[: len(complete) * num_ranks]]
            if ticket.is_prefix
            else [found[i * num_ranks : (i + 1) * num_ranks] for i in complete]
        )
        kept = [chunk for run in runs for chunk in run if chunk is not None]
        num_kept = 0 if ticket.is_over else self._room.take(kept, num_ranks)
        ticket.held += kept[: num_kept * num_ranks]
        for i in complete[:num_kept]:
            chain.tiers[numbers[i]] = StagedFrom.HOT if codes is None else codes[i]
        if num_kept * num_ranks < len(found):
            held = set(complete[:num_kept])
            for i, chunk in enumerate(found):
                if chunk is not None and i // num_ranks not in held:
                    chunk.release()

    def _begin_lift(
        self, ticket: StageTicket, deadline_s: float, recompute_s: float | None
    ) -> None:
        num_missing = max(chain.tiers.count(0) for chain in ticket.chains)
        has_more = self._stack.lower or self._stack.expected or ticket.source is not None
        can_lift = num_missing and self.may_lift and has_more and self._num_affordable(1)
        if not can_lift or not self._room.lifts.acquire(blocking=False):
            return
        limit_s = deadline_s if recompute_s is None else min(deadline_s, recompute_s * num_missing)
        ticket.is_ready = False
        if not self._start_lift(self._lift(ticket, limit_s, recompute_s)):
            ticket.is_ready = True
            self._room.lifts.release()

    async def _lift(self, ticket: StageTicket, limit_s: float, recompute_s: float | None) -> None:
        EXPECTED_FROM.set(ticket.source or "")  # for this task and those that it starts
        try:
            async with asyncio.TaskGroup() as chains:
                for chain in ticket.chains:
                    chains.create_task(self._lift_chain(ticket, chain, limit_s, recompute_s))
        finally:
            ticket.is_ready = True
            self._room.lifts.release()

    async def _lift_chain(
        self, ticket: StageTicket, chain: StagedChain, limit_s: float, recompute_s: float | None
    ) -> None:
        """Lift the chunks of a chain that the tiers hold for all ranks; others are not read."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_s
        expected_until = min(deadline, clock() + (0.0 if ticket.source is None else EXPECTED_S))
        missing = [i for i, tier in enumerate(chain.tiers) if not tier][
            : self._num_affordable(chain.num_ranks)
        ]
        for numbers in chain.blocks(missing, LIFT_BLOCK_KEYS):
            wanted = numbers
            while wanted and (left_s := deadline - clock()) > 0 and not ticket.is_over:
                await self._lift_block(ticket, chain, wanted, left_s, recompute_s)
                wanted = [i for i in wanted if not chain.tiers[i]]
                if not wanted or clock() + AGAIN_S > expected_until:
                    break
                await asyncio.sleep(AGAIN_S)
            if ticket.is_prefix and not chain.tiers[numbers[-1]]:
                return

    async def _lift_block(
        self,
        ticket: StageTicket,
        chain: StagedChain,
        numbers: Sequence[int],
        limit_s: float,
        recompute_s: float | None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_s
        num_ranks = chain.num_ranks
        names, expected = chain.names_of(numbers), self._stack.expected
        tiers = [
            MEMORY_TIER if tier is None and name in expected else tier
            for name, tier in zip(
                names, await self._stack.batched_tiers(names, limit_s / PROBE_SHARE), strict=True
            )
        ]
        wanted = [numbers[i] for i in _whole(tiers, num_ranks, ticket.is_prefix)]
        if not wanted:
            return
        results = await self._stack.batched_get(
            chain.names_of(wanted),
            max(0.0, deadline - clock()),
            prefix_only=ticket.is_prefix,
            # What an instance was said to have may be elsewhere, too.
            search_range=None if ticket.source else sorted({tier for tier in tiers if tier}),
            recompute_s=None if recompute_s is None else recompute_s / num_ranks,
            most_bytes=self.most_bytes,
        )
        codes = [
            max(
                # A miss may be hot by now if another read brought it.
                _CODES.get(result.tier, StagedFrom.OTHER)
                if isinstance(result, Chunk)
                else StagedFrom.HOT
                for result in results[i * num_ranks : (i + 1) * num_ranks]
            )
            for i in range(len(wanted))
        ]
        arrived = [result for result in results if isinstance(result, Chunk)]
        try:
            with self._lock:
                if not self._stack.keep_hot and not ticket.is_over:
                    self._stack.hot.put_many(arrived)
                # Hold the tier's own chunks, not the results: a load finds the former, which may be
                # other copies.
                self._hold(ticket, chain, wanted, codes)
        finally:
            for chunk in arrived:
                chunk.release()

    def _num_affordable(self, num_ranks: int) -> int:
        """Estimate how many more chunks will fit: others are worth neither reading nor evicting
        for.
        """
        figures = self._stack.hot.stats()
        mean_bytes = max(1, figures["used_bytes"] // max(1, figures["num_chunks"]))
        return max(0, self._room.max_bytes - self._room.used_bytes) // (mean_bytes * num_ranks)


def _heads_of_tails(chains: Sequence[ChunkChain]) -> dict[int, int]:
    """Return for each tail among these chains that has a chain in front of it the indices of
    both.
    """
    heads = {(chain.group + TAIL, chain.world_size): i for i, chain in enumerate(chains)}
    named = ((chain.group, chain.world_size) for chain in chains)
    return {i: heads[name] for i, name in enumerate(named) if name in heads}


def _whole(found: Sequence[object | None], num_ranks: int, is_prefix: bool) -> Sequence[int]:
    """Return the indices of the chunks found for all ranks; with `is_prefix` only those before the
    first gap.
    """
    if is_prefix:
        num_found = next((i for i, what in enumerate(found) if what is None), len(found))
        return range(num_found // num_ranks)
    return [
        i
        for i in range(len(found) // num_ranks)
        if None not in found[i * num_ranks : (i + 1) * num_ranks]
    ]


def _run(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
