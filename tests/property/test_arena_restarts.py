"""Starts of a sidecar that are killed at any moment, and clients that go on writing to what they
were lent.

Whatever the order of events: what is served is what was stored, what a living client may write to
has no other user, and all books balance.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from lmcache_core.memory import MemoryObj
from lmcache_core.memory.arena_locks import FileLock, join_generation

from tests.fixtures.arena import ARENA_BYTES, ArenaStart, make_bytes
from tests.suites.chunks import make_chunk, make_key

NAMES = st.integers(0, 40)
SIZES = st.integers(1, ARENA_BYTES // 8)


@dataclass
class Lent:
    """An extent that a client has been lent, with what it can write through whatever becomes of
    the sidecar.
    """

    generation: int
    memory: MemoryObj
    view: memoryview


class ArenaRestarts(RuleBasedStateMachine):
    """One directory, one start of a sidecar at a time, one client for each generation."""

    lent = Bundle("lent")

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="arena-"))
        self.clients: dict[int, FileLock] = {}
        self.open: list[Lent] = []
        self.sizes: dict[int, set[int]] = {}
        self.start_again()

    def start_again(self) -> None:
        self.start = ArenaStart(self.directory)
        self.generation = self.start.owner.arena.generation
        self.clients[self.generation] = join_generation(self.directory, self.generation)
        self.is_checked = False

    @rule(target=lent, size=SIZES)
    def reserve(self, size: int) -> Lent | None:
        memories = self.start.reserve(size)
        if not memories:
            return None
        (memory,) = memories
        lent = Lent(self.generation, memory, memory.byte_array)
        self.open.append(lent)
        return lent

    def is_of_this_start(self, lent: Lent | None) -> bool:
        return lent is not None and lent in self.open and lent.generation == self.generation

    @rule(lent=consumes(lent), name=NAMES)
    def commit(self, lent: Lent | None, name: int) -> None:
        if lent is not None and self.is_of_this_start(lent):
            self.open.remove(lent)
            self.sizes.setdefault(name, set()).add(lent.memory.get_size())
            self.start.commit(lent.memory, name)

    @rule(lent=consumes(lent))
    def abort(self, lent: Lent | None) -> None:
        if lent is not None and self.is_of_this_start(lent):
            self.open.remove(lent)
            lent.memory.ref_count_down()

    @rule(name=NAMES, size=SIZES)
    def lift(self, name: int, size: int) -> None:
        """From a slower tier: the sidecar itself writes to the arena, and tells the journal when
        it comes by.
        """
        memory = self.start.hot.allocate(size)
        if memory is not None:
            memory.ref_count_down()
            chunk = make_chunk(
                name, payload=make_bytes(name, size), allocate=self.start.hot.allocate
            )
            self.sizes.setdefault(name, set()).add(size)
            self.start.hot.put_many([chunk])
            chunk.release()

    @rule()
    def clients_write(self) -> None:
        for lent in self.open:
            lent.view[:] = b"\xee" * len(lent.view)

    @rule(num_bytes=st.integers(1, ARENA_BYTES))
    def evict(self, num_bytes: int) -> None:
        self.start.hot.evict_bytes(num_bytes)

    @rule(name=NAMES)
    def remove(self, name: int) -> None:
        self.start.hot.remove_many([make_key(name)])

    @precondition(lambda self: not self.is_checked)
    @rule()
    def recover(self) -> None:
        self.start.recover()
        self.is_checked = True

    @rule()
    def look(self) -> None:
        self.start.look()

    @rule()
    def kill(self) -> None:
        self.start.kill()
        self.start_again()

    @rule()
    def stop(self) -> None:
        """In order; what clients of this start hold stays theirs."""
        mine = [lent for lent in self.open if lent.generation == self.generation]
        self.start.journal.abandoned([lent.memory for lent in mine])
        self.start.stop()
        self.start_again()

    @precondition(lambda self: len(self.clients) > 1)
    @rule(data=st.data())
    def client_ends(self, data: st.DataObject) -> None:
        generation = data.draw(
            st.sampled_from([each for each in self.clients if each != self.generation])
        )
        self.clients.pop(generation).release()
        self.open = [lent for lent in self.open if lent.generation != generation]

    @invariant()
    def what_is_served_is_what_was_stored(self) -> None:
        served = self.start.served()
        wanted = {
            make_key(name): {make_bytes(name, size) for size in sizes}
            for name, sizes in self.sizes.items()
        }
        for key, payload in served.items():
            assert payload in wanted[key]

    @invariant()
    def the_books_balance(self) -> None:
        self.start.check_integrity()

    @invariant()
    def what_clients_write_to_has_no_other_user(self) -> None:
        old = sum(
            lent.memory.metadata.phy_size
            for lent in self.open
            if lent.generation != self.generation
        )
        assert self.start.owner.lent_bytes >= old

    def teardown(self) -> None:
        for lock in self.clients.values():
            lock.release()
        self.start.kill()
        shutil.rmtree(self.directory)


TestArenaRestarts = ArenaRestarts.TestCase
TestArenaRestarts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
