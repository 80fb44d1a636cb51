"""Encodings of a sidecar: its tiers, its figures, and missing packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from lmcache_core.memory import ArenaAllocator
from lmcache_core.record import Chunk, MissReason, payload_digest
from lmcache_core.storage.codecs import create_codecs, encoded_chunk
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.served import LocalStore
from lmcache_core.storage.stack import TierStack
from lmcache_core.telemetry import CodecFigures, Counters
from lmcache_sidecar import sidecar as opening
from lmcache_sidecar.app import create_app
from lmcache_sidecar.peer_server import PeerStore

from tests.fixtures.encoded_tier import content
from tests.fixtures.sidecar_app import make_settings
from tests.suites.chunks import make_chunk, make_key

SHAPE = (2, 4, 32, 64)


def kv_chunk(name: object) -> Chunk:
    """A chunk that a codec can do something with: smooth values in bfloat16."""
    kv = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    data = kv.view(torch.uint8).numpy().tobytes()
    chunk = make_chunk(name, payload=data)
    spec = msgspec.structs.replace(chunk.header.tensors[0], dtype="bfloat16", shape=SHAPE)
    header = msgspec.structs.replace(chunk.header, tensors=(spec,), digest=payload_digest(data))
    return Chunk.unsealed(chunk.key, header, chunk.memory, "test").sealed()


async def stored_and_read(
    tmp_path: Path, **options: object
) -> tuple[list[bytes | MissReason], dict[str, dict[str, int]], str]:
    """Two chunks through the slower tiers: what comes back, the tiers' figures, and /metrics."""
    app = create_app(make_settings(tmp_path, arena_gb=0.01, **options))
    transport = httpx.ASGITransport(app)
    async with (
        opening.lifespan(app),
        httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client,
    ):
        stack = app.state.sidecar.stack
        assert all(await stack.batched_put([kv_chunk("a"), kv_chunk("b")]))
        assert await stack.drain(60)
        stack.hot.clear_now()
        got = [
            content(result)
            for result in await stack.batched_get([make_key("a"), make_key("b")], timeout_s=60)
        ]
        return got, stack.stats(), (await client.get("/metrics")).text


def value_of(metrics: str, name: str, label: str) -> float:
    found = re.search(rf'^{name}{{\w+="{label}"}} (\S+)$', metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("tier", ["disk", "remote"])
@pytest.mark.parametrize("serde", ["lossless", "cachegen:low"])
async def test_each_tier_encodes_as_configured(tmp_path: Path, tier: str, serde: str) -> None:
    (tmp_path / "shared").mkdir()
    options = {
        "disk": {"disk_path": tmp_path / "disk", "disk_gb": 0.05, "disk_serde": serde},
        "remote": {"remote_url": f"file://{tmp_path}/shared", "remote_serde": serde},
    }
    got, stats, metrics = await stored_and_read(tmp_path, **options[tier])
    raw = bytes(kv_chunk("a").memory.byte_array)
    is_lossy = serde != "lossless"
    assert all(isinstance(data, bytes) and len(data) == len(raw) for data in got)
    assert (got == [raw, raw]) is not is_lossy
    figures = stats["disk" if tier == "disk" else "storage"]
    assert (figures["encoded_chunks"], figures["decoded_chunks"], figures["decoded_raw_bytes"]) == (
        2,
        2,
        2 * len(raw),
    )
    assert figures["encoded_bytes"] < figures["encoded_raw_bytes"] * (0.6 if is_lossy else 0.95)
    family = serde.partition(":")[0]
    assert value_of(metrics, "lmcache_codec_encoded_raw_bytes_total", family) == 2 * len(raw)
    assert (
        value_of(metrics, "lmcache_codec_decoded_bytes_total", family) == figures["decoded_bytes"]
    )
    assert 0 < value_of(metrics, "lmcache_codec_decode_seconds_total", family) < 3600
    errors = re.findall(
        r'^lmcache_codec_worst_rms_relative_error{profile="(\S+)"} (\S+)$', metrics, re.MULTILINE
    )
    assert len(errors) == is_lossy
    if is_lossy:
        assert errors[0][0].startswith("cachegen/")
        assert 0 < float(errors[0][1]) < 1
        assert figures["worst_rms_error_ppm"] == pytest.approx(float(errors[0][1]) * 1e6, abs=1)


@pytest.mark.parametrize(
    ("serde", "accepts_lossy", "is_kept"),
    [("cachegen", True, True), ("cachegen", False, False), ("naive", True, False)],
)
async def test_encoded_chunk_is_accepted_from_a_peer_if_it_can_be_decoded(
    serde: str, accepts_lossy: bool, is_kept: bool
) -> None:
    codecs, encoder = (create_codecs({"peer_serde": one}) for one in (serde, "cachegen"))
    await codecs.open()
    await encoder.open()
    stack = TierStack(LocalCPUBackend(ArenaAllocator.anonymous(1 << 20), create_policy()))
    await stack.open()
    encoded = encoded_chunk(encoder.named("cachegen"), kv_chunk("a"), CodecFigures())  # type: ignore[arg-type]
    assert encoded is not None
    local = LocalStore(stack, accepts_puts=lambda: True)
    store = PeerStore(local, encoded.key.tenant, codecs, accepts_lossy, Counters())
    assert await store.put(encoded) is is_kept
    assert stack.hot.contains_many([encoded.key]) == [is_kept]
    await stack.close()
    await codecs.close()
    await encoder.close()


@pytest.mark.parametrize(("serde", "missing"), [("lossless", "numba"), ("cachegen", "numpy")])
def test_missing_package_is_named_with_the_option_and_the_fix(serde: str, missing: str) -> None:
    code = (
        f"import asyncio, sys; sys.modules[{missing!r}] = None\n"
        "from lmcache_core.errors import ConfigError\n"
        "from lmcache_core.storage.codecs import create_codecs\n"
        f"serdes = {{'disk_serde': 'naive', 'remote_serde': {serde!r}, 'peer_serde': {serde!r}}}\n"
        "try: asyncio.run(create_codecs(serdes).open())\n"
        "except ConfigError as exc: print(exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == (
        f"remote_serde='{serde}': this serde needs the package '{missing}':"
        " pip install './libs/lmcache_core[codec]' in a checkout, or run the image"
        " lmcache-sidecar-codec\n"
    )


async def test_serdes_that_decode_more_than_they_are_called_are_known() -> None:
    """What `Codecs.decodable` says of a codec before it is open is so once it is."""
    codecs = create_codecs({"disk_serde": "cachegen:high"})
    await codecs.open()
    for serde in codecs.decodable():
        header = msgspec.structs.replace(make_chunk("a").header, serde=serde)
        assert codecs.decoder_of(header) in (codecs.named("cachegen:high"), MissReason.PROFILE)
    assert codecs.decodable() == ["cachegen", "lossless"]
    await codecs.close()
