"""How much can be loaded: the shortest of the groups' prefixes whose windows are there too."""

from __future__ import annotations

import hashlib

from lmcache_core.engine.stores import SidecarClient
from lmcache_core.integrations.vllm.identity import FMT, KVIdentity
from lmcache_core.integrations.vllm.requests import Offer
from lmcache_core.integrations.vllm.scheduler import MAX_WINDOW_TRIES, Offers
from lmcache_core.integrations.vllm.stores import open_store
from lmcache_core.record import Staged, StagedFrom
from lmcache_core.telemetry import Counters

from tests.fixtures.vllm_engine import FULL, STATE, Shape, local, window
from tests.fixtures.vllm_engine.parts import METADATA, ScriptedStore, groups_of, hot, options_of
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE

HASHES = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(5))
HYBRID = Shape((FULL, window(10)))
STATES = Shape((FULL, STATE), block_size=8)
NUM_TOKENS = 42


def ask(store: ScriptedStore, shape: Shape, num_ranks: int = 1) -> tuple[Offer, bool]:
    offers = Offers(store, KVIdentity(METADATA, num_ranks, 1), groups_of(shape), CHUNK_SIZE)  # type: ignore[arg-type]
    return offers.ask("r", HASHES, NUM_TOKENS, None)


def test_connectors_of_one_engine_have_tickets_of_their_own() -> None:
    """As children of a `MultiConnector` they are told of the same requests, and inside vLLM they
    share a store.
    """
    opened = open_store(
        SidecarClient("engine"), options_of().engine, METADATA, Counters(), lambda salt: None
    )
    staging = opened.store._staging  # type: ignore[attr-defined]
    try:
        identity = KVIdentity(METADATA, 1, 1)
        offers = [Offers(opened.store, identity, groups_of(Shape()), CHUNK_SIZE) for _ in range(2)]
        for one in offers:
            one.ask("r", HASHES, NUM_TOKENS, None)
        assert staging.num_tickets == 2
        offers[0].give_back(["r"])
        assert staging.num_tickets == 1, "one has given back what the other was promised"
        offers[1].give_back(["r"])
        assert staging.num_tickets == 0
    finally:
        opened.close()


def test_one_group() -> None:
    store = ScriptedStore([hot(3)])
    assert ask(store, Shape(), num_ranks=2) == (Offer(3, b"\1\1\1"), True)
    ((ticket, (chain,), is_prefix),) = store.asked
    assert (ticket, chain.fmt, chain.model_name, chain.world_size, chain.group, is_prefix) == (
        "r",
        FMT,
        "model",
        2,
        "",
        True,
    )
    assert chain.hashes == HASHES


def test_a_lift_that_goes_on_is_not_final() -> None:
    assert ask(ScriptedStore([hot(2, is_ready=False)]), Shape()) == (Offer(2, b"\1\1"), False)


def test_a_store_that_is_away_offers_nothing_and_more_will_not_come() -> None:
    assert ask(ScriptedStore([None]), Shape()) == (Offer(0), True)
    assert ask(ScriptedStore([hot(5), None]), HYBRID) == (Offer(0), True)


def test_of_several_full_groups_the_shortest_counts_and_the_slowest_tier() -> None:
    tiers = (bytes([1, StagedFrom.DISK, 1, 1, 1]), bytes([StagedFrom.REMOTE, 1, 1, 0, 0]))
    offer, _ = ask(ScriptedStore([Staged(True, tiers)]), Shape((FULL, FULL)))
    assert offer == Offer(3, bytes([StagedFrom.REMOTE, StagedFrom.DISK, 1]))


def test_of_a_window_only_its_own_chunks_are_asked_for() -> None:
    store = ScriptedStore([hot(5), Staged(True, (b"\1\1",))])
    offer, is_final = ask(store, HYBRID)
    assert (offer.num_chunks, is_final) == (5, True)
    (_, (whole,), _), (ticket, (windowed,), is_prefix) = store.asked
    assert (whole.group, windowed.group, ticket, is_prefix) == (
        "0:full",
        "1:window10",
        "r/window",
        False,
    )
    assert windowed.hashes == HASHES[96:160], "40 tokens: the next one sees 31 to 40"


def test_windows_are_asked_for_when_it_is_known_up_to_where() -> None:
    store = ScriptedStore([hot(2, is_ready=False)])
    assert ask(store, HYBRID) == (Offer(2, b"\1\1"), False)
    assert len(store.asked) == 1


def test_a_missing_chunk_of_a_window_shortens_the_offer_to_in_front_of_it() -> None:
    """Of chunks 3 and 4 the fourth is missing: a prefix of 4 chunks needs 2 and 3."""
    store = ScriptedStore([hot(5), Staged(True, (b"\1\0",)), Staged(True, (b"\1\1",))])
    offer, _ = ask(store, HYBRID)
    assert offer.num_chunks == 4, "a later chunk of the full group is there"
    assert [chains[0].hashes for _, chains, _ in store.asked[1:]] == [
        HASHES[96:160],
        HASHES[64:128],
    ]


def test_the_first_missing_chunk_decides() -> None:
    """Every prefix between it and the one that was tried has it in its window, too: none of them
    is worth a try.
    """
    store = ScriptedStore([hot(5), Staged(True, (b"\0\0",)), Staged(True, (b"\1\1",))])
    offer, _ = ask(store, HYBRID)
    assert offer.num_chunks == 3
    assert len(store.asked) == 3


