"""What routers are told of the sidecar's chunks: never more than is there, and all of it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

import pytest
from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.integrations.vllm import kv_events
from lmcache_core.integrations.vllm.kv_events import (
    CHECK_ROUNDS,
    GONE_S,
    IN_MEMORY,
    ON_DISK,
    SLICE,
    AnnouncedChunk,
    Announcement,
    KVEvents,
)
from lmcache_core.keys import CacheEngineKey, Lane
from lmcache_core.names import DISK_TIER, MEMORY_TIER
from lmcache_core.storage.changes import MAX_CHANGED, ChangeLog
from lmcache_core.telemetry import Counters
from lmcache_core.wire.messages import Changes, Watch

from tests.fixtures.waiting import wait_until

RANKS = 2
LANES = [Lane("vllm", "model", RANKS, rank, "") for rank in range(RANKS)]


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Sidecar:
    """What a sidecar holds, by tier and rank, and its log."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[CacheEngineKey]] = {MEMORY_TIER: set(), DISK_TIER: set()}
        self.log = ChangeLog()
        self.answers = True
        self.num_asked = 0

    def put(self, number: int, tier: str, ranks: Sequence[int] = range(RANKS)) -> None:
        for rank in ranks:
            self.tiers[tier].add(LANES[rank].key(name_of(number)))
            self.log.note(name_of(number).hex())

    def drop(self, number: int, tier: str) -> None:
        for lane in LANES:
            self.tiers[tier].discard(lane.key(name_of(number)))
        self.log.note(name_of(number).hex())

    def restart(self, *, keeps_memory: bool) -> None:
        if not keeps_memory:
            self.tiers[MEMORY_TIER].clear()
        self.log = ChangeLog()

    def where(self, number: int) -> int:
        keys = [lane.key(name_of(number)) for lane in LANES]
        memory, disk = ([key in held for key in keys] for held in self.tiers.values())
        if all(memory):
            return IN_MEMORY | ON_DISK * all(disk)
        return ON_DISK * all(a or b for a, b in zip(memory, disk, strict=True))

    def changes(self, since: Changes | None) -> Changes | None:
        watch = Watch() if since is None else Watch(since.log, since.place)
        return self.log.since(watch) if self.answers else None

    def present(self, keys: Sequence[CacheEngineKey], tier: str | None = None) -> list[bool]:
        assert tier is not None
        self.num_asked += len(keys)
        return [key in self.tiers[tier] for key in keys] if self.answers else []


class Router:
    """What a router believes: block hashes by place, with what it was told of each.

    Args:
        skips: Ignores a block whose parent it does not know, as llm-d's router does.
    """

    def __init__(self, *, skips: bool = False) -> None:
        self.believed: dict[tuple[bytes, int], AnnouncedChunk] = {}
        self._skips = skips

    def told(self, announcements: Sequence[Announcement]) -> None:
        for one in announcements:
            chunk = one.chunk
            at = chunk.block_hashes[0], one.place
            if not one.is_here:
                self.believed.pop(at, None)
            elif not self._skips or chunk.parent is None or self._knows(chunk.parent):
                assert at not in self.believed, "another router counts references"
                self.believed[at] = chunk

    def where(self, number: int) -> int:
        name = name_of(number)
        return sum(place for place in (IN_MEMORY, ON_DISK) if (name, place) in self.believed)

    def _knows(self, block: bytes) -> bool:
        return any((block, place) in self.believed for place in (IN_MEMORY, ON_DISK))


def describe(numbers: Sequence[int], first: int, last: int) -> Iterator[AnnouncedChunk]:
    for at, number in enumerate(numbers[first:last], first):
        parent = name_of(numbers[at - 1]) if at else None
        yield AnnouncedChunk((name_of(number),), parent, array("I", [number]), None)


def prompt_to(number: int) -> list[int]:
    """The chunks of a prompt that ends with this one: half of a number is the chunk before it."""
    return [number >> shift for shift in reversed(range(number.bit_length()))]


