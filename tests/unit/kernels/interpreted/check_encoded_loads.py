"""Chunks that stay encoded in a sidecar's arena, loaded by kernels into pages: a real sidecar
process, its disk, and clients with and without kernels. Collected by `test_interpreted.py` only.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lmcache_core.concurrency import Workers
from lmcache_core.engine.stores import SidecarClient, create_chunk_store
from lmcache_core.engine.transfer import KVTransfer, NamedChunk
from lmcache_core.gpu_connectors import KVLayout, LayerGroup, PagedGPUConnector
from lmcache_core.keys import CacheEngineKey
from lmcache_core.serde import device as device_module
from lmcache_core.serde.codec import encoding_of
from lmcache_core.serde.device import DeviceDecoder, decodes_rightly, device_encodings
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, Counters

from tests.fixtures.embedded import until
from tests.fixtures.kv import make_config, make_metadata
from tests.fixtures.service_process import running_service

from .conftest import DEVICE

CHUNK, NUM_CHUNKS, BLOCK_SIZE, NUM_BLOCKS = 16, 3, 8, 32
LAYOUT = KVLayout((LayerGroup("", 1, 1, 32, "bfloat16"),))
NAMED: list[NamedChunk] = [
    (i * CHUNK, (i + 1) * CHUNK, CacheEngineKey("vllm", "m", 1, 0, f"{i:064x}"))
    for i in range(NUM_CHUNKS)
]
SLOTS = torch.arange(NUM_CHUNKS * CHUNK) + BLOCK_SIZE
Pages = list[tuple[torch.Tensor, torch.Tensor]]


def pages(fill: float | None = None) -> Pages:
    shape = (NUM_BLOCKS, BLOCK_SIZE, 1, 32)
    sides = [
        (torch.randn(shape) if fill is None else torch.full(shape, fill)).bfloat16().to(DEVICE)
        for _ in range(2)
    ]
    return [(sides[0], sides[1])]


def loaded_bits(kvcaches: Pages) -> torch.Tensor:
    sides = [side.flatten(0, 1)[SLOTS.to(DEVICE)] for layer in kvcaches for side in layer]
    return torch.stack(sides).view(torch.int16).cpu()


@dataclass(frozen=True)
class Sidecar:
    """A sidecar process."""

    directory: Path
    url: str

    def ask(self, path: str, body: object = None) -> Any:
        """GET, or POST where there is a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.loads(response.read())

    def figure(self, tier: str, name: str) -> int:
        found: int = self.ask("/v1/tiers")["tiers"][tier][name]
        return found

    def evict(self) -> None:
        """Empty the arena."""
        self.ask("/v1/admin/evict", {"num_bytes": 1 << 30})
        assert self.figure("memory", "num_chunks") == 0

    @property
    def arena_bytes(self) -> int:
        """What chunks take of the arena."""
        return self.figure("memory", "used_bytes")


class Client:
    """A client of the sidecar, with the kernels or without."""

    def __init__(self, sidecar: Sidecar, has_kernels: bool) -> None:
        self.counters = Counters()
        decoder = DeviceDecoder(DEVICE) if has_kernels else None
        decodes = device_encodings("cuda") if has_kernels else ()
        socket = sidecar.directory / "s.sock"
        metadata = make_metadata(kv_dtype=LAYOUT.kv_dtype)
        self._workers = Workers("test", 2)
        self._workers.open()
        self.store = create_chunk_store(
            make_config(sidecar_socket=str(socket)),
            metadata,
            None,
            self.counters,
            self._workers,
            SidecarClient(f"kernels={has_kernels}", decodes=decodes),
        )
        self.store.open(lambda salt: None)
        connector = PagedGPUConnector(LAYOUT)
        self.transfer = KVTransfer(
            self.store, connector, metadata, self.counters, self._workers, decoder=decoder
        )

    def load(self, wanted: tuple[int, int] | None = None) -> tuple[int, torch.Tensor]:
        target = pages(fill=7.0)
        arguments = {"kvcaches": target, "slot_mapping": SLOTS}
        return self.transfer.load(NAMED, None, arguments, wanted), loaded_bits(target)

    def close(self) -> None:
        self.store.close()
        self._workers.close()


