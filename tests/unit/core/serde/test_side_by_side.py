"""Threads of a codec and the memory that they work on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from lmcache_core.errors import SerdeError
from lmcache_core.record import RecordHeader, TensorSpec
from lmcache_core.serde.chunk_codec import CacheGenCodec
from lmcache_core.serde.codec import EncodedPayload
from lmcache_core.serde.profiles import Profile
from lmcache_core.serde.side_by_side import side_by_side

SHAPE = (2, 2, 256, 128)
LATE_S = 0.1
PATIENCE_S = 60.0


@pytest.fixture(params=[None, Profile.STANDARD, Profile.HIGH], ids=str)
def codec(request: pytest.FixtureRequest) -> Iterator[CacheGenCodec]:
    made = CacheGenCodec(request.param, threads=2)
    made.open()
    yield made
    made.close()


def encoded(codec: CacheGenCodec) -> tuple[EncodedPayload, int]:
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    spec = TensorSpec("", "float32", SHAPE, 0, values.nbytes)
    made = codec.encode((spec,), memoryview(values.tobytes()))
    assert made is not None
    return made, values.nbytes


class LateLoops:
    """Loops of which the first stream to be decoded is damaged, and the others take their time."""

    def __init__(self, loops: object) -> None:
        self._loops = loops
        self._lock = threading.Lock()
        self._num_begun = 0
        self._has_company = threading.Event()
        self.num_underway = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._loops, name)

    def decode_sections(self, *arguments: object) -> int:
        with self._lock:
            self._num_begun += 1
            is_first = self._num_begun == 1
            self.num_underway += 1
        if is_first:
            assert self._has_company.wait(PATIENCE_S), "nobody works beside it"
        else:
            self._has_company.set()
            time.sleep(LATE_S)
        with self._lock:
            self.num_underway -= 1
        return int(is_first)


def test_nothing_writes_any_more_when_a_payload_has_been_refused(
    codec: CacheGenCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told that it is damaged gives the memory back, and it becomes another chunk's."""
    made, num_bytes = encoded(codec)
    tools = codec._tools
    assert tools is not None
    late = LateLoops(tools.quantised._loops)
    for coder in (tools.quantised, tools.lossless):
        monkeypatch.setattr(coder, "_loops", late)
    header = RecordHeader(b"key", made.serde, made.profile, made.lossy, made.tensors, bytes(16))
    with pytest.raises(SerdeError):
        codec.decode(header, made.payload, memoryview(bytearray(num_bytes)))
    assert late.num_underway == 0


def test_a_failure_waits_for_the_others() -> None:
    ended: list[int] = []

    def work(part: int) -> int:
        if part == 0:
            raise ArithmeticError("the first")
        time.sleep(LATE_S)
        ended.append(part)
        return part

    with ThreadPoolExecutor(3) as pool:
        with pytest.raises(ArithmeticError, match="the first"):
            side_by_side(pool, work, range(3))
        assert sorted(ended) == [1, 2]
        assert side_by_side(pool, lambda part: 2 * part, range(50)) == [
            2 * part for part in range(50)
        ]
    with pytest.raises(RuntimeError):
        side_by_side(pool, work, range(3))
