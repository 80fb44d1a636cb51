from __future__ import annotations

import dataclasses
import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.token_database import ChunkedTokenDatabase, MultimodalSpan, TokenDatabase, chain_hashes, identity_root

CHUNK = 4
METADATA = LMCacheEngineMetadata("test/model", 2, 1, "vllm", "bfloat16", (4, 2, CHUNK, 8, 64))
MAX_TOKEN = 2**32 - 1
tokens_lists = st.lists(st.integers(0, MAX_TOKEN), max_size=40)


def database(metadata=METADATA, **options):
    return ChunkedTokenDatabase(LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, **options), metadata)


def chunks(tokens, mask=None, spans=(), db=None):
    return list((db or database()).process_tokens(torch.as_tensor(tokens), mask, spans))


def hashes(tokens, **more):
    return [key.chunk_hash for _, _, key in chunks(tokens, **more)]


def test_chunks_carry_the_identity_of_the_worker():
    [(start, end, key)] = chunks([1, 2, 3])
    assert (start, end) == (0, 3)
    assert (key.fmt, key.model_name, key.world_size, key.worker_id, key.group) == ("vllm", "test/model", 2, 1, "")
    assert isinstance(database(), TokenDatabase)


def test_the_hash_is_the_documented_one():
    def prefixed(data):
        return struct.pack("<I", len(data)) + data

    fields = [
        (b"model", b"test/model"),
        (b"revision", b""),
        (b"dtype", b"bfloat16"),
        (b"layout", METADATA.layout_fingerprint().encode()),
        (b"adapter", b""),
        (b"salt", b"pepper"),
    ]
    root = hashlib.sha256(prefixed(b"lmcache/identity/1") + b"".join(prefixed(n) + prefixed(t) for n, t in fields)).digest()
    assert identity_root(METADATA, "pepper") == root
    first = hashlib.sha256(b"lmcache/chunk/1\0" + root + struct.pack("<I4I", 4, 7, 0, MAX_TOKEN, 9) + struct.pack("<I", 0)).digest()
    span = struct.pack("<I", 1) + prefixed(b"image") + struct.pack("<qI", 1, 5)
    second = hashlib.sha256(b"lmcache/chunk/1\0" + first + struct.pack("<I2I", 2, 1, 2) + span).digest()
    got = hashes([7, 0, MAX_TOKEN, 9, 1, 2], spans=[MultimodalSpan(b"image", 5, 5)], db=database(salt="pepper"))
    assert got == [first.hex(), second.hex()]


@given(tokens_lists)
def test_chunks_cover_the_tokens_in_order(tokens):
    got = chunks(torch.tensor(tokens, dtype=torch.int64))
    assert [(start, end) for start, end, _ in got] == [(i, min(i + CHUNK, len(tokens))) for i in range(0, len(tokens), CHUNK)]


@given(tokens_lists, st.data())
def test_a_hash_depends_on_everything_before_its_end_and_on_nothing_behind(tokens, data):
    if not tokens:
        return
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] ^= data.draw(st.integers(1, MAX_TOKEN))
    before, after = (hashes(torch.tensor(t, dtype=torch.int64)) for t in (tokens, changed))
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < at // CHUNK for i in range(len(before))]


@given(tokens_lists, tokens_lists)
def test_full_chunks_are_shared_by_prefix_and_partial_chunks_are_not(prefix, rest):
    whole, part = (hashes(torch.tensor(t, dtype=torch.int64)) for t in (prefix + rest, prefix))
    full = len(prefix) // CHUNK
    assert whole[:full] == part[:full]
    if rest and len(prefix) % CHUNK:
        assert whole[full] != part[full]


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
def test_equal_ids_give_equal_keys_in_every_integer_dtype(dtype):
    tokens = [0, 1, 2, 127, 5, 6]
    assert hashes(torch.tensor(tokens, dtype=dtype)) == hashes(tokens)
    assert hashes(np.asarray(tokens)) == hashes(tokens)


def test_strides_do_not_matter():
    spread = torch.arange(20)[::2]
    assert hashes(spread) == hashes(spread.tolist())


@pytest.mark.parametrize(
    ("tokens", "word"),
    [
        (torch.tensor([1, -1]), "negative"),
        (torch.tensor([1, -1], dtype=torch.int8), "negative"),
        (torch.tensor([1, 2**32]), "above"),
        (torch.tensor([2**63], dtype=torch.uint64), "above"),
        (torch.tensor([1.0, 2.0]), "integers"),
        (torch.tensor([True]), "integers"),
        (torch.tensor([[1, 2]]), "dimension"),
        (torch.tensor(5), "dimension"),
    ],
)
def test_what_is_no_token_sequence_is_refused_at_once(tokens, word):
    with pytest.raises(ValueError, match=word):
        database().process_tokens(tokens)


