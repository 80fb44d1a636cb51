from __future__ import annotations

from typing import Any

import pytest
import torch
from lmcache_core.documented import radix
from lmcache_core.errors import IntegrityError
from lmcache_core.token_database import (
    ChunkedTokenDatabase,
    MultimodalSpan,
    RadixTokenDatabase,
)

from tests.suites.token_database_suite import (
    CHUNK_SIZE,
    METADATA,
    branching_sequences,
    interleave,
    make_config,
    named,
)

CAT = [MultimodalSpan(b"cat", 5, 2)]


@pytest.fixture
def database():
    database = RadixTokenDatabase(make_config(), METADATA)
    yield database
    database.check_integrity()


@pytest.fixture
def num_hashed(monkeypatch):
    """Chunks that have been hashed: what the tree is there to save."""
    counted: list[Any] = []

    def counting(*args):
        for chunk in chain_hashes(*args):
            counted.append(chunk)
            yield chunk

    chain_hashes = radix.chain_hashes
    monkeypatch.setattr(radix, "chain_hashes", counting)
    return lambda: len([counted.pop() for _ in range(len(counted))])


def test_what_is_known_is_not_hashed_again(database, num_hashed):
    named(database, range(10))
    assert num_hashed() == 3
    named(database, range(8))
    assert num_hashed() == 0
    named(database, range(9))
    assert num_hashed() == 1, "a partial chunk is hashed every time"
    named(database, range(18))
    assert num_hashed() == 3, "two full chunks and a partial one are new"
    named(database, [*range(12), 0, 0, 0, 0])
    assert num_hashed() == 1, "the shared prefix is known"
    named(database, [0, *range(11)])
    assert num_hashed() == 3


def test_masked_chunks_are_known_too(database, num_hashed):
    named(database, range(12), torch.arange(12) >= 8)
    assert (num_hashed(), database.longest_prefix(torch.arange(12))) == (3, 12)
    named(database, range(12))
    assert num_hashed() == 0


@pytest.mark.parametrize(
    ("num_tokens", "known"), [(0, 0), (1, 0), (3, 0), (4, 4), (7, 4), (9, 8), (20, 8)]
)
def test_the_longest_prefix_is_of_whole_chunks(database, num_tokens, known):
    named(database, range(10))
    assert database.longest_prefix(torch.arange(num_tokens)) == known


def test_sequences_share_the_chunks_of_their_common_prefix(database):
    named(database, range(20))
    assert database.num_chunks == 5
    named(database, [*range(12), 7, 7, 7, 7, 7])
    assert database.num_chunks == 6
    named(database, [*range(13), 7, 7, 7])
    assert database.num_chunks == 7


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_less_than_a_chunk_is_named_but_not_kept(database, tokens):
    assert named(database, tokens) == named(ChunkedTokenDatabase(make_config(), METADATA), tokens)
    assert database.num_chunks == 0


def test_spans_are_part_of_what_is_known(database, num_hashed):
    named(database, range(12))
    num_hashed()
    assert database.longest_prefix(torch.arange(12), CAT) == 4
    named(database, range(12), spans=CAT)
    assert (num_hashed(), database.num_chunks) == (2, 5)
    assert database.longest_prefix(torch.arange(12), CAT) == 12
    assert database.longest_prefix(torch.arange(12), [MultimodalSpan(b"dog", 5, 2)]) == 4
    named(database, range(12), spans=CAT)
    assert num_hashed() == 0


def test_tokens_cannot_pose_as_extras():
    """A chunk's block is its tokens and, with spans, 32 bytes more: no token sequence has a
    block of that length.
    """
    database = RadixTokenDatabase(make_config(), METADATA)
    named(database, range(4), spans=[MultimodalSpan(b"cat", 0, 4)])
    for num_tokens in range(24):
        assert database.longest_prefix(torch.arange(num_tokens)) == 0


def test_a_salt_forgets_and_so_does_clear(database):
    named(database, range(12))
    database.use_salt("tenant-a")
    assert database.longest_prefix(torch.arange(12)) == 0
    assert named(database, range(12)) == named(
        ChunkedTokenDatabase(make_config("tenant-a"), METADATA), range(12)
    )
    database.clear()
    assert database.num_chunks == 0
    assert named(database, range(12)) == named(
        ChunkedTokenDatabase(make_config("tenant-a"), METADATA), range(12)
    )


@pytest.mark.parametrize("step", ["extras_of_chunks", "chain_hashes", "named_chunks"])
def test_a_salt_that_comes_between_finds_an_empty_tree_and_changes_no_key(
    database, monkeypatch, step
):
    def salting(*args):
        database.use_salt("tenant-a")
        return original(*args)

    original = getattr(radix, step)
    monkeypatch.setattr(radix, step, salting)
    assert named(database, range(12)) == named(
        ChunkedTokenDatabase(make_config(), METADATA), range(12)
    )
    assert database.num_chunks == 0


def test_the_tree_is_whole_after_many_threads():
    database = RadixTokenDatabase(make_config(), METADATA, max_tokens=20 * CHUNK_SIZE)
    sequences = branching_sequences(4, 100, max_tokens=80)

    def ask(thread):
        for turn in range(150):
            tokens = sequences[(thread * 37 + turn * 7) % len(sequences)]
            named(database, tokens)
            database.longest_prefix(torch.tensor(tokens, dtype=torch.int64))

    interleave(ask)
    database.check_integrity()
    assert 0 < database.num_chunks <= 20


def test_the_bound_holds_and_what_was_used_longest_ago_goes():
    database = RadixTokenDatabase(make_config(), METADATA, max_tokens=5 * CHUNK_SIZE + 3)
    one, two = torch.arange(12), torch.arange(100, 112)
    for tokens in (one, two):
        named(database, tokens)
    assert (database.longest_prefix(one), database.longest_prefix(two)) == (8, 12)
    named(database, one[:4])
    named(database, torch.arange(200, 208))
    assert (database.longest_prefix(one), database.longest_prefix(two)) == (4, 8)
    for tokens in branching_sequences(3, 200):
        named(database, tokens)
        database.check_integrity()
        assert database.num_chunks <= 5


def test_of_a_sequence_beyond_the_bound_the_beginning_is_kept():
    database = RadixTokenDatabase(make_config(), METADATA, max_tokens=3 * CHUNK_SIZE)
    tokens = torch.arange(40)
    assert named(database, tokens) == named(ChunkedTokenDatabase(make_config(), METADATA), tokens)
    assert (database.longest_prefix(tokens), database.num_chunks) == (12, 3)


def test_a_bound_below_one_chunk_is_refused():
    with pytest.raises(ValueError, match=r"max_tokens=3.*4 tokens"):
        RadixTokenDatabase(make_config(), METADATA, max_tokens=3)


def test_damage_is_found(database):
    named(database, range(12))
    keys = database._known._keys
    node, key = list(keys.items())[1]
    del keys[node]
    with pytest.raises(IntegrityError, match="outlive"):
        database.check_integrity()
    keys[node] = key
    keys.move_to_end(node, last=False)
    with pytest.raises(IntegrityError, match="outlive"):
        database.check_integrity()
    database.clear()
