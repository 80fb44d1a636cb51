from __future__ import annotations

import base64
import contextlib
import hashlib
import struct

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
HOSTILE = [
    "",
    "@",
    "a@b@1@2@c",
    "%40",
    "%",
    "../../etc/passwd",
    "a\nb",
    "\0",
    "模型",
    "🦙" * 5,
    " ",
    "vllm@x",
    "?#&;=+",
    "a//b",
    "é",
    "e\u0301",
]
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=60))
numbers = st.integers(0, 2**32 - 1)
keys = st.builds(CacheEngineKey, texts, texts, numbers, numbers, texts, texts)


@given(keys)
def test_every_spelling_can_be_read_back(key):
    assert CacheEngineKey.from_canonical(key.canonical()) == key
    assert CacheEngineKey.from_string(key.to_string()) == key
    assert CacheEngineKey.from_url(key.to_url()) == key


@given(keys, keys)
def test_different_keys_never_share_a_spelling(one, other):
    if one != other:
        assert one.canonical() != other.canonical()
        assert one.to_string() != other.to_string()
        assert one.to_url() != other.to_url()
        assert one.chunk_id() != other.chunk_id()


@given(keys)
def test_spellings_are_fit_for_lines_and_urls(key):
    assert key.to_string().isprintable()
    assert set(key.to_url()) <= set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    )
    assert len(key.chunk_id()) == CHUNK_ID_BYTES


def test_the_readable_form_is_the_documented_one():
    assert KEY.to_string() == f"vllm@meta-llama/Llama-3.1-8B@4@1@{HASH}"
    assert (
        CacheEngineKey("vllm", "a@b", 1, 0, HASH, "window").to_string()
        == f"vllm@a%40b@1@0@{HASH}@window"
    )


def test_the_canonical_bytes_are_those_of_the_protocol():
    fields = [b"vllm", KEY.model_name.encode(), HASH.encode(), b""]
    prefixed = [struct.pack("<H", len(f)) + f for f in fields]
    assert (
        KEY.canonical()
        == b"LMK1"
        + prefixed[0]
        + prefixed[1]
        + struct.pack("<II", 4, 1)
        + prefixed[2]
        + prefixed[3]
    )
    assert KEY.chunk_id() == hashlib.sha256(b"lmcache/chunk-id/1\0" + KEY.canonical()).digest()[:16]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_canonical(data):
    for candidate in (data, KEY.canonical()[:4] + data):
        try:
            key = CacheEngineKey.from_canonical(candidate)
        except IdentityError:
            continue
        assert key.canonical() == candidate


@given(st.data())
def test_a_damaged_canonical_key_is_refused_or_another_key(data):
    whole = KEY.canonical()
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(IdentityError):
        assert CacheEngineKey.from_canonical(bytes(damaged)) != KEY


@pytest.mark.parametrize("cut", range(len(KEY.canonical())))
def test_a_truncated_canonical_key_is_refused(cut):
    with pytest.raises(IdentityError):
        CacheEngineKey.from_canonical(KEY.canonical()[:cut])


@pytest.mark.parametrize("extra", [b"\0", b"x" * MAX_CANONICAL_KEY_BYTES])
def test_bytes_behind_a_canonical_key_are_refused(extra):
    with pytest.raises(IdentityError):
        CacheEngineKey.from_canonical(KEY.canonical() + extra)