@contextmanager
def client(sidecar: Sidecar, has_kernels: bool) -> Iterator[Client]:
    made = Client(sidecar, has_kernels)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar with nothing but encoded chunks on its disk."""
    directory = tmp_path_factory.mktemp("sidecar")
    environ = {
        "LMCACHE_SIDECAR_PORT": "0",
        "LMCACHE_SIDECAR_LM_PORT": "0",
        "LMCACHE_SIDECAR_SOCKET_PATH": str(directory / "s.sock"),
        "LMCACHE_SIDECAR_ARENA_PATH": str(directory / "arena"),
        "LMCACHE_SIDECAR_ARENA_GB": "0.01",
        "LMCACHE_SIDECAR_DISK_PATH": str(directory / "disk"),
        "LMCACHE_SIDECAR_DISK_GB": "0.05",
        "LMCACHE_SIDECAR_DISK_SERDE": "cachegen",
    }
    with running_service("lmcache_sidecar", directory, environ) as running:
        made = Sidecar(directory, running.url)
        torch.manual_seed(0)
        with client(made, has_kernels=False) as one:
            arguments = {"kvcaches": pages(), "slot_mapping": SLOTS}
            assert one.transfer.store(NAMED, arguments) == [True] * NUM_CHUNKS
        until(lambda: made.figure("disk", "num_chunks") == NUM_CHUNKS)
        made.evict()
        yield made


def test_kernels_give_what_the_sidecar_decodes(sidecar: Sidecar) -> None:
    with client(sidecar, has_kernels=False) as plain:
        sidecar.evict()
        num_loaded, expected = plain.load()
        raw_bytes = sidecar.arena_bytes
    assert num_loaded == NUM_CHUNKS
    sidecar.evict()
    with client(sidecar, has_kernels=True) as capable:
        for _ in range(2):  # from the disk, then from the arena
            num_loaded, bits = capable.load()
            assert num_loaded == NUM_CHUNKS
            assert torch.equal(bits, expected)
            assert sidecar.arena_bytes < raw_bytes
        num_loaded, bits = capable.load((CHUNK + 3, 2 * CHUNK + 1))
        assert num_loaded == NUM_CHUNKS
        inside = slice(CHUNK + 3, 2 * CHUNK + 1)
        assert torch.equal(bits[:, inside], expected[:, inside])
        assert (bits[:, : CHUNK + 3] == bits[0, 0, 0, 0]).all(), "only what is wanted is written"
        # A client without kernels gets the same, and leaves decoded chunks in the arena.
        with client(sidecar, has_kernels=False) as plain:
            num_loaded, bits = plain.load()
            assert num_loaded == NUM_CHUNKS
            assert torch.equal(bits, expected)
        assert sidecar.arena_bytes == raw_bytes
        num_loaded, bits = capable.load()
        assert torch.equal(bits, expected)
        assert capable.counters.value(MISSED_CHUNKS_TOTAL) == 0


def test_what_kernels_refuse_is_a_miss(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar.evict()
    begin = DeviceDecoder.begin
    with client(sidecar, has_kernels=True) as capable:
        calls = []

        def damaged(self, header, *args):
            calls.append(header)
            status = begin(self, header, *args)
            return torch.ones_like(status) if len(calls) == 2 else status

        monkeypatch.setattr(DeviceDecoder, "begin", damaged)
        assert capable.load()[0] == 1
        assert capable.counters.value(MISSED_CHUNKS_TOTAL, "corrupt") == 2
        monkeypatch.undo()
        assert capable.load()[0] == NUM_CHUNKS, "the sidecar found nothing wrong with it"


def test_the_host_reads_once_whether_all_chunks_were_decoded(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read waits for the device, and more so while others use it."""
    begin, reads = DeviceDecoder.begin, list[str]()

    class Status(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function.__name__ in ("__bool__", "tolist", "item"):
                reads.append(function.__name__)
            return super().__torch_function__(function, types, args, kwargs)

    monkeypatch.setattr(
        DeviceDecoder, "begin", lambda *arguments: begin(*arguments).as_subclass(Status)
    )
    sidecar.evict()
    with client(sidecar, has_kernels=True) as capable:
        assert capable.load((3, 2 * CHUNK + 1))[0] == NUM_CHUNKS
        assert capable.load((CHUNK, 2 * CHUNK))[0] == NUM_CHUNKS
    assert len(reads) == 2


def test_records_of_other_tables_are_not_taken(sidecar: Sidecar) -> None:
    sidecar.evict()
    with client(sidecar, has_kernels=True) as capable:
        [chunk] = capable.store.get([NAMED[0][2]])
        decoder, header = DeviceDecoder(DEVICE), chunk.described
        assert decoder.takes(header)
        assert (encoding_of(header),) == device_encodings("cuda")
        assert not decoder.takes(msgspec.structs.replace(header, profile=f"{header.profile}0"))
        assert not decoder.takes(msgspec.structs.replace(header, serde="lossless"))
        capable.store.release([chunk])


@pytest.mark.parametrize("channels", [1000, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_are_tried_before_they_are_trusted(
    dtype: torch.dtype, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decodes_rightly(DEVICE, dtype, CHUNK, channels)
    decode = device_module.cachegen_decode

    def wrong(encoded, scales, levels, shape, tables, out, by_token):
        status = decode(encoded, scales, levels, shape, tables, out, by_token)
        out[1, 3, 5] += 1
        return status

    monkeypatch.setattr(device_module, "cachegen_decode", wrong)
    assert not decodes_rightly(DEVICE, dtype, CHUNK, channels)
