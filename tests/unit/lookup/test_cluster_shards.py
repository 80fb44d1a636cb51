"""What a cluster's answers are taken for, when its servers refuse, redirect or vanish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from lmcache_lookup.index.cluster_map import ClusterMap
from lmcache_lookup.index.cluster_shards import MASTERS_FRESH_S, MAX_REDIRECTIONS, ClusterShards
from lmcache_lookup.index.packing import bucket_key
from lmcache_lookup.index.redis_node import Command
from lmcache_lookup.index.redis_shards import MastersSeen
from redis.exceptions import AskError, MovedError, ResponseError
from redis.exceptions import ConnectionError as LostConnectionError

from tests.fixtures.broker import FakeClock

HALF = 8192
LOW, HIGH = (Command(key, ("GET", key)) for key in (bucket_key("t", 0), bucket_key("t", 63)))


class Server:
    """Answers what it is told to, and the slots as the test says."""

    is_idle = True

    def __init__(self, slots: Callable[[], list[Any]], answer: Any) -> None:
        self._slots = slots
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        if commands[0].words == ("CLUSTER", "SLOTS"):
            return [self._slots()]
        self.asked += [command.words for command in commands]
        if isinstance(self.answer, LostConnectionError):
            raise self.answer
        return [
            self.answer(command) if callable(self.answer) else self.answer for command in commands
        ]

    async def ask(self, command: Command) -> Any:
        self.asked.append(("ASKING", *command.words))
        return b"asked"

    async def close(self) -> None:
        pass


class World:
    """Two servers, each of which has half of the slots until that is changed."""

    def __init__(self, a: Any, b: Any) -> None:
        self.owners = ("a", "b")
        self.a, self.b = Server(self.slots, a), Server(self.slots, b)
        self.clock = FakeClock()
        self.map = ClusterMap([("a", 1)], lambda address: {"a": self.a, "b": self.b}[address[0]])  # type: ignore[arg-type, return-value]
        self.shards = ClusterShards(self.map, 0.8, self.clock)

    def slots(self) -> list[Any]:
        low, high = (owner.encode() for owner in self.owners)
        return [[0, HALF - 1, [low, 1]], [HALF, 2 * HALF - 1, [high, 1]]]


async def test_each_is_asked_for_its_own() -> None:
    world = World(b"low", b"high")
    assert await world.shards.many([HIGH, LOW, HIGH]) == [b"high", b"low", b"high"]
    assert (world.a.asked, world.b.asked) == ([LOW.words], [HIGH.words] * 2)
    assert await world.shards.many([]) == []


@pytest.mark.parametrize("is_low_refused", [True, False])
async def test_an_answer_that_is_lost_says_more_than_one_that_is_refused(
    is_low_refused: bool,
) -> None:
    lost, refused = LostConnectionError("gone"), ResponseError("OOM")
    world = World(*((refused, lost) if is_low_refused else (lost, refused)))
    with pytest.raises(LostConnectionError):
        await world.shards.many([LOW, HIGH])
    assert world.map.is_stale


async def test_a_refusal_is_raised_when_all_have_answered() -> None:
    world = World(ResponseError("OOM"), b"high")
    with pytest.raises(ResponseError, match="OOM"):
        await world.shards.many([LOW, HIGH])
    assert world.b.asked == [HIGH.words]


async def test_only_what_has_moved_is_sent_again() -> None:
    world = World(b"low", b"high")

    def move(command: Command) -> Any:
        world.owners = ("b", "b")
        return MovedError("1 b:1")

    world.a.answer = move
    assert await world.shards.many([LOW, HIGH]) == [b"high", b"high"]
    assert world.b.asked == [HIGH.words, LOW.words]


async def test_who_is_sent_in_circles_gives_up() -> None:
    world = World(MovedError("1 b:1"), b"high")
    with pytest.raises(MovedError):
        await world.shards.many([LOW])
    assert len(world.a.asked) == MAX_REDIRECTIONS


async def test_a_slot_on_its_way_is_asked_for_where_it_goes() -> None:
    world = World(AskError("1 b:1"), b"high")
    assert await world.shards.many([LOW, HIGH]) == [b"asked", b"high"]
    assert ("ASKING", *LOW.words) in world.b.asked


def about(
    role: str, run_id: str, epoch: int, mark: bytes | None = None
) -> Callable[[Command], Any]:
    """A server that tells of itself, and of the marks of its buckets, else it refuses."""
    texts = {
        ("INFO", "server"): f"# Server\r\nrun_id:{run_id}\r\n",
        ("INFO", "replication"): f"role:{role}\r\n",
        ("CLUSTER", "INFO"): f"cluster_state:ok\r\ncluster_current_epoch:{epoch}\r\n",
    }
    return lambda command: (
        texts[command.words].encode() if command.words in texts else mark or ResponseError("OOM")
    )


async def test_masters_are_seen_anew_after_a_while() -> None:
    world = World(about("master", "bb", 7), about("master", "aa", 8))
    assert await world.shards.masters_seen() == MastersSeen(8, "aa,bb")
    world.a.answer = about("master", "cc", 9)
    assert await world.shards.masters_seen() == MastersSeen(8, "aa,bb")
    world.clock.now_s += MASTERS_FRESH_S
    assert await world.shards.masters_seen() == MastersSeen(9, "aa,cc")


async def test_marks_of_buckets_are_seen_where_they_are_told() -> None:
    world = World(about("master", "bb", 7, b"1"), about("master", "aa", 8, b"2"))
    assert await world.shards.masters_seen() == MastersSeen(
        8, "aa,bb", ",".join("1" * 32 + "2" * 32)
    )
    world.b.answer = about("master", "aa", 8)
    world.clock.now_s += MASTERS_FRESH_S
    assert await world.shards.masters_seen() == MastersSeen(8, "aa,bb")


@pytest.mark.parametrize(
    "second", [about("slave", "aa", 8), LostConnectionError("gone"), ResponseError("NOPERM")]
)
async def test_masters_are_not_seen_when_one_is_none_or_does_not_answer(second: Any) -> None:
    world = World(about("master", "bb", 7), second)
    assert await world.shards.masters_seen() == MastersSeen()
    assert world.map.is_stale


async def test_a_user_that_may_not_ask_who_is_there_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(about("master", "bb", 7), ResponseError("NOPERM this user has no permissions"))
    for _ in range(3):
        world.clock.now_s += MASTERS_FRESH_S
        await world.shards.masters_seen()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NOPERM" in caplog.text
    world.b.answer = about("master", "aa", 8)
    world.clock.now_s += MASTERS_FRESH_S
    assert await world.shards.masters_seen() == MastersSeen(8, "aa,bb")
