"""What one start of an arena leaves to the next."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmcache_core.memory.arena_locks import generation_path, generations_in, join_generation
from lmcache_core.memory.shared import FILE_NAME as ARENA_NAME
from lmcache_core.storage.eviction import TenantQuotas, TierLimits
from lmcache_sidecar import metrics
from lmcache_sidecar.arena.journal import FILE_NAME

from tests.fixtures.arena import ARENA_BYTES, ArenaStart, is_recorded, leave, make_bytes, names_of
from tests.suites.chunks import make_key

WAYS_TO_END = ["kill", "stop"]


@pytest.mark.parametrize("end", WAYS_TO_END)
def test_chunks_are_served_again_once_they_are_checked(
    tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, "abc", end)
    start = ArenaStart(tmp_path)
    assert start.served() == {}
    assert start.owner.recovery.found_chunks == 3
    assert start.owner.allocator.used_bytes == 3 * 1024
    caplog.set_level("INFO")
    start.recover()
    assert "found=3 served=3 damaged=0 dropped=0" in caplog.text
    assert start.served() == names_of(start, "abc")
    assert start.announced == [make_key(name) for name in "abc"]
    assert start.counters.snapshot() == {(metrics.RECOVERED_CHUNKS_TOTAL, ""): 3}
    start.check_integrity()
    assert start.hot.clear_now() == 3
    assert start.owner.allocator.used_bytes == 0
    start.stop()


def test_a_third_start_finds_what_the_second_has_added_and_left_unchecked(tmp_path: Path) -> None:
    leave(tmp_path, "abc")
    second = ArenaStart(tmp_path)  # killed before it has checked anything
    assert second.store("d")
    second.kill()
    third = ArenaStart(tmp_path)
    third.recover()
    assert third.served() == names_of(third, "abcd")
    third.stop()


def test_the_order_of_eviction_outlives_a_restart(tmp_path: Path) -> None:
    leave(tmp_path, "abcd")
    start = ArenaStart(tmp_path)
    start.recover()
    assert start.hot.evict_bytes(2000) == 2048
    assert set(start.served()) == {make_key("c"), make_key("d")}
    start.stop()


def test_what_was_forgotten_or_given_back_is_free_at_the_next_start(tmp_path: Path) -> None:
    start = ArenaStart(tmp_path)
    client = join_generation(tmp_path, start.owner.arena.generation)
    for name in "abc":
        start.store(name)
    start.hot.remove_many([make_key("b")])
    for memory in start.reserve(1000, 2000):
        memory.ref_count_down()
    start.look()
    start.kill()
    again = ArenaStart(tmp_path)
    client.release()
    assert again.owner.allocator.used_bytes == 2 * 1024
    again.recover()
    assert again.served() == names_of(again, "ac")
    again.stop()


def test_a_damaged_chunk_is_freed_and_counted(tmp_path: Path) -> None:
    leave(tmp_path, "abc")
    with (tmp_path / ARENA_NAME).open("r+b") as file:
        offset = file.read().index(make_bytes("b", 1000))
        file.seek(offset + 500)
        file.write(bytes([make_bytes("b", 1000)[500] ^ 1]))
    start = ArenaStart(tmp_path)
    start.recover()
    assert start.served() == names_of(start, "ac")
    assert start.owner.recovery.damaged_chunks == 1
    assert start.counters.snapshot()[metrics.UNRECOVERED_CHUNKS_TOTAL, "damaged"] == 1
    assert start.owner.allocator.used_bytes == 2048
    start.check_integrity()
    start.look()
    start.kill()
    again = ArenaStart(tmp_path)
    assert again.owner.recovery.found_chunks == 2, "it is not looked at twice"
    again.stop()


def test_tenants_quotas_and_ages_are_respected(tmp_path: Path) -> None:
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
    third = ArenaStart(tmp_path, limits=TierLimits(ttl_s=1e-6))
    third.recover()
    assert third.served() == {}
    assert third.announced == []
    assert third.owner.recovery.dropped_chunks == 3
    third.stop()


def test_a_chunk_that_was_stored_anew_meanwhile_stays(tmp_path: Path) -> None:
    leave(tmp_path, "a")
    start = ArenaStart(tmp_path)
    assert start.store("a")
    start.recover()
    assert start.served() == names_of(start, "a")
    assert start.owner.allocator.used_bytes == 1024
    assert start.owner.recovery.dropped_chunks == 1
    start.check_integrity()
    start.stop()


def test_memory_that_a_client_may_still_write_to_is_used_by_nobody(tmp_path: Path) -> None:
    first = ArenaStart(tmp_path)
    client = join_generation(tmp_path, first.owner.arena.generation)
    (lent,) = first.reserve(3000)
    first.store("a")
    first.kill()
    for _ in range(3):
        start = ArenaStart(tmp_path)
        start.recover()
        start.look()
        assert start.owner.lent_bytes == lent.metadata.phy_size
        for number in range(2 * ARENA_BYTES // 1024):
            assert start.store(number)
        assert (
            start.hot.stats()["used_bytes"] == (ARENA_BYTES - lent.metadata.phy_size) // 1024 * 1024
        )
        lent.byte_array[:] = b"\xee" * 3000
        assert all(b"\xee" not in payload for payload in start.served().values())
        start.check_integrity()
        start.kill()
    client.release()
    last = ArenaStart(tmp_path)
    last.look()
    assert last.owner.lent_bytes == 0
    assert generations_in(tmp_path) == [last.owner.arena.generation]
    last.recover()
    last.hot.clear_now()
    assert last.owner.allocator.used_bytes == 0
    last.check_integrity()
    last.stop()


def test_what_is_abandoned_at_the_end_is_lent_at_the_next_start(tmp_path: Path) -> None:
    """A sidecar that ends in order closes its sockets first: clients may not have noticed yet."""
    first = ArenaStart(tmp_path)
    first.recover()
    client = join_generation(tmp_path, first.owner.arena.generation)
    first.journal.abandoned(first.reserve(1000))
    assert first.owner.allocator.used_bytes == 1024
    first.stop()
    assert first.owner.allocator.used_bytes == 0
    second = ArenaStart(tmp_path)
    second.look()
    assert second.owner.lent_bytes == 1024
    client.release()
    second.look()
    assert second.owner.lent_bytes == 0
    second.stop()


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
    """By a copy, with other bytes for all that we know."""
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
def test_what_cannot_be_trusted_is_not_used_again(tmp_path: Path, spoil: object) -> None:
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
    assert not any(second.owner.arena.load_view), (
        "who still writes, writes to a file that nobody reads"
    )
    second.store("b")
    second.kill()
    third = ArenaStart(tmp_path)
    third.recover()
    assert third.served() == names_of(third, "b")
    third.stop()


@pytest.mark.parametrize("size", [ARENA_BYTES * 2, ARENA_BYTES // 2])
def test_another_size_starts_empty(tmp_path: Path, size: int) -> None:
    leave(tmp_path, "a")
    start = ArenaStart(tmp_path, size=size)
    start.recover()
    assert (start.served(), start.owner.arena.size) == ({}, size)
    start.stop()


def test_without_recovery_nothing_is_looked_for_and_nothing_is_left(tmp_path: Path) -> None:
    leave(tmp_path, "a", "stop")
    assert {path.name for path in tmp_path.iterdir()} >= {ARENA_NAME, FILE_NAME}
    start = ArenaStart(tmp_path, recovers=False)
    start.recover()
    assert start.served() == {}
    assert not is_recorded(start)
    assert start.store("b")
    for memory in start.reserve(1000):
        memory.ref_count_down()
    start.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_never_served_leaves_what_it_found(tmp_path: Path) -> None:
    """A sidecar that cannot begin, for example because its socket is taken, must not cost what
    is in memory.
    """
    ArenaStart(tmp_path).stop()
    assert list(tmp_path.iterdir()) == [], (
        "an empty arena that nobody has used is not worth its memory"
    )
    leave(tmp_path, "a")
    ArenaStart(tmp_path).stop()
    start = ArenaStart(tmp_path)
    start.recover()
    assert start.served() == names_of(start, "a")
    start.stop()
