"""The radix database against a dict of prefixes with exact least-recently-used eviction, and
against the one that only hashes.
"""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan, RadixTokenDatabase

from tests.suites.token_database_suite import CHUNK_SIZE, METADATA, make_config, named

MAX_CHUNKS = 7
SEQUENCES = st.lists(st.sampled_from([0, 1]), max_size=9)
Prefix = tuple[int, ...]


class Eviction(RuleBasedStateMachine):
    """Sequences of whole chunks, each of one repeated token."""

    def __init__(self) -> None:
        super().__init__()
        self.radix = RadixTokenDatabase(make_config(), METADATA, MAX_CHUNKS * CHUNK_SIZE)
        self.last_use: dict[Prefix, int] = {}
        self.num_uses = 0

    @rule(sequence=SEQUENCES)
    def name(self, sequence: list[int]) -> None:
        self.num_uses += 1
        named(self.radix, [token for token in sequence for _ in range(CHUNK_SIZE)])
        prefixes = [tuple(sequence[: i + 1]) for i in range(len(sequence))]
        self.last_use.update(dict.fromkeys(prefixes[:MAX_CHUNKS], self.num_uses))
        while len(self.last_use) > MAX_CHUNKS:
            inner = {prefix[:-1] for prefix in self.last_use}
            leaves = [prefix for prefix in self.last_use if prefix not in inner]
            del self.last_use[min(leaves, key=self.last_use.__getitem__)]

    @rule(sequence=SEQUENCES)
    def measure(self, sequence: list[int]) -> None:
        tokens = torch.tensor([t for t in sequence for _ in range(CHUNK_SIZE)], dtype=torch.int64)
        prefixes = [tuple(sequence[: i + 1]) for i in range(len(sequence))]
        num_known = sum(prefix in self.last_use for prefix in prefixes)
        assert self.radix.longest_prefix(tokens) == num_known * CHUNK_SIZE

    @invariant()
    def holds_exactly_what_the_model_holds(self) -> None:
        self.radix.check_integrity()
        assert self.radix.num_chunks == len(self.last_use)


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
        ids = torch.tensor(tokens, dtype=torch.int64)
        assert self.radix.longest_prefix(ids, spans) == min(
            len(tokens) // CHUNK_SIZE * CHUNK_SIZE, MAX_TOKENS
        )

    @rule(salt=st.sampled_from(["", "a"]))
    def use_salt(self, salt: str) -> None:
        for database in (self.radix, self.hashing):
            database.use_salt(salt)
        assert self.radix.num_chunks == 0

    @rule()
    def clear(self) -> None:
        self.radix.clear()
        assert self.radix.num_chunks == 0

    @invariant()
    def books_balance(self) -> None:
        self.radix.check_integrity()
        assert self.radix.num_chunks * CHUNK_SIZE <= MAX_TOKENS


Eviction.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
Database.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestEviction = Eviction.TestCase
TestDatabase = Database.TestCase
