"""Chunk keys and their spellings; spellings that must not change are in the golden vectors."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.errors import IdentityError
from lmcache_core.keys import (
    CHUNK_ID_BYTES,
    MAX_CANONICAL_KEY_BYTES,
    MAX_KEY_FIELD_BYTES,
    CacheEngineKey,
    ChunkChain,
    ChunkKey,
)

HASH = hashlib.sha256(b"chunk").hexdigest()
KEY = CacheEngineKey("vllm", "meta-llama/Llama-3.1-8B", 4, 1, HASH)
FIELDS = ("fmt", "model_name", "world_size", "worker_id", "chunk_hash", "group")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
HOSTILE = [
    *("", "@", "a@b@1@2@c", "%40", "%", "../../etc/passwd", "a\nb", "\0", "模型", "🦙" * 5, " "),
    *("vllm@x", "?#&;=+", "a//b", "é", "e\u0301"),
]
texts = st.sampled_from(HOSTILE) | st.text(max_size=60)
numbers = st.integers(0, 2**32 - 1)
keys = st.builds(CacheEngineKey, texts, texts, numbers, numbers, texts, texts)


def changed(key, **fields):
    """A key that differs from another one in these fields."""
    return CacheEngineKey(**{name: getattr(key, name) for name in FIELDS} | fields)


@given(keys)
def test_every_spelling_can_be_read_back(key):
    assert CacheEngineKey.from_canonical(key.canonical()) == key
    assert CacheEngineKey.from_string(key.to_string()) == key
    assert CacheEngineKey.from_url(key.to_url()) == key
    assert key.to_string().isprintable()
    assert set(key.to_url()) <= set(ALPHABET)
    assert len(key.chunk_id()) == CHUNK_ID_BYTES


@given(keys, keys)
def test_different_keys_never_share_a_spelling(one, other):
    if one != other:
        assert one.canonical() != other.canonical()
        assert one.to_string() != other.to_string()
        assert one.to_url() != other.to_url()
        assert one.chunk_id() != other.chunk_id()


@given(keys)
def test_equal_keys_are_one_key_in_sets_and_dicts(key):
    again = changed(key)
    assert len({key, again}) == 1
    assert {ChunkKey.of("a", key): 1}[ChunkKey.of("a", again)] == 1


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_or_canonical(data):
    """Also after a prefix that has been read before, for which there is a shorter way."""
    whole = KEY.canonical()
    for candidate in (data, whole[:4] + data, whole[: -2 - 64 - 2] + data):
        with contextlib.suppress(IdentityError):
            assert CacheEngineKey.from_canonical(candidate).canonical() == candidate


@given(st.data())
def test_damaged_canonical_key_is_refused_or_another_key(data):
    damaged = bytearray(KEY.canonical())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(IdentityError):
        assert CacheEngineKey.from_canonical(bytes(damaged)) != KEY


def test_truncated_or_longer_canonical_key_is_refused():
    whole = KEY.canonical()
    cut = (whole[:length] for length in range(len(whole)))
    for data in (*cut, whole + b"\0", whole + b"x" * MAX_CANONICAL_KEY_BYTES):
        with pytest.raises(IdentityError):
            CacheEngineKey.from_canonical(data)


@given(st.text(max_size=80))
def test_arbitrary_text_is_refused_or_read(text):
    with contextlib.suppress(IdentityError):
        key = CacheEngineKey.from_string(text)
        assert CacheEngineKey.from_string(key.to_string()) == key
    with contextlib.suppress(IdentityError):
        assert CacheEngineKey.from_url(text).to_url() == text


@pytest.mark.parametrize(
    "text",
    [
        "vllm@m@1@0",
        "vllm@m@1@0@h@g@x",
        "vllm@m@one@0@h",
        "vllm@m@-1@0@h",
        "vllm@m@1_0@0@h",
        "vllm@m@٣@0@h",
        f"vllm@m@{'9' * 5000}@0@h",
        "vllm@m%ff@1@0@h",
        "@" * 10000,
    ],
)
def test_malformed_readable_form_is_refused(text):
    with pytest.raises(IdentityError):
        CacheEngineKey.from_string(text)


def test_url_form_has_one_spelling():
    """The unused bits of the last character are zero, else one chunk had several URLs."""
    url = CacheEngineKey("vllm", "m", 1, 0, HASH).to_url()
    readable = []
    for last in ALPHABET:
        with contextlib.suppress(IdentityError):
            CacheEngineKey.from_url(url[:-1] + last)
            readable.append(url[:-1] + last)
    assert readable == [url]


@pytest.mark.parametrize(
    "change", [{"world_size": -1}, {"worker_id": 2**32}, {"world_size": 4.0}, {"worker_id": "1"}]
)
def test_numbers_that_do_not_fit_are_refused(change):
    assert KEY.canonical(), "4.0 equals 4, also in a memo of keys that were spelled before"
    with pytest.raises(IdentityError, match="world_size"):
        changed(KEY, **change).canonical()


@pytest.mark.parametrize("name", ["fmt", "model_name", "chunk_hash", "group"])
def test_fields_are_bounded(name):
    longest = changed(KEY, **{name: "x" * MAX_KEY_FIELD_BYTES})
    assert CacheEngineKey.from_canonical(longest.canonical()) == longest
    with pytest.raises(IdentityError, match=name):
        changed(KEY, **{name: "x" * (MAX_KEY_FIELD_BYTES + 1)}).canonical()


def test_key_that_could_not_be_read_back_is_not_written():
    text = "x" * MAX_KEY_FIELD_BYTES
    with pytest.raises(IdentityError, match=str(MAX_CANONICAL_KEY_BYTES)):
        CacheEngineKey(text, text, 1, 0, text, text).canonical()
    surrogate = changed(KEY, model_name="\ud800")
    for spell in (surrogate.canonical, surrogate.to_url, surrogate.to_string):
        with pytest.raises(IdentityError):
            spell()


@pytest.mark.parametrize("text", [HASH, HASH.upper(), HASH[:-1] + " ", "0x" + HASH[2:], "é" * 64])
def test_hash_is_read_as_it_was_given(text):
    key = changed(KEY, chunk_hash=text)
    assert key.chunk_hash == text
    assert CacheEngineKey.from_canonical(key.canonical()) == key
    assert (key.hash_bytes() is None) == (text != HASH)
    assert ChunkKey.of("a", key).key == key


@pytest.mark.parametrize("made", [KEY, ChunkKey.of("a", KEY)], ids=["key", "chunk key"])
def test_keys_cannot_be_changed(made):
    for field in (*FIELDS, "tenant", "lane", "key", "another"):
        with pytest.raises(AttributeError):
            setattr(made, field, "x")
        with pytest.raises(AttributeError):
            delattr(made, field)


def test_chain_names_the_chunks_of_all_ranks():
    hashes = b"".join(number.to_bytes(32, "big") for number in (1, 2, 3))
    chain = ChunkChain("vllm", "m", 2, "window", hashes)
    by_rank = [
        [CacheEngineKey("vllm", "m", 2, rank, f"{number:064x}", "window") for number in (1, 2, 3)]
        for rank in (0, 1)
    ]
    assert chain.num_chunks == 3
    assert chain.chunk_keys("t") == [
        ChunkKey.of("t", key) for pair in zip(*by_rank, strict=True) for key in pair
    ]
    assert chain.part(1, 3).chunk_keys("t") == chain.chunk_keys("t")[2:]
    assert chain.part(0, 0).chunk_keys("t") == []


@pytest.mark.parametrize(("world_size", "hashes"), [(0, b""), (-1, b""), (1, bytes(31))])
def test_malformed_chain_is_refused(world_size, hashes):
    with pytest.raises(ValueError, match="must be"):
        ChunkChain("vllm", "m", world_size, "", hashes)