@pytest.mark.parametrize("tokens", [[MAX_TOKEN], [0] * 5, []])
def test_the_ends_of_the_range_are_tokens(tokens):
    assert len(chunks(torch.tensor(tokens, dtype=torch.int64))) == -(-len(tokens) // CHUNK)


@pytest.mark.parametrize("num_false", [0, 4, 8])
def test_masked_chunks_are_hashed_but_not_given(num_false):
    tokens = torch.arange(10)
    mask = torch.arange(10) >= num_false
    assert chunks(tokens, mask) == chunks(tokens)[num_false // CHUNK :]


def test_a_mask_of_falses_only_gives_nothing():
    assert chunks(torch.arange(8), torch.zeros(8, dtype=torch.bool)) == []


@pytest.mark.parametrize(
    ("mask", "word"),
    [
        (torch.arange(10) >= 3, "multiple"),
        (torch.zeros(10, dtype=torch.bool), "multiple"),
        (torch.arange(10) < 4, "FFF"),
        (torch.tensor([False, False, True, False, False] + [True] * 5), "FFF"),
        (torch.ones(9, dtype=torch.bool), "10 booleans"),
        (torch.ones(11, dtype=torch.bool), "10 booleans"),
        (torch.ones(10, dtype=torch.int64), "10 booleans"),
        (torch.ones(1, 10, dtype=torch.bool), "10 booleans"),
    ],
)
def test_a_mask_of_another_form_is_refused_at_once(mask, word):
    with pytest.raises(ValueError, match=word):
        database().process_tokens(torch.arange(10), mask)


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "test/other"},
        {"revision": "main"},
        {"adapter": "sql-lora/3"},
        {"kv_dtype": "float16"},
        {"layout": "HND"},
        {"kv_shape": (5, 2, CHUNK, 8, 64)},
        {"kv_shape": (4, 1, CHUNK, 8, 64)},
        {"kv_shape": (4, 2, CHUNK, 4, 128)},
    ],
    ids=str,
)
def test_whatever_the_kv_is_enters_the_hash(change):
    other = database(dataclasses.replace(METADATA, **change))
    assert not set(hashes(range(10))) & set(hashes(range(10), db=other))


@pytest.mark.parametrize(
    "change", [{"kv_dtype": torch.bfloat16}, {"kv_shape": (4, 2, 999, 8, 64)}, {"worker_id": 0}, {"fmt": "huggingface"}], ids=str
)
def test_what_does_not_change_the_kv_does_not_enter_the_hash(change):
    assert hashes(range(10)) == hashes(range(10), db=database(dataclasses.replace(METADATA, **change)))


def test_fields_cannot_run_into_each_other():
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    roots = {identity_root(dataclasses.replace(METADATA, model_name=m, revision=r)) for m, r in pairs}
    assert len(roots) == len(pairs)


def test_a_salt_separates_and_can_be_set_later():
    plain, salted = database(), database(salt="tenant-a")
    assert not set(hashes(range(10), db=plain)) & set(hashes(range(10), db=salted))
    plain.use_salt("tenant-a")
    assert hashes(range(10), db=plain) == hashes(range(10), db=salted)
    plain.use_salt("")
    assert hashes(range(10), db=plain) == hashes(range(10))


@given(offset=st.integers(0, 24), length=st.integers(1, 12))
def test_a_span_changes_the_chunks_that_it_overlaps_and_those_behind(offset, length):
    plain, with_image = hashes(range(20)), hashes(range(20), spans=[MultimodalSpan(b"image", offset, length)])
    first = offset // CHUNK
    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [i < first for i in range(5)]


@pytest.mark.parametrize(
    "other",
    [
        [MultimodalSpan(b"dog", 5, 6)],
        [MultimodalSpan(b"cat", 6, 6)],
        [MultimodalSpan(b"cat", 5, 7)],
        [MultimodalSpan(b"cat", 5, 6), MultimodalSpan(b"dog", 5, 6)],
        [],
    ],
)
def test_spans_differ_by_content_place_and_number(other):
    assert hashes(range(12), spans=[MultimodalSpan(b"cat", 5, 6)])[1:] != hashes(range(12), spans=other)[1:]


@pytest.mark.parametrize(
    "span", [(b"", 0, 1), (b"x" * 256, 0, 1), (b"cat", -1, 2), (b"cat", 0, 0), (b"cat", 3, -1), (b"cat", 0, 2**32)], ids=str
)
def test_a_span_that_covers_no_tokens_or_names_no_content_is_refused(span):
    with pytest.raises(ValueError):
        MultimodalSpan(*span)


def test_an_image_in_the_second_turn_keeps_the_first_turns_chunks():
    first = [MultimodalSpan(b"cat", 1, 5)]
    assert hashes(range(8), spans=first) == hashes(range(20), spans=[*first, MultimodalSpan(b"dog", 10, 3)])[:2]


def test_the_order_in_which_spans_are_named_does_not_matter():
    spans = [MultimodalSpan(b"cat", 0, 3), MultimodalSpan(b"dog", 2, 4), MultimodalSpan(b"ant", 2, 4)]
    assert hashes(range(12), spans=spans) == hashes(range(12), spans=spans[::-1])


def test_hashes_are_the_same_in_every_process():
    program = """
import numpy as np
from lmcache_core.token_database import chain_hashes
print([h.hex() for _, _, h in chain_hashes(bytes(32), np.arange(10, dtype="<u4"), 4)])
"""
    runs = {
        subprocess.run([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }
    here = [h.hex() for _, _, h in chain_hashes(bytes(32), np.arange(10, dtype="<u4"), 4)]
    assert runs == {f"{here}\n"}
