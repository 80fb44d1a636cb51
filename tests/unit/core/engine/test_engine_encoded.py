"""Engines whose slower tiers are encoded serve after a restart the KV that was stored. Every
encoded tier: `tests/contract/test_backends.py` and `test_remote_backends.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lmcache_core.config import REMOTE_SERDES
from lmcache_core.engine import transfer
from lmcache_core.engine.transfer import LoadedWithLoss
from lmcache_core.names import STORAGE_TIER
from lmcache_core.record import PREFIX_BYTES, RecordHeader, decode_head, decode_prefix
from lmcache_core.serde import DOCUMENTED_NAMES
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.telemetry import (
    CODEC_DECODED_RAW_BYTES_TOTAL,
    CODEC_ENCODED_BYTES_TOTAL,
    CODEC_ENCODED_RAW_BYTES_TOTAL,
    RETRIEVED_CHUNKS_TOTAL,
)

from tests.fixtures.embedded import PATIENT, embedded_engine
from tests.fixtures.kv import HIDDEN, NUM_LAYERS, KVCaches, empty_kv
from tests.fixtures.prompts import tokens_of
from tests.suites.chunks import make_key

TOKENS = tokens_of((0, 1, 2), 5)
NUM_CHUNKS = 3
NUM_HEADS = 2


def smooth_kv(tokens: torch.Tensor) -> KVCaches:
    """Values that a codec finds something in, different for every token."""
    base = (
        torch.sin(torch.arange(len(tokens)) * 0.3)[:, None, None]
        + torch.arange(HIDDEN).view(1, NUM_HEADS, -1) * 0.1
    )
    return tuple((base * (layer + 1), base * -(layer + 1)) for layer in range(NUM_LAYERS))


def with_serde(directory: Path, serde: str) -> dict[str, object]:
    """The options of an engine with an encoded disk."""
    disk = {"local_disk": f"file://{directory}/disk/", "max_local_disk_size": 0.05}
    return PATIENT | disk | {"local_disk_serde": serde}


def store(options: dict[str, object], kv: KVCaches) -> dict[str, int]:
    """Store in an engine that ends; return the figures of its slower tier."""
    with embedded_engine(**options) as cache:
        cache.engine.store(TOKENS, kvcaches=kv)
        cache.drain()
        stats = cache.engine.stats()
        assert cache.engine.counters.value(CODEC_ENCODED_BYTES_TOTAL) == stats[list(stats)[-1]].get(
            "encoded_bytes", 0
        )
        return stats[list(stats)[-1]]


def retrieve(options: dict[str, object]) -> tuple[int, KVCaches, dict[str, int]]:
    """Retrieve in a new engine; return how many tokens came, their KV, the misses by reason."""
    target = empty_kv(len(TOKENS))
    with embedded_engine(**options) as cache:
        num_loaded = int(cache.engine.retrieve(TOKENS, kvcaches=target).sum())
        again = empty_kv(len(TOKENS))
        assert int(cache.engine.retrieve(TOKENS, kvcaches=again).sum()) == num_loaded
        assert_same(again, target)
        cache.check_nothing_held()
        assert cache.engine.counters.value(CODEC_ENCODED_RAW_BYTES_TOTAL) == 0
        return num_loaded, target, cache.misses()


def assert_same(got: KVCaches, want: KVCaches) -> None:
    for got_layer, want_layer in zip(got, want, strict=True):
        for g, w in zip(got_layer, want_layer, strict=True):
            assert torch.equal(g.view(torch.int32), w.view(torch.int32)), "bit for bit"


def test_lossless_gives_back_every_bit(tmp_path: Path) -> None:
    options = with_serde(tmp_path, "lossless")
    figures = store(options, smooth_kv(TOKENS))
    assert figures["encoded_chunks"] == NUM_CHUNKS
    assert figures["encoded_bytes"] < figures["encoded_raw_bytes"]
    num_loaded, got, misses = retrieve(options)
    assert (num_loaded, misses) == (len(TOKENS), {})
    assert_same(got, smooth_kv(TOKENS))
    assert retrieve(with_serde(tmp_path, "naive"))[2] == {"encoding": 2 * NUM_CHUNKS}, (
        "nothing is decoded that was not opened"
    )


def test_lossy_chunks_are_served_close_by_and_only_to_an_engine_that_allows_loss(
    tmp_path: Path,
) -> None:
    kv = smooth_kv(TOKENS)
    figures = store(with_serde(tmp_path, "cachegen"), kv)
    assert figures["encoded_bytes"] < figures["encoded_raw_bytes"] / 2
    num_loaded, got, misses = retrieve(with_serde(tmp_path, "cachegen"))
    assert (num_loaded, misses) == (len(TOKENS), {})
    largest = max(float(side.abs().max()) for layer in kv for side in layer)
    for got_layer, want_layer in zip(got, kv, strict=True):
        for g, w in zip(got_layer, want_layer, strict=True):
            assert not torch.equal(g, w)
            assert float((g - w).abs().max()) < 0.1 * largest
    num_loaded, got, misses = retrieve(with_serde(tmp_path, "lossless"))
    assert (num_loaded, list(misses)) == (0, ["encoding"])
    assert all(side.isnan().all() for layer in got for side in layer), (
        "the serving engine's memory is untouched"
    )


def test_a_lossless_engine_replaces_lossy_records(tmp_path: Path) -> None:
    kv = smooth_kv(TOKENS)
    store(with_serde(tmp_path, "cachegen"), kv)
    options = with_serde(tmp_path, "lossless")
    with embedded_engine(**options) as cache:
        assert not cache.engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
        assert cache.engine.lookup(TOKENS) == 0
        cache.engine.store(TOKENS, kvcaches=kv)
        cache.drain()
    num_loaded, got, _ = retrieve(options)
    assert num_loaded == len(TOKENS)
    assert_same(got, kv)
    num_loaded, got, _ = retrieve(with_serde(tmp_path, "cachegen"))
    assert num_loaded == len(TOKENS)
    assert_same(got, kv)


@pytest.mark.parametrize("serde", REMOTE_SERDES)
def test_every_serde_serves_and_documented_ones_whatever_is_configured(
    tmp_path: Path, serde: str
) -> None:
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
    if serde in DOCUMENTED_NAMES:
        num_loaded, got, _ = retrieve(options | {"remote_serde": None})
        assert num_loaded == len(TOKENS)
        assert_same(got, kv)


def test_kv_loaded_with_loss_keeps_its_mark_when_the_engine_stores_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    remote = {"remote_url": f"file://{tmp_path}/shared/", "remote_serde": "cachegen"}
    store(PATIENT | remote, smooth_kv(TOKENS))
    disk, kv = tmp_path / "disk", empty_kv(len(TOKENS))
    with embedded_engine(disk, **remote, **PATIENT) as cache:
        assert cache.engine.retrieve(TOKENS, kvcaches=kv).all()
        assert cache.engine.counters.value(RETRIEVED_CHUNKS_TOTAL, STORAGE_TIER) == NUM_CHUNKS
        assert cache.engine.counters.value(CODEC_DECODED_RAW_BYTES_TOTAL, "cachegen") > 0
        cache.forget_hot()  # and then the engine stores its whole prompt
        cache.engine.store(TOKENS, kvcaches=kv)
        cache.drain()
        assert cache.lower(DiskBackend).stats()["num_chunks"] == 0, "this disk is for exact KV"
    with embedded_engine(disk, **PATIENT) as cache:
        assert not cache.engine.retrieve(TOKENS, kvcaches=empty_kv(len(TOKENS))).any()
        cache.engine.store(TOKENS, kvcaches=smooth_kv(TOKENS))
        cache.forget_hot()
        assert cache.engine.retrieve(TOKENS, kvcaches=kv).all()
        assert_same(kv, smooth_kv(TOKENS))


def test_the_marks_of_loss_are_bounded_and_end_when_exact_kv_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "MAX_REMEMBERED_KEYS", 2)
    loaded = LoadedWithLoss()
    keys = [make_key(i).key for i in range(3)]
    for key in keys:
        loaded.note(key, is_lossy=True)
    assert [key in loaded for key in keys] == [False, True, True]
    loaded.note(keys[1], is_lossy=False)
    assert [key in loaded for key in keys] == [False, False, True]


def headers_in(directory: Path) -> list[RecordHeader]:
    headers = []
    for path in directory.rglob("*.kvr"):
        record = path.read_bytes()
        headers.append(decode_head(record[: decode_prefix(record[:PREFIX_BYTES]).head_bytes])[0])
    assert len(headers) == NUM_CHUNKS
    return headers
