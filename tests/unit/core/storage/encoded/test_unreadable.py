"""Records that a tier has and cannot give: nobody is promised them, and damaged ones give place."""

from __future__ import annotations

import msgspec
import pytest
from lmcache_core.record import Chunk, MissReason, TensorSpec, encode_head
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.unusable import NOTED_S, UnusableRecords

from tests.fixtures.codecs import ZlibCodec, codecs_of, encoded_by
from tests.fixtures.encoded_tier import DATA, got, inside, opened, put_inside
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key


async def put_damaged(hot: LocalCPUBackend, *, is_huge: bool = False) -> None:
    """A record that does not decode, under the right digest."""
    made = encoded_by(ZlibCodec("flate"), make_chunk("a", payload=DATA))
    payload = bytearray(made.memory.byte_array)
    payload[3] ^= 0x55
    specs = (
        (TensorSpec("", "uint8", (1 << 33,), 0, len(payload)),) if is_huge else made.header.tensors
    )
    assert await put_inside(hot, made, payload, specs)


@pytest.mark.parametrize("is_huge", [False, True])
async def test_what_does_not_decode_is_not_promised_again_and_gives_place(
    tier: EncodedBackend, hot: LocalCPUBackend, arena: Arena, is_huge: bool
) -> None:
    await put_damaged(hot, is_huge=is_huge)
    assert await got(tier, arena, "a") == [MissReason.CORRUPT]
    assert await tier.batched_contains([make_key("a")]) == [False], (
        "who is told that it is there stores nothing, and misses for ever"
    )
    assert await tier.batched_put([make_chunk("a", payload=DATA)]) == [True]
    assert await got(tier, arena, "a") == [DATA]
    assert await tier.batched_contains([make_key("a")]) == [True]


async def test_damaged_lossy_records_give_place_to_lossy_ones(
    lossy_tier: EncodedBackend, hot: LocalCPUBackend, arena: Arena
) -> None:
    await put_damaged(hot)
    assert await got(lossy_tier, arena, "a") == [MissReason.CORRUPT]
    assert await lossy_tier.batched_put([make_chunk("a", payload=DATA)]) == [True]
    assert inside(hot, "a").serde == "half"


async def test_what_others_may_read_is_not_promised_and_not_written_over(
    tier: EncodedBackend, hot: LocalCPUBackend, lossless: ZlibCodec, arena: Arena
) -> None:
    await hot.batched_put([encoded_by(ZlibCodec("unknown"), make_chunk("a", payload=DATA))])
    assert await tier.batched_contains([make_key("a")]) == [True], "nobody knows yet"
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
    assert await got(tier, arena, "a") == [DATA], "whoever asks for it is told what is there now"
    assert await tier.batched_contains([make_key("a")]) == [True]


async def test_unknown_tables_are_not_promised(
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


async def test_a_cleared_tier_remembers_nothing(
    hot: LocalCPUBackend, lossless: ZlibCodec, arena: Arena
) -> None:
    async with opened(EncodedBackend(hot, codecs_of(lossless), "flate")) as tier:
        await hot.batched_put([encoded_by(ZlibCodec("unknown"), make_chunk("a", payload=DATA))])
        assert await got(tier, arena, "a") == [MissReason.ENCODING]
        await tier.clear()
        assert await tier.batched_put([make_chunk("a", payload=DATA)]) == [True]


def test_what_was_noted_is_looked_at_again_after_a_while() -> None:
    """Another writer may have put it right, and who is told that it is not there never asks for
    it.
    """
    now = 0.0
    way = UnusableRecords(clock=lambda: now)
    way.note(make_key(1))
    now = NOTED_S / 2
    way.note(make_key(2))
    now = NOTED_S
    assert make_key(1) not in way
    assert make_key(2) in way
    assert len(way) == 1
