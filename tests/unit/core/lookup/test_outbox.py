"""Numbering, acknowledgement and loss."""

from __future__ import annotations

from collections import deque

import pytest
from lmcache_core.lookup import Outbox, StoreEvent


def event(number: int) -> StoreEvent:
    return StoreEvent("store", f"{number:032x}", "hot", number)


def begun(*numbers: int, max_pending: int = 4) -> Outbox:
    outbox = Outbox(max_pending)
    outbox.begin(1)
    outbox.announce(deque(event(n) for n in numbers))
    return outbox


def test_begins_in_need_of_a_resync_and_keeps_nothing_until_then() -> None:
    outbox = Outbox(4)
    assert outbox.needs_resync
    outbox.add(event(1))
    assert outbox.num_unacknowledged == 0


def test_announcement_first_then_what_happened_since() -> None:
    outbox = begun(1, 2)
    outbox.add(event(3))
    assert outbox.batch(2) == (0, [event(1), event(2)])
    outbox.acknowledge(2)
    assert outbox.batch(8) == (2, [event(3)])


def test_an_unacknowledged_batch_is_sent_again() -> None:
    outbox = begun(1, 2, 3)
    assert outbox.batch(2) == outbox.batch(2)
    outbox.acknowledge(1)
    assert outbox.batch(1) == (1, [event(2)])


@pytest.mark.parametrize("next_sequence", [3, 99])
def test_acknowledging_what_was_not_sent_loses_everything(next_sequence: int) -> None:
    outbox = begun(1, 2, 3)
    outbox.batch(2)
    outbox.acknowledge(next_sequence)
    assert outbox.needs_resync


def test_a_service_that_forgot_is_noticed() -> None:
    outbox = begun(1, 2)
    outbox.batch(2)
    outbox.acknowledge(2)
    outbox.acknowledge(0)
    assert outbox.needs_resync


def test_overflow_asks_for_a_resync_once() -> None:
    outbox = begun(max_pending=2)
    for number in range(5):
        outbox.add(event(number))
    assert (outbox.needs_resync, outbox.num_overflows, outbox.num_unacknowledged) == (True, 1, 0)


def test_the_announcement_does_not_count_towards_the_bound() -> None:
    outbox = begun(*range(10), max_pending=1)
    outbox.add(event(11))
    assert outbox.num_unacknowledged == 11
    assert not outbox.needs_resync


def test_an_incarnation_only_rises() -> None:
    outbox = begun()
    with pytest.raises(AssertionError):
        outbox.begin(1)
