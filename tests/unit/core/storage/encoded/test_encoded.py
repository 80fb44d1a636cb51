"""A tier whose records are encoded: round trips, deadlines, memory, and what it refuses."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, MissReason, decoded_header
from lmcache_core.serde.codec import GroupError, encoding_report
from lmcache_core.storage import LocalCPUBackend, encoded
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy

from tests.fixtures.codecs import ZlibCodec, codecs_of, encoded_by
from tests.fixtures.encoded_tier import DATA, content, got, inside, opened
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
