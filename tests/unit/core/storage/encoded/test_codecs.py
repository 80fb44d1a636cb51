"""Codecs that several tiers share."""

from __future__ import annotations

import asyncio

import pytest
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.record import MissReason
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.encoded import EncodedBackend

from tests.fixtures.codecs import ZlibCodec, codecs_of, encoded_by
from tests.fixtures.encoded_tier import DATA, got, opened
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk


async def test_codecs_are_opened_once_for_all_tiers(
    hot: LocalCPUBackend, lossless: ZlibCodec, arena: Arena
) -> None:
    codecs = codecs_of(lossless)
    first, second = EncodedBackend(hot, codecs, "flate"), EncodedBackend(hot, codecs)
    await asyncio.gather(first.open(), second.open())
    assert lossless.num_open == 1
    await first.batched_put([make_chunk("a", payload=DATA)])
    assert await got(second, arena, "a") == [DATA]
    await second.close()
    assert lossless.num_open == 1
    await first.batched_put([make_chunk("b", payload=DATA)])
    assert await got(first, arena, "b") == [DATA]
    await first.close()
    assert lossless.num_open == 0
    with pytest.raises(UnavailableError):
        await first.batched_put([make_chunk("c", payload=DATA)])


async def test_codec_named_by_an_option_must_open(
    hot: LocalCPUBackend, lossless: ZlibCodec
) -> None:
    broken = ZlibCodec("broken", missing="numba")
    with pytest.raises(ConfigError, match=r"serde='broken'.*'numba'"):
        await EncodedBackend(hot, codecs_of(lossless, broken), "flate").open()
    assert lossless.num_open == 0


async def test_codec_that_only_decodes_may_be_missing(
    hot: LocalCPUBackend, lossless: ZlibCodec, arena: Arena
) -> None:
    other = ZlibCodec("other")
    codecs = Codecs({"flate": lossless}, (ZlibCodec("missing", missing="torch"), other))
    async with opened(EncodedBackend(hot, codecs, "flate")) as tier:
        await hot.batched_put(
            [
                encoded_by(ZlibCodec(serde), make_chunk(serde, payload=DATA))
                for serde in ("missing", "other")
            ]
        )
        assert await got(tier, arena, "missing", "other") == [MissReason.ENCODING, DATA]
    assert other.num_open == 0
