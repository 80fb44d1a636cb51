"""Hashes of chains of chunks, and what token databases have beyond their contract
(`tests/contract/test_token_databases.py`, `test_golden.py`).
"""

from __future__ import annotations

import dataclasses
import random
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.errors import IdentityError
from lmcache_core.token_database import (
    ChunkedTokenDatabase,
    MultimodalSpan,
    TokenDatabase,
    chain_hashes,
    identity_root,
)
from lmcache_core.token_database.hashing import extras_of_chunks, tokens_as_bytes, tokens_as_uint32

from tests.suites.token_database_suite import CHUNK_SIZE, MAX_TOKEN_ID, METADATA, make_config, named

tokens_lists = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=40)
span_lists = st.lists(
    st.builds(
        MultimodalSpan,
        st.sampled_from([b"cat", b"dog", b"x" * 255]),
        st.integers(0, 50),
        st.integers(1, 30),
    ),
    max_size=4,
)


def digests(tokens, spans=(), root=bytes(32), first=0):
    return [
        digest
        for _, _, digest in chain_hashes(root, tokens_as_uint32(tokens), CHUNK_SIZE, spans, first)
    ]


@given(tokens_lists, span_lists, st.integers(0, 10))
def test_a_chain_can_be_continued_in_the_middle(tokens, spans, num_known):
    ids = np.array(tokens, dtype=np.int64)
    whole = digests(ids, spans)
    num_known = min(num_known, len(tokens) // CHUNK_SIZE)
    before = whole[num_known - 1] if num_known else bytes(32)
    assert digests(ids, spans, before, num_known * CHUNK_SIZE) == whole[num_known:]


def test_fields_cannot_run_into_each_other():
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    roots = {
        identity_root(dataclasses.replace(METADATA, model_name=m, revision=r)) for m, r in pairs
    }
    assert len(roots) == len(pairs)


@given(tokens_lists)
def test_token_ids_become_little_endian_words(tokens):
    want = struct.pack(f"<{len(tokens)}I", *tokens)
    for dtype in (np.int64, np.uint32, np.uint64, ">i8"):
        assert tokens_as_uint32(np.array(tokens, dtype=dtype)).tobytes() == want
    assert tokens_as_uint32(torch.tensor(tokens, dtype=torch.int64)).tobytes() == want
    assert tokens_as_bytes(tokens) == want


@pytest.mark.parametrize("dtype", ["i1", "i4", ">i8"])
def test_a_negative_token_id_of_any_width_is_refused(dtype):
    assert tokens_as_uint32(np.array([1, 127], dtype)).tolist() == [1, 127]
    with pytest.raises(ValueError, match="token id -1 is negative"):
        tokens_as_uint32(np.array([1, -1], dtype))


def test_a_process_without_numpy_computes_the_same_hashes():
    program = """
import sys
sys.modules["numpy"] = None
from lmcache_core.token_database.hashing import chain_hashes_of_bytes, tokens_as_bytes
print([h.hex() for _, _, h in chain_hashes_of_bytes(bytes(32), tokens_as_bytes(range(10)), 4)])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{[digest.hex() for digest in digests(np.arange(10))]}\n"


def test_many_spans_over_many_chunks_cost_what_they_overlap():
    """A span is visited where it lies, not at every chunk: 20,000 spans over 20,000 chunks would
    take minutes.
    """
    offsets = random.Random(0).sample(range(80_000), 20_000)
    spans = [MultimodalSpan(b"cat", offset, 1) for offset in offsets]
    assert (
        sum(
            int.from_bytes(extras[:4], "little")
            for extras in extras_of_chunks(spans, 80_000, CHUNK_SIZE).values()
        )
        == 20_000
    )


@pytest.mark.parametrize("field", ["model_name", "revision", "adapter"])
def test_a_name_that_is_not_text_is_refused(field: str) -> None:
    """As in variables of the environment that are not UTF-8."""
    with pytest.raises(IdentityError, match="not Unicode text"):
        identity_root(dataclasses.replace(METADATA, **{field: "a\udcff"}))
    with pytest.raises(IdentityError, match=r"salt .* is not Unicode text"):
        identity_root(METADATA, "a\udcff")


def test_process_tokens_must_be_implemented():
    with pytest.raises(TypeError):
        TokenDatabase()


@pytest.mark.parametrize(
    "span",
    [(b"", 0, 1), (b"x" * 256, 0, 1), (b"cat", -1, 2), (b"cat", 0, 0), (b"cat", 0, 2**32)],
    ids=str,
)
def test_a_span_that_covers_no_tokens_or_names_no_content_is_refused(span):
    with pytest.raises(ValueError):
        MultimodalSpan(*span)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([1, -2, 3], "token id -2 is negative"), ([1, 1 << 32], "token id 4294967296 is above")],
)
def test_token_ids_out_of_range_are_refused(tokens, said):
    for convert in (tokens_as_bytes, tokens_as_uint32):
        with pytest.raises(ValueError, match=said):
            convert(tokens)


def test_a_salt_does_not_change_what_is_being_taken():
    database = ChunkedTokenDatabase(make_config(), METADATA)
    want = named(database, range(40))
    taken = database.process_tokens(torch.arange(40))
    database.use_salt("tenant-a")
    assert list(taken) == want
