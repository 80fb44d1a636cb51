"""How much can be loaded: the shortest of the groups' prefixes whose windows are there, too."""

from __future__ import annotations

import hashlib

import pytest
from lmcache_core.integrations.vllm.identity import KVIdentity
from lmcache_core.integrations.vllm.requests import Offer
from lmcache_core.integrations.vllm.scheduler import MAX_WINDOW_TRIES, Offers, Wanted
from lmcache_core.record import Staged, StagedFrom

from tests.fixtures.vllm_engine import FULL, STATE, Shape, local, window
from tests.fixtures.vllm_engine.parts import METADATA, ScriptedStore, groups_of, hot
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE

HASHES = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(5))
HYBRID = Shape((FULL, window(10)))
STATES = Shape((FULL, STATE), block_size=8)
WANTED = Wanted(HASHES, 42)


def offers_of(store: ScriptedStore, shape: Shape, num_ranks: int = 1) -> Offers:
    return Offers(store, KVIdentity(METADATA, num_ranks, 1), groups_of(shape), CHUNK_SIZE)  # type: ignore[arg-type]


def ask(store: ScriptedStore, shape: Shape, num_ranks: int = 1) -> tuple[Offer, bool]:
    return offers_of(store, shape, num_ranks).ask("r", WANTED, None)


def windows(*tiers: bytes, is_ready: bool = True) -> Staged:
    return Staged(is_ready, tiers)


def asked_of_windows(store: ScriptedStore, first: int = 1) -> list[bytes]:
    """The hashes of the first group with windows in each question from this one on."""
    return [chains[0].hashes for _, chains, _ in store.asked[first:]]


def test_connectors_of_one_engine_have_their_own_tickets() -> None:
    """As children of a `MultiConnector` they get the same requests, and inside vLLM they share a
    store.
    """
    names: list[str] = []

    class Noting(ScriptedStore):
        def stage(self, ticket: str, *args: object, **options: object) -> Staged | None:
            names.append(ticket)
            return super().stage(ticket, *args, **options)  # type: ignore[arg-type]

        def unstage(self, tickets: object) -> None:
            names.extend(tickets)  # type: ignore[arg-type]

    offers = [offers_of(Noting([hot(3)]), Shape()) for _ in range(2)]
    for one in offers:
        one.ask("r", WANTED, None)
    for one in offers:
        one.give_back(["r"])
    assert names[0] == names[2] != names[1] == names[3]


@pytest.mark.parametrize(
    ("shape", "answers", "offer", "is_final"),
    [
        (Shape(), [hot(2, is_ready=False)], Offer(2, b"\1\1"), False),
        (Shape(), [None], Offer(0), True),
        (HYBRID, [hot(5), None], Offer(0), True),
        (HYBRID, [hot(2, is_ready=False)], Offer(2, b"\1\1"), False),
        (HYBRID, [hot(5), windows(b"\1\0", is_ready=False)], Offer(0), False),
        (Shape((window(10),)), [windows(b"\1\1")], Offer(5, bytes([StagedFrom.HOT]) * 5), True),
    ],
    ids=["lift", "away", "away later", "lift of a hybrid", "lift of a window", "windows alone"],
)
def test_offers(shape: Shape, answers: list[Staged | None], offer: Offer, is_final: bool) -> None:
    store = ScriptedStore(answers.copy())
    assert ask(store, shape) == (offer, is_final)
    assert len(store.asked) == len(answers)


def test_shortest_of_several_full_groups_and_its_slowest_tier_count() -> None:
    tiers = (bytes([1, StagedFrom.DISK, 1, 1, 1]), bytes([StagedFrom.REMOTE, 1, 1, 0, 0]))
    offer, _ = ask(ScriptedStore([Staged(True, tiers)]), Shape((FULL, FULL)))
    assert offer == Offer(3, bytes([StagedFrom.REMOTE, StagedFrom.DISK, 1]))


def test_only_the_chunks_of_a_window_are_asked_for() -> None:
    store = ScriptedStore([hot(5), windows(b"\1\1")])
    offer, is_final = ask(store, HYBRID)
    assert (offer.num_chunks, is_final) == (5, True)
    (_, (whole,), _), (ticket, (windowed,), is_prefix) = store.asked
    assert (whole.group, windowed.group) == ("0:full", "1:window10")
    assert (ticket, is_prefix) == ("r/window", False)
    assert windowed.hashes == HASHES[96:160], "40 tokens: the next one sees 31 to 40"