@given(st.text(max_size=80))
def test_arbitrary_text_is_refused_or_read(text):
    for read in (CacheEngineKey.from_string, CacheEngineKey.from_url):
        try:
            key = read(text)
        except IdentityError:
            continue
        assert read(key.to_string() if read == CacheEngineKey.from_string else key.to_url()) == key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm",
        "vllm@m@1@0",
        "vllm@m@1@0@h@g@x",
        "vllm@m@one@0@h",
        "vllm@m@-1@0@h",
        "vllm@m@1@ 0@h",
        "vllm@m@1_0@0@h",
        "vllm@m@٣@0@h",
        "vllm@m@²@0@h",
        f"vllm@m@{'9' * 5000}@0@h",
        "vllm@m%ff@1@0@h",
        "@" * 10000,
    ],
)
def test_a_readable_form_that_is_none_is_refused(text):
    with pytest.raises(IdentityError):
        CacheEngineKey.from_string(text)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda url: url + "=",
        lambda url: url + "==",
        lambda url: url[:-1],
        lambda url: url + "A",
        lambda url: url + "\n",
        lambda url: " " + url,
        lambda url: url[:10] + "!" + url[10:],
        lambda url: url[:10] + "/" + url[11:],
        lambda url: url[:-1] + "é",
        lambda url: "",
        lambda url: base64.urlsafe_b64encode(b"not a key").decode().rstrip("="),
    ],
)
def test_a_url_form_that_is_none_is_refused(spoil):
    with pytest.raises(IdentityError):
        CacheEngineKey.from_url(spoil(KEY.to_url()))


def test_a_url_form_has_one_spelling_only():
    """The unused bits of the last character must be zero, else one chunk had several URLs."""
    url = CacheEngineKey("vllm", "m", 1, 0, HASH).to_url()
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    readable = []
    for last in alphabet:
        try:
            CacheEngineKey.from_url(url[:-1] + last)
        except IdentityError:
            continue
        readable.append(url[:-1] + last)
    assert readable == [url]


@pytest.mark.parametrize(
    "change", [{"world_size": -1}, {"worker_id": 2**32}, {"world_size": 1.5}, {"worker_id": "0"}]
)
def test_numbers_that_do_not_fit_are_refused(change):
    fields = {
        "fmt": "vllm",
        "model_name": "m",
        "world_size": 1,
        "worker_id": 0,
        "chunk_hash": HASH,
    } | change
    with pytest.raises(IdentityError, match="world_size"):
        CacheEngineKey(**fields).canonical()


@pytest.mark.parametrize("name", ["fmt", "model_name", "chunk_hash", "group"])
def test_fields_are_bounded(name):
    fields = {"fmt": "vllm", "model_name": "m", "world_size": 1, "worker_id": 0, "chunk_hash": HASH}
    CacheEngineKey(**fields | {name: "x" * MAX_KEY_FIELD_BYTES}).canonical()
    with pytest.raises(IdentityError, match=name):
        CacheEngineKey(**fields | {name: "x" * (MAX_KEY_FIELD_BYTES + 1)}).canonical()


def test_a_key_that_could_not_be_read_back_is_not_written():
    longest = CacheEngineKey(
        *["x" * MAX_KEY_FIELD_BYTES] * 2, 1, 0, *["x" * MAX_KEY_FIELD_BYTES] * 2
    )
    with pytest.raises(IdentityError, match=str(MAX_CANONICAL_KEY_BYTES)):
        longest.canonical()


def test_the_longest_key_can_be_read_back():
    longest = CacheEngineKey(
        "vllm", "x" * MAX_KEY_FIELD_BYTES, 2**32 - 1, 2**32 - 1, HASH, "g" * MAX_KEY_FIELD_BYTES
    )
    assert CacheEngineKey.from_canonical(longest.canonical()) == longest


def test_a_lone_surrogate_is_refused():
    key = CacheEngineKey("vllm", "\ud800", 1, 0, HASH)
    for spell in (key.canonical, key.to_url, key.to_string):
        with pytest.raises(IdentityError):
            spell()


def changed(key, **fields):
    """A key that differs from another one in these fields."""
    return CacheEngineKey(**{name: getattr(key, name) for name in FIELDS} | fields)


