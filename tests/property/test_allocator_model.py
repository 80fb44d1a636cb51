"""Allocators against a list of what was handed out: nothing overlaps, nothing leaks, everything
is one piece again at the end.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lmcache_core.memory import (
    ALIGN_BYTES,
    ArenaAllocator,
    BufferAllocator,
    HostMemoryAllocator,
    MemoryFormat,
    MemoryObj,
    MixedMemoryAllocator,
)

from tests.suites.allocator_suite import BoundedAllocator, has_pattern, write_pattern

CAPACITY_BYTES = 12 * ALIGN_BYTES
SHAPES = st.sampled_from(
    [
        (),
        (0,),
        (1,),
        (7, 73),
        (2, 256),
        (513,),
        (3, 512),
        (2, 2, 600),
        (CAPACITY_BYTES,),
        (CAPACITY_BYTES + 1,),
    ]
)
DTYPES = st.sampled_from([None, "uint8", "bfloat16", "float32"])


class Held:
    """One object, what was written into it, and how many references there are."""

    def __init__(self, memory_obj: MemoryObj, seed: int) -> None:
        self.memory_obj = memory_obj
        self.seed = seed
        self.num_references = 1


class AllocatorMachine(RuleBasedStateMachine):
    fmt = MemoryFormat.KV_BLOB

    def __init__(self) -> None:
        super().__init__()
        self.allocator = self.make()
        self.held: list[Held] = []
        self.num_made = 0

    def make(self) -> BoundedAllocator:
        return ArenaAllocator.anonymous(CAPACITY_BYTES)

    def forget_free(self) -> None:
        for held in self.held:
            assert held.memory_obj.get_ref_count() == held.num_references
        self.held = [held for held in self.held if held.num_references]

    @rule(shape=SHAPES, dtype=DTYPES)
    def allocate(self, shape: tuple[int, ...], dtype: str | None) -> None:
        memory_obj = self.allocator.allocate(shape, dtype, self.fmt)
        if memory_obj is None:
            assert (
                self.held or shape == (CAPACITY_BYTES + 1,) or dtype in ("bfloat16", "float32")
            ), "nothing is out, and yet no room"
            return
        self.num_made += 1
        write_pattern(memory_obj, self.num_made)
        self.held.append(Held(memory_obj, self.num_made))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ref_up(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        held.memory_obj.ref_count_up()
        held.num_references += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ref_down(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        held.num_references -= 1
        held.memory_obj.ref_count_down()
        self.forget_free()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.allocator.free(held.memory_obj)
        held.num_references = 0
        self.forget_free()

    @invariant()
    def nothing_is_written_over_and_the_books_balance(self) -> None:
        assert all(has_pattern(held.memory_obj, held.seed) for held in self.held)
        assert self.allocator.used_bytes == sum(
            held.memory_obj.metadata.phy_size for held in self.held
        )
        self.allocator.check_integrity()

    def teardown(self) -> None:
        while self.held:
            held = self.held.pop()
            while held.num_references:
                held.num_references -= 1
                held.memory_obj.ref_count_down()
        assert self.allocator.used_bytes == 0
        whole = self.allocator.allocate((CAPACITY_BYTES,), None, self.fmt)
        assert whole is not None, "not one piece again"
        whole.ref_count_down()


class HostMachine(AllocatorMachine):
    def make(self) -> BoundedAllocator:
        return HostMemoryAllocator(CAPACITY_BYTES)


class MixedMachine(AllocatorMachine):
    def make(self) -> BoundedAllocator:
        return MixedMemoryAllocator(CAPACITY_BYTES)


class BufferMachine(AllocatorMachine):
    fmt = MemoryFormat.BINARY_BUFFER

    def make(self) -> BoundedAllocator:
        return BufferAllocator("cpu", CAPACITY_BYTES)


MACHINES = (AllocatorMachine, HostMachine, MixedMachine, BufferMachine)
for machine in MACHINES:
    machine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)
TestArena, TestHost, TestMixed, TestBuffer = (machine.TestCase for machine in MACHINES)
