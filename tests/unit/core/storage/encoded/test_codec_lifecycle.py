"""Codecs that several tiers share: opened and closed once, also under cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from lmcache_core.concurrency import LoopThread
from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, MissReason
from lmcache_core.storage import LocalCPUBackend
from lmcache_core.storage import codecs as codecs_module
from lmcache_core.storage.codecs import MAX_CODEC_THREADS, Codecs
from lmcache_core.storage.disk.pool import ChunkJob
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy

from tests.fixtures.codecs import ZlibCodec, codecs_of, encoded_by
from tests.fixtures.encoded_tier import DATA, got, opened
from tests.fixtures.waiting import until, wait_until
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key


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


TIMEOUT_S = 60.0


async def test_read_does_not_wait_for_chunks_being_written(
    hot: LocalCPUBackend, lossless: ZlibCodec, arena: Arena
) -> None:
    """Writes may wait; a read that is late is a miss."""
    slow = ZlibCodec("slow")
    codecs = codecs_of(lossless, slow)
    writing, reading = EncodedBackend(hot, codecs, "slow"), EncodedBackend(hot, codecs, "flate")
    async with opened(writing), opened(reading):
        await reading.batched_put([make_chunk("a", payload=DATA)])
        slow.gate.clear()
        put = asyncio.ensure_future(
            writing.batched_put([make_chunk(i, payload=DATA) for i in range(2 * MAX_CODEC_THREADS)])
        )
        await until(lambda: slow.num_begun)
        assert await got(reading, arena, "a", timeout_s=TIMEOUT_S) == [DATA]
        slow.gate.set()
        assert all(await put)


def test_codecs_are_closed_even_if_their_closing_is_cancelled(
    hot: LocalCPUBackend, lossless: ZlibCodec
) -> None:
    """An engine waits for its tiers only so long, and then stops their loop: threads of a codec
    must not outlive it.
    """
    loop = LoopThread("test")
    loop.open()
    tier = EncodedBackend(hot, codecs_of(lossless), "flate")
    loop.run(tier.open(), TIMEOUT_S)
    lossless.gate.clear()
    put = loop.submit(tier.batched_put([make_chunk("a", payload=DATA)]))
    wait_until(lambda: lossless.num_begun > 0)

    async def close() -> None:
        is_closing.set()
        await tier.close()

    is_closing = threading.Event()
    closing = loop.submit(close())
    assert is_closing.wait(TIMEOUT_S)
    closing.cancel()
    loop.close()
    lossless.gate.set()
    wait_until(lambda: lossless.num_open == 0)
    assert put.cancelled()


async def test_codecs_that_open_too_late_are_closed(
    hot: LocalCPUBackend, lossless: ZlibCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes longer than an engine waits for it."""
    begun, may_continue = threading.Event(), threading.Event()

    class Slow(ZlibCodec):
        def open(self) -> None:
            begun.set()
            assert may_continue.wait(TIMEOUT_S)
            super().open()

    slow = Slow("slow")
    monkeypatch.setattr(codecs_module, "CLOSE_WAIT_S", 0.05)
    codecs = codecs_of(lossless, slow)
    tier = EncodedBackend(hot, codecs, "slow")
    opening = asyncio.ensure_future(tier.open())
    await asyncio.to_thread(begun.wait, TIMEOUT_S)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    may_continue.set()
    await until(lambda: not lossless.num_open and not slow.num_open)
    async with opened(tier):
        assert (lossless.num_open, slow.num_open) == (1, 1)
    assert slow.num_open == 0


async def test_bug_that_shows_after_the_look_for_bugs_leaks_nothing(
    hot: LocalCPUBackend, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for bugs and the look for results another thread may end."""

    class Buggy(ZlibCodec):
        def decode(self, header: Any, payload: memoryview, out: memoryview) -> None:
            super().decode(header, payload, out)
            raise ArithmeticError("a bug")

    codec = Buggy("flate")
    running: list[Future[Any]] = []
    taken = ChunkJob.take

    def take_when_all_have_ended(job: Any, late: Any, closed: Any) -> Any:
        codec.gate.set()
        for other in running:
            other.exception(TIMEOUT_S)
        return taken(job, late, closed)

    monkeypatch.setattr(ChunkJob, "take", take_when_all_have_ended)
    async with opened(EncodedBackend(hot, codecs := codecs_of(codec), "flate")) as tier:
        await tier.batched_put([make_chunk(0, payload=DATA), make_chunk(1, payload=DATA)])
        submit = codecs.decoding.submit

        def noted(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
            running.append(submit(work, *arguments))
            return running[-1]

        monkeypatch.setattr(codecs.decoding, "submit", noted)
        codec.gate.clear()
        results = await tier.batched_get([make_key(0), make_key(1)], arena, 0.05)
        assert not any(isinstance(result, Chunk) for result in results)
        await arena.until_empty()


async def test_codec_named_by_an_option_must_open(
    hot: LocalCPUBackend, lossless: ZlibCodec
) -> None:
    broken = ZlibCodec("broken", missing="numba")
    with pytest.raises(ConfigError, match=r"serde='broken'.*'numba'"):
        await EncodedBackend(hot, codecs_of(lossless, broken), "flate").open()
    assert lossless.num_open == 0


async def test_tier_that_does_not_open_leaves_no_codec_open(lossless: ZlibCodec) -> None:
    class Unavailable(LocalCPUBackend):
        async def open(self) -> None:
            raise UnavailableError("away")

    inner = Unavailable(ArenaAllocator.anonymous(1 << 20), create_policy())
    with pytest.raises(UnavailableError):
        await EncodedBackend(inner, codecs_of(lossless), "flate").open()
    assert lossless.num_open == 0