@pytest.mark.parametrize("text", [HASH, HASH.upper(), HASH[:-1] + " ", "0x" + HASH[2:], "é" * 64])
def test_a_hash_is_read_as_it_was_given(text):
    key = CacheEngineKey("vllm", "m", 1, 0, text)
    assert key.chunk_hash == text
    assert CacheEngineKey.from_canonical(key.canonical()) == key
    assert (key.hash_bytes() is None) == (text != HASH)
    assert ChunkKey.of("a", key).key == key


def test_a_chunk_key_keeps_tenants_apart():
    assert ChunkKey.of("a", KEY) != ChunkKey.of("b", KEY)
    assert len({ChunkKey.of("a", KEY), ChunkKey.of("a", KEY), ChunkKey.of("b", KEY)}) == 2


@pytest.mark.parametrize("made", [KEY, ChunkKey.of("a", KEY)], ids=["key", "chunk key"])
def test_names_cannot_be_changed(made):
    for field in (*FIELDS, "tenant", "lane", "key", "another"):
        with pytest.raises(AttributeError):
            setattr(made, field, "x")
        with pytest.raises(AttributeError):
            delattr(made, field)


@given(keys)
def test_equal_keys_are_one_key_in_sets_and_dicts(key):
    again = changed(key)
    assert again == key
    assert len({key, again}) == 1
    assert {ChunkKey.of("a", key): 1}[ChunkKey.of("a", again)] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"fmt": "x"},
        {"model_name": "x"},
        {"world_size": 9},
        {"worker_id": 9},
        {"chunk_hash": "x"},
        {"group": "x"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_tells_keys_apart(change):
    other = changed(KEY, **change)
    assert other != KEY
    assert len({KEY, other}) == 2
    assert other.canonical() != KEY.canonical()


def test_fields_come_by_position_or_by_name_and_show_in_repr():
    named = CacheEngineKey(
        fmt="vllm", model_name="m", world_size=4, worker_id=1, chunk_hash="h", group="g"
    )
    assert CacheEngineKey("vllm", "m", 4, 1, "h", "g") == named
    assert (
        repr(named)
        == "CacheEngineKey(fmt='vllm', model_name='m', world_size=4, worker_id=1, chunk_hash='h',"
        " group='g')"
    )
    assert repr(ChunkKey.of("a", named)) == f"ChunkKey.of(tenant='a', key={named!r})"


def test_a_number_that_only_equals_a_good_one_is_refused_still():
    """1.0 == 1, also in a memo of what was spelled before."""
    assert KEY.canonical()
    for number in (4.0, "4"):
        with pytest.raises(IdentityError, match="world_size"):
            changed(KEY, world_size=number).canonical()


def hashes_of(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "big") for number in numbers)


def test_a_chain_names_the_chunks_of_all_ranks() -> None:
    chain = ChunkChain("vllm", "m", 2, "window", hashes_of(1, 2, 3))
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


@pytest.mark.parametrize(
    ("world_size", "hashes"), [(0, b""), (-1, b""), (1, bytes(31)), (1, bytes(33))]
)
def test_a_chain_that_is_none_is_refused(world_size: int, hashes: bytes) -> None:
    with pytest.raises(ValueError, match="must be"):
        ChunkChain("vllm", "m", world_size, "", hashes)


@given(st.binary(max_size=300))
def test_whatever_follows_a_prefix_is_read_as_before_or_refused(tail: bytes) -> None:
    """Most keys are read by a shorter way: it takes nothing that the long one would not."""
    prefix = KEY.canonical()[: -2 - 64 - 2]
    with contextlib.suppress(IdentityError):
        assert CacheEngineKey.from_canonical(prefix + tail).canonical() == prefix + tail


@pytest.mark.parametrize("length", range(len(KEY.canonical())))
def test_a_key_that_is_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(IdentityError):
        CacheEngineKey.from_canonical(KEY.canonical()[:length])


def test_a_hash_that_is_not_utf_8_is_refused() -> None:
    data = KEY.canonical()
    with pytest.raises(IdentityError):
        CacheEngineKey.from_canonical(data[:-66] + b"\xff" * 64 + data[-2:])
