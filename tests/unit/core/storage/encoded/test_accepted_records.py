"""Which records a tier that encodes accepts, serves and replaces."""

from __future__ import annotations

import logging

import pytest
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, Miss, MissReason, TensorSpec
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy

from tests.fixtures.codecs import ZlibCodec, codecs_of, decoded_from_lossy, encoded_by, seen_lossily
from tests.fixtures.encoded_tier import DATA, content, got, inside, opened, put_inside
from tests.fixtures.wire import Arena
from tests.suites.chunks import held_keys, make_chunk, make_key


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


async def test_lossy_chunk_is_refused_where_it_would_not_be_served(
    tier: EncodedBackend, hot: LocalCPUBackend
) -> None:
    chunks = [
        make_chunk("a", payload=DATA),
        decoded_from_lossy(make_chunk("b", payload=DATA)),
        make_chunk("c", payload=DATA),
    ]
    assert await tier.batched_put(chunks) == [True, False, True]
    assert set(held_keys(hot)) == {make_key("a"), make_key("c")}


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
