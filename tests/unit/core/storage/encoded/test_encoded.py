"""A tier whose records are encoded: round trips, deadlines, memory; which records it accepts and
serves, and which it replaces.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, Miss, MissReason, TensorSpec, decoded_header, encode_head
from lmcache_core.serde.codec import GroupError, encoding_report
from lmcache_core.storage import LocalCPUBackend, encoded
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.unusable import MAX_UNUSABLE_KEYS, NOTED_S, UnusableRecords

from tests.fixtures.codecs import ZlibCodec, codecs_of, decoded_from_lossy, encoded_by, seen_lossily
from tests.fixtures.encoded_tier import DATA, content, got, inside, opened, put_inside
from tests.fixtures.loop_clock import FAR_S, LoopClock
from tests.fixtures.waiting import until
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key


async def test_record_is_smaller_inside_and_its_payload_comes_back_bit_for_bit(
    tier: EncodedBackend, hot: LocalCPUBackend, arena: Arena
) -> None:
    chunk = make_chunk("a", payload=DATA)
    assert await tier.batched_put([chunk]) == [True]
    header = inside(hot, "a")
    assert (header.key, header.serde, header.lossy) == (chunk.header.key, "flate", False)
    assert hot.stats()["used_bytes"] < len(DATA) / 4
    report = encoding_report(header)
    assert report is not None
    assert (report.raw_bytes, report.groups) == (len(DATA), ())
    [result] = await tier.batched_get([chunk.key], arena)
    assert isinstance(result, Chunk)
    assert result.described == decoded_header(header)
    assert not result.is_sealed
    assert result.header == chunk.header, "sealed, it is the record that was put"
    assert (result.key, result.tier) == (chunk.key, "memory")
    assert content(result) == DATA


async def test_record_whose_head_grows_more_than_its_payload_shrinks_stays_raw(
    hot: LocalCPUBackend,
) -> None:
    class Wordy(ZlibCodec):
        def encode(self, tensors, payload):  # type: ignore[no-untyped-def]
            made = super().encode(tensors, payload)
            assert made is not None
            return msgspec.structs.replace(
                made,
                profile="half@" + "t" * 100,
                report=msgspec.structs.replace(made.report, groups=groups),
            )

    groups = (GroupError("layers", 0.5, 0.25),) * 40
    async with opened(EncodedBackend(hot, codecs_of(Wordy("wordy")), "wordy")) as tier:
        data = b"\0" * 300
        await tier.batched_put(
            [make_chunk("short", payload=data), make_chunk("long", payload=data * 100)]
        )
    assert tier.stats()["unencoded_chunks"] == 1
    assert tier.stats()["encoded_chunks"] == 1


async def test_chunk_not_decoded_in_time_is_a_miss_that_releases_its_memory(
    tier: EncodedBackend, lossless: ZlibCodec, arena: Arena
) -> None:
    await tier.batched_put([make_chunk(name, payload=DATA) for name in range(6)])
    await tier.batched_put([make_chunk("raw")])
    lossless.gate.clear()
    clock, num_begun = LoopClock(), lossless.num_begun
    getting = asyncio.ensure_future(got(tier, arena, "raw", *range(6), timeout_s=FAR_S))
    await until(lambda: lossless.num_begun > num_begun)
    clock.jump()
    raw = bytes(make_chunk("raw").memory.byte_array)
    assert await getting == [raw, *[MissReason.DEADLINE] * 6]
    assert arena.allocator.used_bytes > 0, "a thread still writes there"
    lossless.gate.set()
    await arena.until_empty()


async def test_part_of_the_deadline_is_reserved_for_decoding(
    lossless: ZlibCodec, arena: Arena
) -> None:
    limits: list[float | None] = []

    class Noted(LocalCPUBackend):
        async def batched_get(self, keys, allocate, timeout_s=None):  # type: ignore[no-untyped-def]
            limits.append(timeout_s)
            return await super().batched_get(keys, allocate, timeout_s)

    inner, clock = Noted(ArenaAllocator.anonymous(1 << 20), create_policy()), LoopClock()
    async with opened(EncodedBackend(inner, codecs_of(lossless), "flate")) as tier:
        await tier.batched_put([make_chunk("a", payload=DATA)])
        assert await got(tier, arena, "a", timeout_s=FAR_S) == [DATA]
        lossless.gate.clear()
        getting = asyncio.ensure_future(got(tier, arena, "a", timeout_s=FAR_S))
        await until(lambda: lossless.num_begun == 3)
        clock.jump(FAR_S / 10)  # decoding takes so long
        await asyncio.sleep(0)
        lossless.gate.set()
        assert await getting == [DATA]
        await got(tier, arena, "a", timeout_s=FAR_S)
        await got(tier, arena, "a", timeout_s=0.02)
    assert limits[0] == FAR_S
    assert limits[2] is not None
    assert 0.9 * FAR_S <= limits[2] < 0.99 * FAR_S
    assert limits[3] == pytest.approx(0.01), "at most half"
    await arena.until_empty()


async def test_raw_bytes_being_encoded_are_bounded(
    hot: LocalCPUBackend, lossless: ZlibCodec, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded, "MAX_ENCODING_BYTES", 3 * len(DATA))
    async with opened(EncodedBackend(hot, codecs_of(lossless), "flate")) as tier:
        puts = [
            tier.batched_put([make_chunk(10 * put + i, payload=DATA) for i in range(5)])
            for put in range(4)
        ]
        assert all(all(kept) for kept in await asyncio.gather(*puts))
        assert 0 < lossless.most_raw_bytes <= 3 * len(DATA)
        large = DATA * 5
        assert await tier.batched_put(
            [make_chunk("large", payload=large), make_chunk("small", payload=DATA)]
        ) == [True, True]
        assert await got(tier, arena, "large", "small") == [large, DATA], (
            "one larger than the bound is encoded alone"
        )


async def test_bug_of_a_codec_is_raised_and_leaks_nothing(
    hot: LocalCPUBackend, arena: Arena
) -> None:
    class Buggy(ZlibCodec):
        def decode(self, header, payload, out):  # type: ignore[no-untyped-def]
            if bytes(payload) == bad:
                raise ArithmeticError("a bug")
            super().decode(header, payload, out)

    codec = Buggy("flate")
    bad = bytes(encoded_by(codec, make_chunk("bad", payload=DATA[:1000])).memory.byte_array)
    async with opened(EncodedBackend(hot, codecs_of(codec), "flate")) as tier:
        await tier.batched_put(
            [
                make_chunk(0, payload=DATA),
                make_chunk("bad", payload=DATA[:1000]),
                make_chunk(1, payload=DATA),
            ]
        )
        with pytest.raises(ArithmeticError):
            await tier.batched_get([make_key(name) for name in (0, "bad", 1)], arena)
        await arena.until_empty()
        assert await got(tier, arena, 0) == [DATA]


async def test_decoded_chunks_are_sealed_on_request(
    hot: LocalCPUBackend, lossless: ZlibCodec, arena: Arena
) -> None:
    async with opened(EncodedBackend(hot, codecs_of(lossless), "flate", seals=True)) as tier:
        await tier.batched_put([make_chunk("a", payload=DATA)])
        [result] = await tier.batched_get([make_key("a")], arena)
        assert isinstance(result, Chunk)
        assert result.is_sealed
        assert result.header == make_chunk("a", payload=DATA).header
        result.release()


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


async def test_server_that_answers_encoding_is_believed(lossless: ZlibCodec, arena: Arena) -> None:
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


async def put_stating(hot: LocalCPUBackend, name: str, *shape: int) -> None:
    """Store a record that states that it decodes to so many bytes."""
    made = encoded_by(ZlibCodec("flate"), make_chunk(name, payload=DATA))
    spec = TensorSpec("", "uint8", shape, 0, made.memory.get_size())
    assert await put_inside(hot, made, bytearray(made.memory.byte_array), (spec,))


@pytest.mark.parametrize("is_stated", [False, True], ids=["decoding fails", "states too much"])
async def test_record_that_does_not_decode_counts_as_absent_and_is_replaced(
    tier: EncodedBackend, hot: LocalCPUBackend, arena: Arena, is_stated: bool
) -> None:
    await (put_stating(hot, "a", 1 << 33) if is_stated else put_damaged(hot))
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
    await put_stating(hot, "bomb", *shape)
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
