"""A session's references: each comes back exactly once, however the session ends."""

from __future__ import annotations

import threading

import pytest
from lmcache_core.errors import CapacityError, IntegrityError
from lmcache_core.memory import ArenaAllocator, BytesBufferMemoryObj, PinSession


@pytest.fixture
def arena():
    allocator = ArenaAllocator.anonymous(1 << 16)
    yield allocator
    allocator.check_integrity()


def test_an_object_may_be_pinned_several_times(arena):
    obj, session = arena.allocate((1,), "uint8"), PinSession("a")
    session.pin(obj)
    session.pin(obj)
    assert (obj.get_ref_count(), session.num_pins) == (3, 2)
    session.unpin(obj)
    assert (obj.get_ref_count(), session.num_pins) == (2, 1)
    session.close()
    assert (obj.get_ref_count(), session.num_pins) == (1, 0)
    obj.ref_count_down()


def test_what_is_not_pinned_cannot_be_unpinned(arena):
    obj, session = arena.allocate((1,), "uint8"), PinSession("a")
    with pytest.raises(IntegrityError, match="session a"):
        session.unpin(obj)
    session.pin(obj)
    session.unpin(obj)
    with pytest.raises(IntegrityError, match="session a"):
        session.unpin(obj)
    assert obj.get_ref_count() == 1
    obj.ref_count_down()


def test_a_session_that_has_ended_pins_nothing_and_owes_nothing(arena):
    obj, session = arena.allocate((1,), "uint8"), PinSession("a")
    session.pin(obj)
    session.close()
    session.close()
    session.unpin(obj)
    with pytest.raises(CapacityError, match="ended"):
        session.pin(obj)
    assert obj.get_ref_count() == 1
    obj.ref_count_down()


def test_pins_are_bounded(arena):
    obj, session = arena.allocate((1,), "uint8"), PinSession("a", max_pins=2)
    session.pin(obj)
    session.pin(obj)
    with pytest.raises(CapacityError, match="2 pins"):
        session.pin(obj)
    assert obj.get_ref_count() == 3
    session.close()
    obj.ref_count_down()


def test_what_is_free_cannot_be_pinned(arena):
    obj, session = arena.allocate((1,), "uint8"), PinSession("a")
    obj.ref_count_down()
    with pytest.raises(IntegrityError):
        session.pin(obj)
    assert session.num_pins == 0
    session.check_integrity()


def test_memory_freed_under_a_pin_is_noticed_and_costs_nobody_else_a_pin(arena):
    objects, session = [arena.allocate((1,), "uint8") for _ in range(3)], PinSession("a")
    for obj in objects:
        session.pin(obj)
    session.check_integrity()
    arena.free(objects[1])
    with pytest.raises(IntegrityError, match="session a"):
        session.check_integrity()
    with pytest.raises(IntegrityError):
        session.close()
    assert [obj.get_ref_count() for obj in objects] == [1, 0, 1]
    objects[0].ref_count_down()
    objects[2].ref_count_down()


def test_bytes_of_nobody_may_be_pinned():
    obj = BytesBufferMemoryObj(b"abc")
    with PinSession("a") as session:
        session.pin(obj)
        session.pin(obj)
        session.check_integrity()
    assert obj.get_ref_count() == 1


def test_a_session_may_end_while_others_pin(arena):
    """Whatever the order, every reference comes back once: an object freed twice or never would
    be noticed.
    """
    obj = arena.allocate((1,), "uint8")
    for _ in range(30):
        session, start = PinSession("a"), threading.Barrier(4)

        def work(session=session, start=start):
            start.wait()
            for _ in range(50):
                try:
                    session.pin(obj)
                except CapacityError:
                    return
                session.unpin(obj)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        start.wait()
        session.close()
        for thread in threads:
            thread.join()
        assert obj.get_ref_count() == 1
    obj.ref_count_down()
