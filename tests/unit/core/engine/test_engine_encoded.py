"""Engines whose slower tiers are encoded: through each of them, after a restart, the KV that was
stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lmcache_core.concurrency import LoopThread
from lmcache_core.config import REMOTE_SERDES
from lmcache_core.names import STORAGE_TIER
from lmcache_core.record import PREFIX_BYTES, RecordHeader, decode_head, decode_prefix
from lmcache_core.telemetry import (
    CODEC_DECODED_RAW_BYTES_TOTAL,
    CODEC_ENCODED_BYTES_TOTAL,
    CODEC_ENCODED_RAW_BYTES_TOTAL,
    RETRIEVED_CHUNKS_TOTAL,
)

from tests.fixtures.embedded import PATIENT, embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS, KVCaches, empty_kv
from tests.fixtures.prompts import tokens_of
from tests.fixtures.redis_server import running_redis
from tests.fixtures.wire import MemoryStore, serving

TOKENS = tokens_of((0, 1, 2), 5)
NUM_CHUNKS = 3
TIERS = ("disk", "file", "redis", "lm")
NUM_HEADS = 2
TIMEOUT_S = 10.0


def smooth_kv(tokens: torch.Tensor) -> KVCaches:
    """Values that a codec finds something in, different for every token."""
    base = (
        torch.sin(torch.arange(len(tokens)) * 0.3)[:, None, None]
        + torch.arange(HIDDEN).view(1, NUM_HEADS, -1) * 0.1
    )
    return tuple((base * (layer + 1), base * -(layer + 1)) for layer in range(NUM_LAYERS))


@contextlib.contextmanager
def in_background(
    server: Callable[[], contextlib.AbstractAsyncContextManager[object]],
) -> Iterator[object]:
    """An async server on a loop of its own, since engines block."""
    loop = LoopThread("test-server")
    loop.open()
    context = server()
    try:
        yield loop.run(context.__aenter__(), TIMEOUT_S)
    finally:
        loop.run(context.__aexit__(None, None, None), TIMEOUT_S)
        loop.close()


@pytest.fixture
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, object]]:
    """The options that name the tier, but for its serde."""
    match request.param:
        case "disk":
            yield {"local_disk": f"file://{tmp_path}/disk/", "max_local_disk_size": 0.05}
        case "file":
            (tmp_path / "shared").mkdir()
            yield {"remote_url": f"file://{tmp_path}/shared/"}
        case "redis":
            with running_redis() as server:
                yield {"remote_url": server.url}
        case "lm":
            with in_background(lambda: serving(MemoryStore())) as lm:
                yield {"remote_url": f"lm://127.0.0.1:{lm.port}"}  # type: ignore[attr-defined]


def with_serde(tier: dict[str, object], serde: str) -> dict[str, object]:
    return PATIENT | tier | {"local_disk_serde" if "local_disk" in tier else "remote_serde": serde}


def store(options: dict[str, object], kv: KVCaches) -> dict[str, int]:
    """Store in an engine that ends; its slower tier's figures."""
    with embedded_engine(**options) as cache:
        cache.engine.store(TOKENS, kvcaches=kv)
        cache.drain()
        stats = cache.engine.stats()
        assert cache.engine.counters.value(CODEC_ENCODED_BYTES_TOTAL) == stats[list(stats)[-1]].get(
            "encoded_bytes", 0
        )
        return stats[list(stats)[-1]]


def retrieve(options: dict[str, object]) -> tuple[int, KVCaches, dict[str, int]]:
    """Retrieve in a new engine: how many tokens came, what it has now, the misses by reason."""
    target = empty_kv(len(TOKENS))
    with embedded_engine(**options) as cache:
        num_loaded = int(cache.engine.retrieve(TOKENS, kvcaches=target).sum())
        again = empty_kv(len(TOKENS))
        assert int(cache.engine.retrieve(TOKENS, kvcaches=again).sum()) == num_loaded
        assert_same(again, target)
        cache.check_nothing_held()
        return num_loaded, target, cache.misses()


def assert_same(got: KVCaches, want: KVCaches) -> None:
    for got_layer, want_layer in zip(got, want, strict=True):
        for g, w in zip(got_layer, want_layer, strict=True):
            assert torch.equal(g.view(torch.int32), w.view(torch.int32)), "bit for bit"


@pytest.mark.parametrize("tier", TIERS, indirect=True)
def test_without_loss_every_tier_gives_back_every_bit(tier: dict[str, object]) -> None:
    options = with_serde(tier, "lossless")
    figures = store(options, smooth_kv(TOKENS))
    assert figures["encoded_chunks"] == NUM_CHUNKS
    assert figures["encoded_bytes"] < figures["encoded_raw_bytes"]
    num_loaded, got, misses = retrieve(options)
    assert (num_loaded, misses) == (len(TOKENS), {})
    assert_same(got, smooth_kv(TOKENS))
    assert retrieve(with_serde(tier, "naive"))[2] == {"encoding": 2 * NUM_CHUNKS}, (
        "nothing is decoded that was not opened"
    )


