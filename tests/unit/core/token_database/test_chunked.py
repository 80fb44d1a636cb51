from __future__ import annotations

import itertools

import torch
from lmcache_core.testing.token_database_suite import METADATA, make_config, named
from lmcache_core.token_database import ChunkedTokenDatabase


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
