"""Token databases: masks, salts, spans, and chunks that are named when they are taken."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.errors import ConfigError
from lmcache_core.keys import CacheEngineKey
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan, TokenDatabase
from lmcache_core.token_database.chunked import num_masked_tokens

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


@given(st.lists(st.booleans(), max_size=12))
def test_only_falses_before_trues_are_a_mask(flags):
    mask = torch.tensor(flags, dtype=torch.bool)
    if flags != sorted(flags):
        with pytest.raises(ValueError, match="FFF"):
            num_masked_tokens(mask, len(flags), 1)
    else:
        assert num_masked_tokens(mask, len(flags), 1) == flags.count(False)


@pytest.mark.parametrize("num_false", range(10))
def test_falses_come_in_whole_chunks(num_false):
    mask = torch.arange(9) >= num_false
    if num_false % 3:
        with pytest.raises(
            ValueError, match=rf"\({num_false}\) is not a multiple of the chunk size \(3\)"
        ):
            num_masked_tokens(mask, 9, 3)
    else:
        assert num_masked_tokens(mask, 9, 3) == num_false


def test_no_mask_is_no_falses():
    assert num_masked_tokens(None, 9, 3) == 0


class Plain(TokenDatabase):
    """What somebody writes who has read no more than the documented interface."""

    def process_tokens(self, tokens, mask=None):
        yield 0, len(tokens), CacheEngineKey("vllm", "m", 1, 0, str(tokens.tolist()))


def test_process_tokens_is_all_that_must_be_there():
    [(start, end, key)] = Plain().process_tokens(torch.arange(3))
    assert (start, end, key.chunk_hash) == (0, 3, "[0, 1, 2]")
    with pytest.raises(TypeError):
        TokenDatabase()


def test_a_database_without_salt_takes_none_and_says_so():
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
        (b"cat", 3, -1),
        (b"cat", 0, 2**32),
    ],
    ids=str,
)
def test_a_span_that_covers_no_tokens_or_names_no_content_is_refused(span):
    with pytest.raises(ValueError):
        MultimodalSpan(*span)