def test_of_several_windows_the_earliest_missing_chunk_decides() -> None:
    shape = Shape((FULL, window(10), window(18)))
    store = ScriptedStore(
        [hot(5), Staged(True, (b"\1\0", b"\1\0\1")), Staged(True, (b"\1\1", b"\1\1\1"))]
    )
    offer, _ = ask(store, shape)
    assert offer.num_chunks == 3


def test_windows_that_are_still_lifted_are_waited_for() -> None:
    assert ask(ScriptedStore([hot(5), Staged(False, (b"\1\0",))]), HYBRID) == (Offer(0), False)


def test_windows_alone() -> None:
    store = ScriptedStore([Staged(True, (b"\1\1",))])
    assert ask(store, Shape((window(10),))) == (Offer(5, bytes([StagedFrom.HOT]) * 5), True)
    assert [ticket for ticket, _, _ in store.asked] == ["r/window"]


def test_tries_are_bounded() -> None:
    store = ScriptedStore(
        [Staged(True, (b"\1\0",))]
    )  # it finds the last one missing, whatever it is asked
    many = bytes(32 * 100)
    offers = Offers(store, KVIdentity(METADATA, 1, 1), groups_of(Shape((window(10),))), CHUNK_SIZE)  # type: ignore[arg-type]
    assert offers.ask("r", many, 802, None) == (Offer(0), True)
    assert len(store.asked) == MAX_WINDOW_TRIES


def test_recurrent_state_is_searched_for_backwards() -> None:
    """There is state after chunk 0 alone: not after the last one, nor after the four before it."""
    store = ScriptedStore(
        [hot(5), Staged(True, (b"\0",)), Staged(True, (b"\1\0\0\0",)), Staged(True, (b"\1",))]
    )
    assert ask(store, STATES) == (Offer(1, b"\1"), True)
    assert [chains[0].hashes for _, chains, _ in store.asked[1:]] == [
        HASHES[128:160],
        HASHES[:128],
        HASHES[:32],
    ]


def test_at_the_end_of_a_section_nothing_of_it_is_needed() -> None:
    store = ScriptedStore([hot(4)])
    assert ask(store, Shape((FULL, local(16))))[0].num_chunks == 4
    assert len(store.asked) == 1
    store = ScriptedStore([hot(5), Staged(True, (b"\1",))])
    assert ask(store, Shape((FULL, local(16))))[0].num_chunks == 5
    alone = ScriptedStore([Staged(True, (b"\1\1\1",))])
    assert ask(alone, Shape((local(40),)))[0].num_chunks == 4, "else nothing would have been found"


def test_recurrent_state_that_is_nowhere() -> None:
    store = ScriptedStore([hot(5), Staged(True, (b"\0",)), Staged(True, (b"\0\0\0\0",))])
    assert ask(store, STATES) == (Offer(0), True)
    assert len(store.asked) == 3


def test_recurrent_state_that_all_groups_have() -> None:
    shape = Shape((FULL, STATE, STATE, window(10)), block_size=8)
    store = ScriptedStore(
        [
            hot(5),
            Staged(True, (b"\1", b"\0", b"\1\1")),
            Staged(True, (b"\1\1\0\1", b"\1\1\1\0", b"\1\1")),
            Staged(True, (b"\1", b"\1", b"\1\1")),
        ]
    )
    assert ask(store, shape) == (Offer(2, b"\1\1"), True)


def test_a_search_for_recurrent_state_goes_on_where_it_was() -> None:
    store = ScriptedStore(
        [
            hot(5),
            Staged(True, (b"\0",)),
            Staged(False, (b"\0\0\0\0",)),
            Staged(True, (b"\0\0\1\0",)),
            Staged(True, (b"\1",)),
        ]
    )
    offers = Offers(store, KVIdentity(METADATA, 1, 1), groups_of(STATES), CHUNK_SIZE)  # type: ignore[arg-type]
    assert offers.ask("r", HASHES, NUM_TOKENS, None) == (Offer(0), False)
    assert offers.ask("r", HASHES, NUM_TOKENS, None) == (Offer(3, b"\1\1\1"), True)
    assert len(store.asked) == 5


def test_recurrent_state_after_the_last_token_is_of_no_use() -> None:
    """The forward pass needs one token, and continues from the state before it."""
    store = ScriptedStore([hot(5), Staged(True, (b"\1",))])
    offers = Offers(store, KVIdentity(METADATA, 1, 1), groups_of(STATES), CHUNK_SIZE)  # type: ignore[arg-type]
    assert offers.ask("r", HASHES, 39, None) == (Offer(4, b"\1\1\1\1"), True)


def test_tickets_are_given_back_in_all_their_names() -> None:
    for shape, names in ((Shape(), ["a", "b"]), (HYBRID, ["a", "b", "a/window", "b/window"])):
        store = ScriptedStore([None])
        offers = Offers(store, KVIdentity(METADATA, 1, 1), groups_of(shape), CHUNK_SIZE)  # type: ignore[arg-type]
        for name in ("a", "b"):
            offers.ask(name, HASHES, NUM_TOKENS, None)
        offers.give_back(["a", "not asked for", "b"])
        offers.give_back(["a", "b"])
        assert store.given_back == names
    store = ScriptedStore([None])
    Offers(store, KVIdentity(METADATA, 1, 1), groups_of(HYBRID), CHUNK_SIZE).give_back([])  # type: ignore[arg-type]
    assert store.given_back == []