class Engine:
    """An engine that names chunks, its sidecar and a router, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sizes: list[int] = []
        self.sidecar, self.router, self.counters = Sidecar(), Router(), Counters()
        self.skipping = Router(skips=True)
        self.events = KVEvents(
            self.sidecar,
            LANES,
            describe,
            self.tell,
            DegradingGuard(self.counters, raised=()),
            clock=lambda: self.now,
        )

    def forget_told(self) -> None:
        """Routers are told that no block is left."""
        for router in (self.router, self.skipping):
            router.believed.clear()
        self.events.cleared()

    def tell(self, announcements: Sequence[Announcement]) -> None:
        self.sizes.append(len(announcements))
        for router in (self.router, self.skipping):
            router.told(announcements)

    def name(self, *numbers: int, num_known: int = 0) -> None:
        self.events.named(numbers, b"".join(map(name_of, numbers)), num_known)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_what_is_there_when_it_is_named_is_told(engine: Engine) -> None:
    """Another engine, or an earlier start of this one, has stored it."""
    engine.sidecar.put(1, MEMORY_TIER)
    engine.sidecar.put(2, DISK_TIER)
    engine.name(1, 2, 3)
    engine.events.round()
    assert [engine.router.where(one) for one in (1, 2, 3)] == [IN_MEMORY, ON_DISK, 0]


def test_what_moves_is_told_by_its_place(engine: Engine) -> None:
    engine.name(1)
    engine.events.round()
    for tier, place in ((MEMORY_TIER, IN_MEMORY), (DISK_TIER, IN_MEMORY | ON_DISK)):
        engine.sidecar.put(1, tier)
        engine.events.round()
        assert engine.router.where(1) == place
    engine.sidecar.drop(1, MEMORY_TIER)
    engine.events.round()
    assert engine.router.where(1) == ON_DISK
    engine.sidecar.drop(1, DISK_TIER)
    engine.events.round()
    assert engine.router.where(1) == 0


def test_a_chunk_counts_once_every_rank_has_its_part(engine: Engine) -> None:
    engine.name(1)
    engine.sidecar.put(1, MEMORY_TIER, ranks=[0])
    engine.events.round()
    assert engine.router.where(1) == 0
    engine.sidecar.put(1, DISK_TIER, ranks=[1])
    engine.events.round()
    assert engine.router.where(1) == ON_DISK, "the slower place"


def test_chunks_of_others_are_neither_told_nor_asked_about(engine: Engine) -> None:
    engine.name(1)
    engine.events.round()
    asked = engine.sidecar.num_asked
    engine.sidecar.put(7, MEMORY_TIER)
    engine.events.round()
    assert engine.sidecar.num_asked == asked
    assert not engine.router.believed


def test_much_news_is_told_in_slices(engine: Engine) -> None:
    """Between them the engine's step gets the GIL."""
    numbers = range(1, 5 * SLICE)
    for number in numbers:
        engine.sidecar.put(number, MEMORY_TIER)
    engine.name(*numbers)
    engine.events.round()
    assert max(engine.sizes) == SLICE
    assert all(engine.router.where(number) for number in numbers)


def test_a_chunk_that_goes_without_a_word_is_noticed(engine: Engine) -> None:
    """Such as one that has expired and is not swept yet. A round asks about few that are there."""
    numbers = range(1, 1 + 2 * CHECK_ROUNDS)
    for number in numbers:
        engine.sidecar.put(number, MEMORY_TIER)
    engine.name(*numbers)
    engine.events.round()
    for lane in LANES:
        engine.sidecar.tiers[MEMORY_TIER].discard(lane.key(name_of(7)))
    asked = engine.sidecar.num_asked
    for _ in range(CHECK_ROUNDS):
        engine.events.round()
    assert engine.router.where(7) == 0
    assert engine.sidecar.num_asked - asked <= 2 * RANKS * len(numbers)


def test_more_changes_than_the_log_names_make_it_ask_about_all(engine: Engine) -> None:
    engine.name(1)
    engine.sidecar.put(1, MEMORY_TIER)
    engine.events.round()
    engine.sidecar.drop(1, MEMORY_TIER)
    for number in range(1000, 1000 + MAX_CHANGED):
        engine.sidecar.put(number, MEMORY_TIER)
    engine.events.round()
    assert engine.router.where(1) == 0


@pytest.mark.parametrize("keeps_memory", [False, True])
def test_a_sidecar_that_was_replaced_is_asked_about_all(engine: Engine, keeps_memory: bool) -> None:
    engine.name(1)
    engine.sidecar.put(1, MEMORY_TIER)
    engine.events.round()
    engine.sidecar.restart(keeps_memory=keeps_memory)
    engine.sidecar.put(2, MEMORY_TIER)  # its log is as long as the one before
    engine.events.round()
    assert engine.router.where(1) == (IN_MEMORY if keeps_memory else 0)


def test_a_sidecar_that_does_not_answer_is_believed_for_a_moment(engine: Engine) -> None:
    engine.name(1)
    engine.sidecar.put(1, MEMORY_TIER)
    engine.events.round()
    engine.sidecar.answers = False
    engine.now += GONE_S / 2
    engine.events.round()
    assert engine.router.where(1) == IN_MEMORY
    engine.now += GONE_S
    engine.events.round()
    assert engine.router.where(1) == 0
    engine.sidecar.answers = True
    engine.events.round()
    assert engine.router.where(1) == IN_MEMORY


