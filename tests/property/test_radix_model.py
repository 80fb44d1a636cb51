"""The radix database against the one that only hashes."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan, RadixTokenDatabase

from tests.suites.token_database_suite import CHUNK_SIZE, METADATA, make_config, named

MAX_TOKENS = 6 * CHUNK_SIZE
TOKENS = st.lists(st.sampled_from([0, 1, 2**32 - 1]), max_size=CHUNK_SIZE).flatmap(
    lambda chunk: st.integers(0, 8).flatmap(
        lambda repeats: st.lists(st.integers(0, 1), max_size=2 * CHUNK_SIZE).map(
            lambda end: chunk * repeats + end
        )
    )
)
SPANS = st.lists(
    st.builds(
        MultimodalSpan, st.sampled_from([b"cat", b"dog"]), st.integers(0, 20), st.integers(1, 9)
    ),
    max_size=2,
)


class Database(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.radix = RadixTokenDatabase(make_config(), METADATA, MAX_TOKENS)
        self.hashing = ChunkedTokenDatabase(make_config(), METADATA)

    @rule(tokens=TOKENS, spans=SPANS, skipped=st.integers(0, 9))
    def name(self, tokens: list[int], spans: list[MultimodalSpan], skipped: int) -> None:
        num_false = min(skipped, len(tokens) // CHUNK_SIZE) * CHUNK_SIZE
        mask = torch.arange(len(tokens)) >= num_false
        assert named(self.radix, tokens, mask, spans) == named(self.hashing, tokens, mask, spans)

    @rule(salt=st.sampled_from(["", "a"]))
    def use_salt(self, salt: str) -> None:
        for database in (self.radix, self.hashing):
            database.use_salt(salt)


Database.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDatabase = Database.TestCase
