"""Token databases beyond their contract (`tests/contract/test_token_databases.py`)."""

from __future__ import annotations

import itertools

import pytest
import torch
from lmcache_core.errors import ConfigError
from lmcache_core.keys import CacheEngineKey
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan, TokenDatabase

from tests.suites.token_database_suite import METADATA, make_config, named


def test_chunks_are_named_as_they_are_taken():
    database = ChunkedTokenDatabase(make_config(), METADATA)
    taken = database.process_tokens(torch.arange(40))
    assert list(itertools.islice(taken, 2)) == named(database, range(8))
    assert next(taken)[:2] == (8, 12)


def test_a_salt_does_not_change_what_is_being_taken():
    database = ChunkedTokenDatabase(make_config(), METADATA)
    want = named(database, range(40))
    taken = database.process_tokens(torch.arange(40))
    database.use_salt("tenant-a")
    assert list(taken) == want


class Plain(TokenDatabase):
    """Has the documented method only."""

    def process_tokens(self, tokens, mask=None):
        yield 0, len(tokens), CacheEngineKey("vllm", "m", 1, 0, str(tokens.tolist()))


def test_only_process_tokens_must_be_implemented():
    [(start, end, key)] = Plain().process_tokens(torch.arange(3))
    assert (start, end, key.chunk_hash) == (0, 3, "[0, 1, 2]")
    with pytest.raises(TypeError):
        TokenDatabase()


def test_a_database_without_salt_refuses_one():
    Plain().use_salt("")
    with pytest.raises(ConfigError, match="salt: Plain does not"):
        Plain().use_salt("tenant-a")


@pytest.mark.parametrize(
    "span",
    [
        (b"", 0, 1),
        (b"x" * 256, 0, 1),
        (b"cat", -1, 2),
        (b"cat", 0, 0),
        (b"cat", 0, 2**32),
    ],
    ids=str,
)
def test_a_span_that_covers_no_tokens_or_names_no_content_is_refused(span):
    with pytest.raises(ValueError):
        MultimodalSpan(*span)