@pytest.mark.parametrize("tier", TIERS, indirect=True)
def test_with_loss_every_tier_gives_back_values_close_by_and_only_to_who_asked(
    tier: dict[str, object],
) -> None:
    kv = smooth_kv(TOKENS)
    figures = store(with_serde(tier, "cachegen"), kv)
    assert figures["encoded_bytes"] < figures["encoded_raw_bytes"] / 2
    num_loaded, got, misses = retrieve(with_serde(tier, "cachegen"))
    assert (num_loaded, misses) == (len(TOKENS), {})
    largest = max(float(side.abs().max()) for layer in kv for side in layer)
    for got_layer, want_layer in zip(got, kv, strict=True):
        for g, w in zip(got_layer, want_layer, strict=True):
            assert not torch.equal(g, w)
            assert float((g - w).abs().max()) < 0.1 * largest
    num_loaded, got, misses = retrieve(with_serde(tier, "lossless"))
    assert (num_loaded, list(misses)) == (0, ["encoding"])
    assert all(side.isnan().all() for layer in got for side in layer), (
        "the serving engine's memory is untouched"
    )


@pytest.mark.parametrize("tier", TIERS, indirect=True)
def test_a_lossless_engine_puts_its_own_in_the_place_of_lossy_records(
    tier: dict[str, object],
) -> None:
    kv = smooth_kv(TOKENS)
    store(with_serde(tier, "cachegen"), kv)
    options = with_serde(tier, "lossless")
    with embedded_engine(**options) as cache:
        assert not cache.engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
        assert cache.engine.lookup(TOKENS) == 0
        cache.engine.store(TOKENS, kvcaches=kv)
        cache.drain()
    num_loaded, got, _ = retrieve(options)
    assert num_loaded == len(TOKENS)
    assert_same(got, kv)
    num_loaded, got, _ = retrieve(with_serde(tier, "cachegen"))
    assert num_loaded == len(TOKENS), "who takes loss takes what has none"
    assert_same(got, kv)


@pytest.mark.parametrize("serde", REMOTE_SERDES)
def test_every_serde_goes_from_end_to_end(tmp_path: Path, serde: str) -> None:
    options = PATIENT | {"remote_url": f"file://{tmp_path}/", "remote_serde": serde}
    kv = smooth_kv(TOKENS)
    store(options, kv)
    headers = {header.serde: header for header in headers_in(tmp_path)}
    assert set(headers) == {serde.partition(":")[0]}
    num_loaded, got, misses = retrieve(options)
    assert (num_loaded, misses) == (len(TOKENS), {})
    if "cachegen" in serde:
        assert all(header.lossy for header in headers.values())
    else:
        assert_same(got, kv)


@pytest.mark.parametrize("serde", ["torch", "safetensor", "fast"])
def test_the_documented_formats_are_read_whatever_is_configured(tmp_path: Path, serde: str) -> None:
    kv = smooth_kv(TOKENS)
    store(PATIENT | {"remote_url": f"file://{tmp_path}/", "remote_serde": serde}, kv)
    num_loaded, got, _ = retrieve(
        PATIENT | {"remote_url": f"file://{tmp_path}/", "remote_serde": None}
    )
    assert num_loaded == len(TOKENS)
    assert_same(got, kv)


@pytest.mark.parametrize("serde", ["lossless", "cachegen", "fast"])
def test_any_damage_on_disk_is_a_miss(tmp_path: Path, serde: str) -> None:
    """Damage that the digest finds; what comes in front of it is served."""
    options = PATIENT | {"remote_url": f"file://{tmp_path}/", "remote_serde": serde}
    store(options, smooth_kv(TOKENS))
    for path in tmp_path.rglob("*.kvr"):
        record = bytearray(path.read_bytes())
        for at in (3, 40, 505, 513, len(record) - 1):
            record[at] ^= 0x20
            path.write_bytes(record)
            num_loaded, _, misses = retrieve(options)
            assert num_loaded % CHUNK_SIZE == 0
            assert num_loaded < len(TOKENS)
            assert set(misses) <= {"corrupt", "never_stored"}
            record[at] ^= 0x20
        path.write_bytes(record)
    assert retrieve(options)[0] == len(TOKENS)


def test_the_engine_counts_what_its_codecs_do(tmp_path: Path) -> None:
    options = PATIENT | {"remote_url": f"file://{tmp_path}/", "remote_serde": "cachegen"}
    kv = smooth_kv(TOKENS)
    store(options, kv)
    with embedded_engine(**options) as cache:
        assert cache.engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).all()
        assert cache.engine.counters.value(RETRIEVED_CHUNKS_TOTAL, STORAGE_TIER) == NUM_CHUNKS
        assert cache.engine.counters.value(CODEC_DECODED_RAW_BYTES_TOTAL, "cachegen") > 0
        assert cache.engine.counters.value(CODEC_ENCODED_RAW_BYTES_TOTAL) == 0


def headers_in(directory: Path) -> list[RecordHeader]:
    headers = []
    for path in directory.rglob("*.kvr"):
        record = path.read_bytes()
        headers.append(decode_head(record[: decode_prefix(record[:PREFIX_BYTES]).head_bytes])[0])
    assert len(headers) == NUM_CHUNKS
    return headers
