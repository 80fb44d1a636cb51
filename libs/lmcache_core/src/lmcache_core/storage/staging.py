"""Tickets: what requests are going to load is lifted while they wait, and what they were
promised stays in host memory.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lmcache_core.keys import ChunkChain
from lmcache_core.record import Chunk, Staged, StagedFrom
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.staging_room import StagingRoom
from lmcache_core.storage.ticket import StagedChain, Ticket, code_of, ending, whole
from lmcache_core.storage.turns import Steps, at_once, in_turns

MAX_TICKETS = 4096
STAGE_LEASE_S = 120.0
"""So long after the last word about a ticket it is forgotten: whoever asked has gone or does not
need it.
"""
SWEEP_INTERVAL_S = 5.0
"""How often an owner calls `expire`."""
HOT_BLOCK_KEYS = 512
"""So many chunks are taken or given back in one step."""
LIFT_BLOCK_KEYS = 4096
"""So many keys are looked at in one go: of a long chain of which little is there, the rest costs
nothing.
"""
PROBE_SHARE = 2
"""Finding out who has what may take one part in this many of a lift's time: a tier that hangs
leaves time to read from the others.
"""

StartLift = Callable[[Coroutine[Any, Any, None]], bool]


class Staging:
    """The tickets of one client. Thread-safe; no call waits for a tier.

    Args:
        stack: The tiers.
        tenant: Namespace of the client's chunks.
        room: What this and other clients may hold together.
        start_lift: Runs a lift on the stack's event loop; False when it will not, and has closed
            it.
        clock: Tells how old tickets are, seconds.
    """

    def __init__(
        self,
        stack: TierStack,
        tenant: str,
        room: StagingRoom,
        start_lift: StartLift,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack = stack
        self._tenant = tenant
        self._room = room
        self._start_lift = start_lift
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        self._may_lift = True
        self._is_closed = False

    @property
    def num_tickets(self) -> int:
        """Tickets that are known."""
        return len(self._tickets)

    def stage(
        self,
        ticket: str,
        chains: Sequence[ChunkChain],
        *,
        deadline_s: float,
        is_prefix: bool = True,
        recompute_s: float | None = None,
    ) -> Staged:
        """What of these chunks is in host memory for all ranks, held from now on; what is not
        begins to be lifted.

        Args:
            ticket: Name of the question.
            chains: What is asked for; none, or those of the first time: how far the lift is.
            deadline_s: Longest that the lift may take.
            is_prefix: Nothing behind the first missing chunk of a chain counts or is lifted.
                Otherwise each chunk counts for itself.
            recompute_s: What computing one chunk (of all ranks and chains) anew costs; the lift
                takes no longer than that for each chunk.
        """
        with self._lock:
            return at_once(self._staging(ticket, chains, deadline_s, is_prefix, recompute_s))

    async def stage_in_turns(
        self,
        ticket: str,
        chains: Sequence[ChunkChain],
        deadline_s: float,
        is_prefix: bool,
        recompute_s: float | None,
    ) -> Staged:
        """`stage` for who serves others on the same event loop: they have their turn every few
        hundred chunks.

        A chunk that is removed meanwhile counts as it was seen. Closed or cancelled meanwhile, it
        holds nothing.
        """
        return await in_turns(
            self._staging(ticket, chains, deadline_s, is_prefix, recompute_s), self._lock
        )

    def unstage(self, tickets: Sequence[str]) -> None:
        """Hold nothing for these tickets any more; unknown ones are passed over. What is being
        read for them goes on, and stays hot.
        """
        with self._lock:
            at_once(self._unstaging(tickets))

    async def unstage_in_turns(self, tickets: Sequence[str]) -> None:
        """`unstage` for who serves others on the same event loop."""
        await in_turns(self._unstaging(tickets), self._lock)

    def expire(self) -> None:
        """Forget tickets about which nothing was heard for `STAGE_LEASE_S`."""
        with self._lock:
            at_once(self._expiring())

    async def expire_in_turns(self) -> None:
        """`expire` for who serves others on the same event loop."""
        await in_turns(self._expiring(), self._lock)

    def stop_lifting(self) -> None:
        """From now on only what is hot is staged."""
        self._may_lift = False

    def close(self) -> None:
        """Forget every ticket and take no more. Idempotent."""
        with self._lock:
            at_once(self._closing())

    async def close_in_turns(self) -> None:
        """`close` for who serves others on the same event loop. Cancelled, it has not forgotten
        all of them: `close` does then.
        """
        await in_turns(self._closing(), self._lock)

    def _staging(
        self,
        name: str,
        chains: Sequence[ChunkChain],
        deadline_s: float,
        is_prefix: bool,
        recompute_s: float | None,
    ) -> Steps[Staged]:
        yield from self._expiring()
        known = self._tickets.get(name)
        if known is not None and (not chains or known.asked == (tuple(chains), is_prefix)):
            known.last_word = self._clock()
            self._tickets.move_to_end(name)
            return known.staged()
        ticket = Ticket(self._tenant, chains, is_prefix)
        if not chains or not self._takes(name):
            return ticket.staged()
        try:
            for chain in ticket.chains:
                yield from self._holding_hot(ticket, chain)
            if not self._takes(name):  # others have had their turn
                at_once(self._ending(ticket))
                return Ticket(self._tenant, chains, is_prefix).staged()
        except BaseException:
            at_once(self._ending(ticket))
            raise
        known = self._tickets.pop(name, None)
        ticket.last_word = self._clock()
        self._tickets[name] = ticket
        self._begin_lift(ticket, deadline_s, recompute_s)
        staged = ticket.staged()
        if known is not None:
            yield from self._ending(
                known
            )  # after the new one has taken its own, so that what both want is held all the time
        return staged

    def _takes(self, name: str) -> bool:
        """Whether a new question may have that name."""
        return not self._is_closed and (name in self._tickets or len(self._tickets) < MAX_TICKETS)

    def _unstaging(self, names: Sequence[str]) -> Steps[None]:
        for name in names:
            ticket = self._tickets.pop(name, None)
            if ticket is not None:
                yield from self._ending(ticket)

    def _expiring(self) -> Steps[None]:
        while self._tickets:
            name, ticket = next(iter(self._tickets.items()))
            if self._clock() - ticket.last_word < STAGE_LEASE_S:
                return
            del self._tickets[name]
            yield from self._ending(ticket)

    def _closing(self) -> Steps[None]:
        self._is_closed = True
        while self._tickets:
            yield from self._ending(self._tickets.popitem()[1])

    def _ending(self, ticket: Ticket) -> Steps[None]:
        return ending(ticket, self._stack, self._room, HOT_BLOCK_KEYS)

    def _holding_hot(self, ticket: Ticket, chain: StagedChain) -> Steps[None]:
        for numbers in chain.blocks(range(len(chain.tiers)), HOT_BLOCK_KEYS):
            if numbers[0]:
                yield
            self._hold(ticket, chain, numbers)
            if ticket.is_prefix and not chain.tiers[numbers[-1]]:
                return

    def _hold(
        self,
        ticket: Ticket,
        chain: StagedChain,
        numbers: Sequence[int],
        codes: Sequence[int] | None = None,
    ) -> None:
        """Take references on those of these chunks that are hot for all ranks and that there is
        room for.

        Args:
            ticket: Who holds them.
            chain: What they belong to.
            numbers: Their places in it.
            codes: Where each is from; None: all from host memory.
        """
        found = self._stack.hot.get_many(chain.names_of(numbers))
        complete = whole(found, chain.num_ranks, ticket.is_prefix)
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

    def _begin_lift(self, ticket: Ticket, deadline_s: float, recompute_s: float | None) -> None:
        num_missing = max(chain.tiers.count(0) for chain in ticket.chains)
        can_lift = num_missing and self._may_lift and self._stack.lower and self._num_affordable(1)
        if not can_lift or not self._room.begin_lift():
            return
        limit_s = deadline_s if recompute_s is None else min(deadline_s, recompute_s * num_missing)
        ticket.is_ready = False
        if not self._start_lift(self._lift(ticket, limit_s, recompute_s)):
            ticket.is_ready = True
            self._room.end_lift()

    async def _lift(self, ticket: Ticket, limit_s: float, recompute_s: float | None) -> None:
        try:
            async with asyncio.TaskGroup() as chains:
                for chain in ticket.chains:
                    chains.create_task(self._lift_chain(ticket, chain, limit_s, recompute_s))
        finally:
            ticket.is_ready = True
            self._room.end_lift()

    async def _lift_chain(
        self, ticket: Ticket, chain: StagedChain, limit_s: float, recompute_s: float | None
    ) -> None:
        """Bring the chunks of a chain that some tier has for all ranks; what nobody has whole is
        not read at all.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_s
        missing = [i for i, tier in enumerate(chain.tiers) if not tier][
            : self._num_affordable(chain.num_ranks)
        ]
        for numbers in chain.blocks(missing, LIFT_BLOCK_KEYS):
            left_s = deadline - clock()
            if left_s > 0 and not ticket.is_over:
                await self._lift_block(ticket, chain, numbers, left_s, recompute_s)
            if ticket.is_prefix and not chain.tiers[numbers[-1]]:
                return

    async def _lift_block(
        self,
        ticket: Ticket,
        chain: StagedChain,
        numbers: Sequence[int],
        limit_s: float,
        recompute_s: float | None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_s
        num_ranks = chain.num_ranks
        tiers = await self._stack.batched_tiers(chain.names_of(numbers), limit_s / PROBE_SHARE)
        wanted = [numbers[i] for i in whole(tiers, num_ranks, ticket.is_prefix)]
        if not wanted:
            return
        results = await self._stack.batched_get(
            chain.names_of(wanted),
            max(0.0, deadline - clock()),
            prefix_only=ticket.is_prefix,
            search_range=sorted({tier for tier in tiers if tier is not None}),
            recompute_s=None if recompute_s is None else recompute_s / num_ranks,
        )
        codes = [
            max(map(code_of, results[i * num_ranks : (i + 1) * num_ranks]))
            for i in range(len(wanted))
        ]
        arrived = [result for result in results if isinstance(result, Chunk)]
        try:
            with self._lock:
                if not self._stack.keeps_hot and not ticket.is_over:
                    self._stack.hot.put_many(arrived)
                # Not the results: what the tier keeps is what a load is going to find, and may be
                # another copy.
                self._hold(ticket, chain, wanted, codes)
        finally:
            for chunk in arrived:
                chunk.release()

    def _num_affordable(self, num_ranks: int) -> int:
        """How many more chunks are likely to find room: what does not is not worth reading, nor
        pushing others out for.
        """
        figures = self._stack.hot.stats()
        mean_bytes = max(
            1, figures["used_bytes"] // max(1, figures["num_chunks"])
        )  # of unknown size, a byte at least
        return self._room.left_bytes // (mean_bytes * num_ranks)
