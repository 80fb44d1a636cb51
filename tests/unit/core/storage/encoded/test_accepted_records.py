"""Which records a tier that encodes accepts and serves, and which it replaces."""

from __future__ import annotations

import logging

import msgspec
import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, Miss, MissReason, TensorSpec, encode_head
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.unusable import MAX_UNUSABLE_KEYS, NOTED_S, UnusableRecords

from tests.fixtures.codecs import ZlibCodec, codecs_of, decoded_from_lossy, encoded_by, seen_lossily
from tests.fixtures.encoded_tier import DATA, content, got, inside, opened, put_inside
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key


async def test_lossy_record_stays_marked_when_decoded_and_written_again(
    lossy_tier: EncodedBackend, hot: LocalCPUBackend, arena: Arena
) -> None:
    await lossy_tier.batched_put([make_chunk("a", payload=DATA)])
    [result] = await lossy_tier.batched_get([make_key("a")], arena)
    assert isinstance(result, Chunk)
    header = result.described
    assert (header.serde, header.profile, header.lossy) == ("naive", "half@t1", True)
    assert result.header.lossy
    assert content(result) == seen_lossily(DATA)
    again = decoded_from_lossy(make_chunk("b", payload=seen_lossily(DATA)))
    assert await lossy_tier.batched_put([again]) == [True]
    assert (inside(hot, "b").serde, inside(hot, "b").lossy) == ("half", True)
    assert await got(lossy_tier, arena, "b") == [seen_lossily(DATA)]


