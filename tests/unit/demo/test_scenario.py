"""What the demo calls a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lmcache_demo.document import long_document, prompts
from lmcache_demo.engine_messages import Answer
from lmcache_demo.scenario import HOT, NOWHERE, PEER, Step

PLAIN = Answer([1, 2], "", 3000, 0, {}, 0, 0, 0, 1.0)
HIT = Answer([1, 2], "", 3000, 2900, {HOT: 2900}, 1, 0, 0, 0.1)


def test_a_step_as_said_has_no_fault() -> None:
    assert Step("x", HOT, HIT, PLAIN).faults == []
    assert Step("x", NOWHERE, PLAIN, PLAIN).faults == []


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (Step("x", HOT, Answer([1, 3], "", 3000, 2900, {HOT: 2900}, 1, 0, 0, 0.1), PLAIN), "without a cache"),
        (Step("x", PEER, HIT, PLAIN), "expected sidecar A"),
        (Step("x", HOT, PLAIN, PLAIN), "expected own sidecar"),
        (Step("x", NOWHERE, HIT, PLAIN), "expected none"),
        (Step("x", HOT, Answer([1, 2], "", 3000, 100, {HOT: 100}, 1, 0, 0, 0.1), PLAIN), "only 100 tokens"),
        (Step("x", HOT, Answer([1, 2], "", 1500, 1500, {HOT: 1500}, 1, 0, 0, 0.1), PLAIN), "fewer than 2000"),
        (Step("x", HOT, Answer([1, 2], "", 3000, 2900, {HOT: 2000, PEER: 900}, 1, 0, 0, 0.1), PLAIN), "came from"),
    ],
)
def test_anything_else_is_a_fault(step: Step, fault: str) -> None:
    assert any(fault in found for found in step.faults)


def test_the_table_tells_a_difference() -> None:
    step = Step("x", HOT, HIT, PLAIN)
    assert step.tokens_equal
    assert not replace(step, reference=Answer([2, 1], "", 3000, 0, {}, 0, 0, 0, 1.0)).tokens_equal


def test_both_prompts_share_the_document_and_differ_behind_it() -> None:
    first, second = prompts()
    assert first != second
    assert first.startswith(long_document())
    assert second.startswith(long_document())
