"""What one start of an arena leaves to the next; `tests/property/test_arena_restarts.py` has any
order of starts and kills.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lmcache_core.memory.arena_locks import generation_path, generations_in
from lmcache_core.memory.shared import FILE_NAME as ARENA_NAME
from lmcache_core.storage.eviction import TenantQuotas, TierLimits
from lmcache_sidecar.arena.journal import FILE_NAME

from tests.fixtures.arena import ARENA_BYTES, ArenaStart, is_recorded, leave, names_of, recovered
from tests.suites.chunks import make_key


def test_the_order_of_eviction_outlives_a_restart(tmp_path: Path) -> None:
    leave(tmp_path, "abcd")
    with recovered(tmp_path) as start:
        assert start.hot.evict_bytes(2000) == 2048
        assert set(start.served()) == {make_key("c"), make_key("d")}


def test_quotas_and_lifetimes_hold_for_recovered_chunks(tmp_path: Path) -> None:
    start = ArenaStart(tmp_path)
    for name in "abc":
        start.store(name, tenant="small")
    start.store("a", tenant="large")
    start.kill()
    quotas = TenantQuotas(by_tenant={"small": 2 * 1024})
    second = ArenaStart(tmp_path, limits=TierLimits(quotas=quotas))
    second.recover()
    assert set(second.served()) == {
        make_key("b", "small"),
        make_key("c", "small"),
        make_key("a", "large"),
    }
    second.look()
    second.kill()
    with recovered(tmp_path, limits=TierLimits(ttl_s=1e-6)) as third:
        assert third.served() == {}
        assert third.announced == []
        assert third.owner.recovery.dropped_chunks == 3


def test_nothing_is_lent_once_the_end_has_begun(tmp_path: Path) -> None:
    start = ArenaStart(tmp_path)
    start.owner.seal()
    memory = start.hot.allocate(1000)
    assert memory is not None
    assert not start.journal.reserved([memory])
    memory.ref_count_down()
    start.stop()


def spoil_journal(directory: Path) -> None:
    with (directory / FILE_NAME).open("r+b") as file:
        file.seek(5)
        file.write(b"?")


def remove_journal(directory: Path) -> None:
    (directory / FILE_NAME).unlink()


def remove_arena(directory: Path) -> None:
    (directory / ARENA_NAME).unlink()


def replace_arena(directory: Path) -> None:
    """By a copy, whose bytes may be others."""
    copy = directory / "copy"
    copy.write_bytes((directory / ARENA_NAME).read_bytes())
    copy.rename(directory / ARENA_NAME)


def remove_generation_of_lent_memory(directory: Path) -> None:
    for generation in generations_in(directory):
        generation_path(directory, generation).unlink()


@pytest.mark.parametrize(
    "spoil",
    [spoil_journal, remove_journal, remove_arena, replace_arena, remove_generation_of_lent_memory],
)
def test_arena_that_cannot_be_trusted_is_not_used_again(tmp_path: Path, spoil: object) -> None:
    first = ArenaStart(tmp_path)
    (lent,) = first.reserve(1000)
    first.store("a")
    first.kill()
    assert callable(spoil)
    spoil(tmp_path)
    second = ArenaStart(tmp_path)
    assert second.owner.arena.inode != first.owner.arena.inode
    assert second.owner.allocator.used_bytes == 0
    second.recover()
    assert second.served() == {}
    lent.byte_array[:] = b"\xee" * 1000
    assert not any(second.owner.arena.load_view), "the client writes to another file"
    second.store("b")
    second.kill()
    with recovered(tmp_path) as third:
        assert third.served() == names_of(third, "b")


@pytest.mark.parametrize("size", [ARENA_BYTES * 2, ARENA_BYTES // 2])
def test_another_size_starts_empty(tmp_path: Path, size: int) -> None:
    leave(tmp_path, "a")
    with recovered(tmp_path, size=size) as start:
        assert (start.served(), start.owner.arena.size) == ({}, size)


def test_without_recovery_nothing_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    leave(tmp_path, "a", "stop")
    assert {path.name for path in tmp_path.iterdir()} >= {ARENA_NAME, FILE_NAME}
    with recovered(tmp_path, recovers=False) as start:
        assert start.served() == {}
        assert not is_recorded(start)
        assert start.store("b")
        for memory in start.reserve(1000):
            memory.ref_count_down()
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_never_served_leaves_what_it_found(tmp_path: Path) -> None:
    """A sidecar that cannot start, for example because its socket is taken, must not cost what is
    in memory.
    """
    ArenaStart(tmp_path).stop()
    assert list(tmp_path.iterdir()) == [], "an empty arena is removed"
    leave(tmp_path, "a")
    ArenaStart(tmp_path).stop()
    with recovered(tmp_path) as start:
        assert start.served() == names_of(start, "a")