def test_after_routers_have_forgotten_everything_it_is_told_again(engine: Engine) -> None:
    engine.name(1)
    engine.sidecar.put(1, MEMORY_TIER)
    engine.events.round()
    engine.forget_told()
    engine.events.round()
    assert engine.router.where(1) == IN_MEMORY


def test_what_is_told_while_routers_forget_everything_can_be_taken_back(engine: Engine) -> None:
    """vLLM says so in a step, and a round may have told more since."""
    engine.name(1)
    engine.sidecar.put(1, MEMORY_TIER)
    engine.events.round()
    engine.events.cleared()
    engine.sidecar.answers = False
    engine.events.round()
    engine.now += 2 * GONE_S
    engine.events.round()
    assert not engine.router.believed


def test_chunks_that_will_not_be_loaded_again_are_taken_back(engine: Engine) -> None:
    engine.name(1)
    engine.sidecar.put(1, MEMORY_TIER)
    engine.events.round()
    engine.events.forget()
    engine.events.round()
    assert not engine.router.believed
    engine.sidecar.drop(1, MEMORY_TIER)
    engine.sidecar.put(1, MEMORY_TIER)
    engine.events.round()
    assert not engine.router.believed


def test_the_chunks_named_longest_ago_are_taken_back_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_CHUNKS", 3)
    for number in range(1, 6):
        engine.sidecar.put(number, MEMORY_TIER)
    engine.name(1, 2, 3)
    engine.events.round()
    engine.name(1, 4, num_known=1)
    engine.events.round()
    assert [one for one in range(1, 6) if engine.router.where(one)] == [1, 3, 4]


def test_a_chunk_is_told_after_the_one_before_it(engine: Engine) -> None:
    """Whatever the order in which they are found."""
    engine.name(1, 2, 4)
    engine.name(1, 2, 5, num_known=2)
    engine.events.round()
    for number in (5, 4, 2, 1):
        engine.sidecar.put(number, MEMORY_TIER)
    engine.events.round()
    assert all(engine.skipping.where(number) == IN_MEMORY for number in (1, 2, 4, 5))


@pytest.mark.parametrize("tier", [MEMORY_TIER, DISK_TIER])
def test_a_chunk_without_the_one_before_it_is_told_again_with_it(engine: Engine, tier: str) -> None:
    engine.name(1, 2, 4)
    for number in (2, 4):
        engine.sidecar.put(number, tier)
    engine.events.round()
    assert engine.router.where(4), "it may be of use after what the GPU has"
    assert not engine.skipping.believed
    engine.sidecar.put(1, MEMORY_TIER)
    engine.events.round()
    assert engine.skipping.believed.keys() == engine.router.believed.keys()
    engine.sidecar.drop(4, tier)
    engine.events.round()
    assert not engine.skipping.where(4)


@pytest.mark.parametrize("seed", range(4))
def test_a_router_believes_what_is_there_whatever_happens(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    named: set[int] = set()
    sidecar = engine.sidecar
    for _ in range(400):
        number = rng.randrange(40)
        tier = rng.choice((MEMORY_TIER, DISK_TIER))
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                sidecar.put(number, tier, rng.choice(([0], [1], range(RANKS))))
            case 4 | 5:
                sidecar.drop(number, tier)
            case 6 | 7:
                prompt = prompt_to(rng.randrange(1, 40))
                engine.name(*prompt)
                named.update(prompt)
            case 8:
                sidecar.restart(keeps_memory=rng.random() < 0.5)
            case 9:
                sidecar.answers = not sidecar.answers
            case 10:
                engine.forget_told()
            case 11:
                engine.now += rng.random()
        if rng.random() < 0.5:
            engine.events.round()
            if sidecar.answers:
                there = {one: sidecar.where(one) for one in named}
                assert {one: engine.router.where(one) for one in range(40)} == {
                    one: there.get(one, 0) for one in range(40)
                }
                for one in named:
                    is_of_use = all(there[before] for before in prompt_to(one))
                    assert engine.skipping.where(one) == there[one] or not is_of_use


def test_an_unexpected_error_ends_it_and_takes_everything_back(engine: Engine) -> None:
    """The engine serves without it, and routers must not believe what is no longer followed."""
    engine.name(1)
    engine.sidecar.put(1, MEMORY_TIER)
    engine.events.round()
    engine.events.named(None, name_of(2), 0)
    engine.events.open()
    wait_until(lambda: not engine.router.believed)
    engine.events.close()
