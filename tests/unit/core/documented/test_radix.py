"""The radix database hashes what it does not know, and nothing else; its names are those of the
chunked one (`tests/contract/test_token_databases.py`, `tests/property/test_radix_model.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
from lmcache_core.documented import radix
from lmcache_core.token_database import MultimodalSpan, RadixTokenDatabase

from tests.suites.token_database_suite import CHUNK_SIZE, METADATA, make_config, named

CAT = [MultimodalSpan(b"cat", 5, 2)]


@pytest.fixture
def database():
    return RadixTokenDatabase(make_config(), METADATA)


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


def test_known_chunks_are_not_hashed_again(database, num_hashed):
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


def test_spans_are_part_of_what_is_known(database, num_hashed):
    named(database, range(12))
    num_hashed()
    named(database, range(12), spans=CAT)
    assert num_hashed() == 2, "the first chunk lies before the span"
    named(database, range(12), spans=CAT)
    assert num_hashed() == 0
    named(database, range(12), spans=[MultimodalSpan(b"dog", 5, 2)])
    assert num_hashed() == 2


def test_a_full_tree_is_started_over(num_hashed):
    database = RadixTokenDatabase(make_config(), METADATA, max_tokens=3 * CHUNK_SIZE + 1)
    for tokens in ([*range(8)], [*range(100, 104)]):
        named(database, tokens)
    num_hashed()
    for tokens in ([*range(8)], [*range(100, 104)]):
        named(database, tokens)
    assert num_hashed() == 0
    named(database, range(200, 208))
    assert num_hashed() == 2
    named(database, range(200, 208))
    assert num_hashed() == 0
    named(database, range(8))
    assert num_hashed() == 2


def test_a_bound_below_one_chunk_is_refused():
    with pytest.raises(ValueError, match=r"max_tokens=3.*4 tokens"):
        RadixTokenDatabase(make_config(), METADATA, max_tokens=3)