@pytest.mark.parametrize("serde", ["flate", None, "naive"])
async def test_lossy_record_is_a_miss_where_lossless_is_configured(
    serde: str | None,
    hot: LocalCPUBackend,
    lossless: ZlibCodec,
    lossy: ZlibCodec,
    arena: Arena,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened(EncodedBackend(hot, codecs_of(lossless, lossy), serde)) as tier:
        await hot.batched_put(
            [
                encoded_by(lossy, make_chunk(0, payload=DATA)),
                decoded_from_lossy(make_chunk(1, payload=DATA)),
            ]
        )
        await hot.batched_put([encoded_by(lossless, make_chunk(2, payload=DATA))])
        with caplog.at_level(logging.WARNING):
            assert await got(tier, arena, 0, 1, 2, 0) == [
                MissReason.ENCODING,
                MissReason.ENCODING,
                DATA,
                MissReason.ENCODING,
            ]
        assert len(caplog.messages) == 2, "one line for each serde, not for each chunk"
        assert tier.stats()["refused_encodings"] == 3
        again = decoded_from_lossy(make_chunk(3, payload=DATA))
        assert await tier.batched_put([again]) == [False], "it would not be served"


async def test_lossy_records_are_served_where_they_are_accepted(
    hot: LocalCPUBackend, lossless: ZlibCodec, lossy: ZlibCodec, arena: Arena
) -> None:
    """What a peer has encoded may pass though nothing is encoded here."""
    made = EncodedBackend(hot, codecs_of(lossless, lossy), None, accepts_lossy=True)
    async with opened(made) as tier:
        await hot.batched_put([encoded_by(lossy, make_chunk("a", payload=DATA))])
        assert await got(tier, arena, "a") == [seen_lossily(DATA)]


async def test_server_that_answers_encoding_is_believed(
    hot: LocalCPUBackend, lossless: ZlibCodec, arena: Arena
) -> None:
    class Filtering(LocalCPUBackend):
        async def batched_get(self, keys, allocate, timeout_s=None):  # type: ignore[no-untyped-def]
            return [Miss(MissReason.ENCODING)] * len(keys)

    inner = Filtering(ArenaAllocator.anonymous(1 << 20), create_policy())
    async with opened(EncodedBackend(inner, codecs_of(lossless), "flate")) as tier:
        await inner.batched_put([make_chunk("a")])
        assert await got(tier, arena, "a") == [MissReason.ENCODING]
        assert await tier.batched_contains([make_key("a")]) == [False]


async def put_damaged(hot: LocalCPUBackend) -> None:
    """Store a record that does not decode, under the right digest."""
    made = encoded_by(ZlibCodec("flate"), make_chunk("a", payload=DATA))
    payload = bytearray(made.memory.byte_array)
    payload[3] ^= 0x55
    assert await put_inside(hot, made, payload, made.header.tensors)


async def test_record_that_does_not_decode_counts_as_absent_and_is_replaced(
    tier: EncodedBackend, hot: LocalCPUBackend, arena: Arena
) -> None:
    await put_damaged(hot)
    assert await got(tier, arena, "a") == [MissReason.CORRUPT]
    assert await tier.batched_contains([make_key("a")]) == [False], (
        "or it would never be stored again"
    )
    assert await tier.batched_put([make_chunk("a", payload=DATA)]) == [True]
    assert await got(tier, arena, "a") == [DATA]
    assert await tier.batched_contains([make_key("a")]) == [True]


async def test_record_of_an_unknown_serde_counts_as_absent_and_is_not_replaced(
    tier: EncodedBackend, hot: LocalCPUBackend, lossless: ZlibCodec, arena: Arena
) -> None:
    await hot.batched_put([encoded_by(ZlibCodec("unknown"), make_chunk("a", payload=DATA))])
    assert await tier.batched_contains([make_key("a")]) == [True], "not read yet"
    assert await got(tier, arena, "a") == [MissReason.ENCODING]
    assert await tier.batched_contains([make_key("a")]) == [False]
    begun = lossless.num_begun
    assert await tier.batched_put(
        [make_chunk("a", payload=DATA), make_chunk("b", payload=DATA)]
    ) == [False, True]
    assert lossless.num_begun == begun + 1, "what would not be kept is not encoded"
    assert inside(hot, "a").serde == "unknown"
    assert await tier.batched_contains([make_key("a")]) == [False]
    await hot.batched_remove([make_key("a")])
    await hot.batched_put([make_chunk("a", payload=DATA)])
    assert await got(tier, arena, "a") == [DATA], "another writer has replaced it"
    assert await tier.batched_contains([make_key("a")]) == [True]


async def test_record_of_unknown_tables_counts_as_absent_and_is_replaceable(
    lossy_tier: EncodedBackend, hot: LocalCPUBackend, arena: Arena
) -> None:
    made = encoded_by(ZlibCodec("half", lossy=True), make_chunk("a", payload=DATA))
    header = msgspec.structs.replace(made.header, profile="half@other-tables")
    await hot.batched_put(
        [Chunk(made.key, header, encode_head(header, made.memory.get_size()), made.memory, "test")]
    )
    assert await got(lossy_tier, arena, "a") == [MissReason.PROFILE]
    assert await lossy_tier.batched_contains([make_key("a")]) == [False]
    assert await lossy_tier.batched_remove([make_key("a")]) == 1
    assert await lossy_tier.batched_put([make_chunk("a", payload=DATA)]) == [True]


def test_unusable_records_are_tried_again_after_a_while() -> None:
    """Another writer may have replaced it, and a reader that finds it absent never reads it."""
    now = 0.0
    records = UnusableRecords(clock=lambda: now)
    records.note(make_key(1))
    now = NOTED_S / 2
    records.note(make_key(2))
    now = NOTED_S
    assert make_key(1) not in records
    assert make_key(2) in records
    assert len(records) == 1


def test_number_of_unusable_records_is_bounded() -> None:
    records = UnusableRecords()
    for name in range(MAX_UNUSABLE_KEYS):
        records.note(make_key(name))
    records.note(make_key(0))
    records.note(make_key("new"))
    assert len(records) == MAX_UNUSABLE_KEYS
    assert make_key(0) in records
    assert make_key(1) not in records, "noted before all others"


@pytest.mark.parametrize(
    ("shape", "reason"), [((1 << 33,), MissReason.CORRUPT), ((1 << 31,), MissReason.NO_MEMORY)]
)
async def test_sizes_are_checked_before_memory_is_allocated(
    tier: EncodedBackend,
    hot: LocalCPUBackend,
    arena: Arena,
    shape: tuple[int, ...],
    reason: MissReason,
) -> None:
    made = encoded_by(ZlibCodec("flate"), make_chunk("bomb", payload=DATA))
    spec = TensorSpec("", "uint8", shape, 0, made.memory.get_size())
    assert await put_inside(hot, made, bytearray(made.memory.byte_array), (spec,))
    assert await got(tier, arena, "bomb") == [reason]


async def test_cleared_tier_forgets_unusable_records(
    tier: EncodedBackend, hot: LocalCPUBackend, arena: Arena
) -> None:
    await hot.batched_put([encoded_by(ZlibCodec("unknown"), make_chunk("a", payload=DATA))])
    assert await got(tier, arena, "a") == [MissReason.ENCODING]
    await tier.clear()
    assert await tier.batched_put([make_chunk("a", payload=DATA)]) == [True]


async def test_lossless_record_replaces_an_unusable_lossy_one(
    tier: EncodedBackend, hot: LocalCPUBackend, lossy: ZlibCodec, arena: Arena
) -> None:
    keys = [make_key("a"), make_key("other")]
    await hot.batched_put(
        [encoded_by(lossy, make_chunk(name, payload=DATA)) for name in ("a", "other")]
    )
    assert await tier.batched_contains(keys) == [True, True], "not read yet"
    assert await got(tier, arena, "a") == [MissReason.ENCODING]
    assert await tier.batched_contains(keys) == [False, True]
    assert await tier.batched_put([make_chunk("a", payload=DATA)]) == [True]
    assert await tier.batched_contains(keys) == [True, True]
    assert await got(tier, arena, "a", "other") == [DATA, MissReason.ENCODING]
    assert not inside(hot, "a").lossy
