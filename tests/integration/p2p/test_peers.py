"""Chunks from a peer: real lookup, broker and sidecars, in processes of their own."""

from __future__ import annotations

import contextlib

import pytest
import torch
from lmcache_core.errors import AuthenticationError, LMCacheError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import BytesBufferMemoryObj
from lmcache_core.p2p import parse_distributed_url
from lmcache_core.record import Chunk
from lmcache_core.telemetry import RETRIEVED_TOKENS_TOTAL
from lmcache_core.wire.client import ClientOptions, LmClient

from tests.fixtures.embedded import PATIENT
from tests.fixtures.kv import (
    CHUNK_SIZE,
    HIDDEN,
    NUM_HEADS,
    NUM_LAYERS,
    KVCaches,
    assert_equal_prefix,
    empty_kv,
    random_kv,
    tokens_of,
)
from tests.fixtures.neighbourhood import Neighbourhood, Sidecar, eventually
from tests.fixtures.sidecar import engine_at

NUM_TOKENS = 4 * CHUNK_SIZE


def store_at(sidecar: Sidecar, seed: int = 1) -> None:
    with engine_at(sidecar.socket, **PATIENT) as engine:
        engine.store(tokens_of(NUM_TOKENS, seed), kvcaches=random_kv(NUM_TOKENS, seed))
    eventually(lambda: sidecar.get("/v1/status")["settled"])


def test_a_chunk_comes_from_a_peer_and_is_hot_afterwards(neighbourhood: Neighbourhood) -> None:
    a, b = neighbourhood.sidecar("a"), neighbourhood.sidecar("b")
    store_at(a)
    tokens, kv, target = tokens_of(NUM_TOKENS), random_kv(NUM_TOKENS, 1), empty_kv(NUM_TOKENS)
    with engine_at(b.socket, **PATIENT) as engine:
        assert engine.lookup(tokens, ["Hot"]) == 0
        assert engine.lookup(tokens, ["P2PBackend"]) == NUM_TOKENS
        assert engine.retrieve(tokens, kvcaches=target).all()
        assert engine.counters.value(RETRIEVED_TOKENS_TOTAL, "peers") == NUM_TOKENS
        assert engine.lookup(tokens, ["Hot"]) == NUM_TOKENS
    assert_equal_prefix(target, kv, NUM_TOKENS)
    eventually(lambda: b.get("/v1/status")["settled"])


def smooth_kv() -> KVCaches:
    """Values that a codec finds something in."""
    base = (
        torch.sin(torch.arange(NUM_TOKENS) * 0.3)[:, None, None]
        + torch.arange(HIDDEN).view(1, NUM_HEADS, -1) * 0.1
    )
    return tuple((base * (layer + 1), base * -(layer + 1)) for layer in range(NUM_LAYERS))


@pytest.mark.parametrize(
    ("serving", "pulling", "is_encoded", "is_exact"),
    [("cachegen", "cachegen:low", True, False), ("cachegen", "lossless", False, True)],
)
def test_peers_encode_for_peers_that_decode(
    neighbourhood: Neighbourhood, serving: str, pulling: str, is_encoded: bool, is_exact: bool
) -> None:
    a, b = (
        neighbourhood.sidecar("a", peer_serde=serving),
        neighbourhood.sidecar("b", peer_serde=pulling),
    )
    tokens, kv = tokens_of(NUM_TOKENS), smooth_kv()
    with engine_at(a.socket, **PATIENT) as engine:
        engine.store(tokens, kvcaches=kv)
    eventually(lambda: a.get("/v1/status")["settled"])
    target, again = empty_kv(NUM_TOKENS), empty_kv(NUM_TOKENS)
    with engine_at(b.socket, **PATIENT) as engine:
        assert engine.retrieve(tokens, kvcaches=target).all()
        assert engine.counters.value(RETRIEVED_TOKENS_TOTAL, "peers") == NUM_TOKENS
        assert engine.retrieve(tokens, kvcaches=again).all(), "from shared memory, with its digest"
    assert_equal_prefix(again, target, NUM_TOKENS)
    pairs = [
        (g, w) for got, want in zip(target, kv, strict=True) for g, w in zip(got, want, strict=True)
    ]
    assert all(torch.equal(g, w) for g, w in pairs) is is_exact
    assert all(float((g - w).abs().max()) < 1 for g, w in pairs)
    figures = b.get("/v1/tiers")["tiers"]["peers"]
    assert ("decoded_chunks" in figures) is is_encoded
    if is_encoded:
        assert figures["decoded_bytes"] < figures["decoded_raw_bytes"]
        assert "lmcache_codec_encoded_chunks_total" in a.text("/metrics")


def test_lossy_chunks_are_missing_for_a_peer_that_accepts_no_loss(
    neighbourhood: Neighbourhood,
) -> None:
    a, b = (
        neighbourhood.sidecar("a", peer_serde="cachegen"),
        neighbourhood.sidecar("b", peer_serde="cachegen"),
    )
    c = neighbourhood.sidecar("c")
    tokens = tokens_of(NUM_TOKENS)
    with engine_at(a.socket, **PATIENT) as engine:
        engine.store(tokens, kvcaches=smooth_kv())
    eventually(lambda: a.get("/v1/status")["settled"])
    with engine_at(b.socket, **PATIENT) as engine:
        assert engine.retrieve(tokens, kvcaches=empty_kv(NUM_TOKENS)).all()
    eventually(lambda: b.get("/v1/status")["settled"])
    a.process.kill()
    with engine_at(c.socket, **PATIENT) as engine:

        def is_refused() -> bool:
            assert not engine.retrieve(tokens, kvcaches=empty_kv(NUM_TOKENS)).any()
            return 'lmcache_sidecar_missed_chunks_total{reason="encoding"}' in c.text("/metrics")

        eventually(is_refused)


async def test_without_tokens_a_ticket_is_the_only_way_in(neighbourhood: Neighbourhood) -> None:
    a = neighbourhood.sidecar("a")
    store_at(a)
    host, port = parse_distributed_url(a.get("/v1/status")["distributed_url"])
    stranger = LmClient(host, port, None, ClientOptions(name="stranger"))
    key = CacheEngineKey.from_url(a.get("/v1/admin/chunks")["chunks"][0])
    try:
        with pytest.raises(AuthenticationError):
            await stranger.contains([ChunkKey.of("default", key)])
        with pytest.raises(AuthenticationError):
            await stranger.remove([ChunkKey.of("default", key)])
        with contextlib.suppress(LMCacheError):
            (result,) = await stranger.get(
                [ChunkKey.of("default", key)], lambda n: BytesBufferMemoryObj(bytearray(n))
            )
            assert not isinstance(result, Chunk)
    finally:
        await stranger.close()
    assert a.get("/v1/tiers")["tiers"]["memory"]["num_chunks"] == NUM_TOKENS // CHUNK_SIZE