def test_missing_chunk_of_a_window_shortens_the_offer() -> None:
    """Of chunks 3 and 4 the fourth is missing: a prefix of 4 chunks needs 2 and 3."""
    store = ScriptedStore([hot(5), windows(b"\1\0"), windows(b"\1\1")])
    assert ask(store, HYBRID)[0].num_chunks == 4, "a later chunk of the full group is there"
    assert asked_of_windows(store) == [HASHES[96:160], HASHES[64:128]]


@pytest.mark.parametrize(
    ("shape", "answers"),
    [
        (HYBRID, [windows(b"\0\0"), windows(b"\1\1")]),
        (
            Shape((FULL, window(10), window(18))),
            [windows(b"\1\0", b"\1\0\1"), windows(b"\1\1", b"\1\1\1")],
        ),
    ],
    ids=["one window", "several"],
)
def test_first_missing_chunk_decides(shape: Shape, answers: list[Staged | None]) -> None:
    """Every prefix between it and the one that was tried has it in its window, too."""
    store = ScriptedStore([hot(5), *answers])
    assert ask(store, shape)[0].num_chunks == 3
    assert len(store.asked) == 3


def test_tries_are_bounded() -> None:
    store = ScriptedStore([windows(b"\1\0")])  # the last one is missing, whatever is asked
    offers = offers_of(store, Shape((window(10),)))
    assert offers.ask("r", Wanted(bytes(32 * 100), 802), None) == (Offer(0), True)
    assert len(store.asked) == MAX_WINDOW_TRIES


def test_recurrent_state_is_searched_backwards() -> None:
    """There is state after chunk 0 alone: not after the last one, nor after the four before it."""
    store = ScriptedStore([hot(5), windows(b"\0"), windows(b"\1\0\0\0"), windows(b"\1")])
    assert ask(store, STATES) == (Offer(1, b"\1"), True)
    assert asked_of_windows(store) == [HASHES[128:160], HASHES[:128], HASHES[:32]]


def test_search_for_recurrent_state_continues_where_it_was() -> None:
    store = ScriptedStore(
        [
            hot(5),
            windows(b"\0"),
            windows(b"\0\0\0\0", is_ready=False),
            windows(b"\0\0\1\0"),
            windows(b"\1"),
        ]
    )
    offers = offers_of(store, STATES)
    assert offers.ask("r", WANTED, None) == (Offer(0), False)
    assert offers.ask("r", WANTED, None) == (Offer(3, b"\1\1\1"), True)
    assert len(store.asked) == 5


def test_nothing_is_needed_at_the_end_of_a_section() -> None:
    store = ScriptedStore([hot(4)])
    assert ask(store, Shape((FULL, local(16))))[0].num_chunks == 4
    assert len(store.asked) == 1
    store = ScriptedStore([hot(5), windows(b"\1")])
    assert ask(store, Shape((FULL, local(16))))[0].num_chunks == 5
    alone = ScriptedStore([windows(b"\1\1\1")])
    assert ask(alone, Shape((local(40),)))[0].num_chunks == 4, "else nothing would have been found"


def test_all_groups_need_their_recurrent_state() -> None:
    shape = Shape((FULL, STATE, STATE, window(10)), block_size=8)
    store = ScriptedStore(
        [
            hot(5),
            windows(b"\1", b"\0", b"\1\1"),
            windows(b"\1\1\0\1", b"\1\1\1\0", b"\1\1"),
            windows(b"\1", b"\1", b"\1\1"),
        ]
    )
    assert ask(store, shape) == (Offer(2, b"\1\1"), True)


def test_recurrent_state_after_the_last_token_is_not_used() -> None:
    """The forward pass needs one token, and continues from the state before it."""
    offers = offers_of(ScriptedStore([hot(5), windows(b"\1")]), STATES)
    assert offers.ask("r", Wanted(HASHES, 39), None) == (Offer(4, b"\1\1\1\1"), True)
