"""The tiers of this repository against their contract."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.storage import DiskBackend, LocalCPUBackend
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.codecs import Codecs
from lmcache_core.storage.encoded import EncodedBackend
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.guard import Guard

from tests.fixtures.encoded_suite import EncodedReadingSuite, EncodedSuite, encoding
from tests.suites.backend_suite import BackendSuite, BackendUnderTest, ReadingBackendSuite
from tests.suites.faults import FaultPlan, FaultyBackend, ForwardingBackend

CAPACITY_BYTES = 4 << 20


WRAPPERS: dict[str, Callable[[StorageBackend], StorageBackend]] = {
    "nothing added": ForwardingBackend,
    "guard": Guard,
    "guard, priced, without observers": partial(Guard, is_priced=True, observers=()),
    "faults": lambda backend: FaultyBackend(backend, FaultPlan(seed=0)),
    "encoded, nothing to encode": lambda backend: EncodedBackend(backend, Codecs({})),
    "all": lambda backend: Guard(EncodedBackend(backend, Codecs({})), is_priced=True),
}


class HotUnderTest(BackendUnderTest):
    def __init__(
        self, wrap: Callable[[StorageBackend], StorageBackend] = lambda backend: backend
    ) -> None:
        self.hot = LocalCPUBackend(ArenaAllocator.anonymous(CAPACITY_BYTES), create_policy())
        self.backend = wrap(self.hot)

    def raw_set(self, key: ChunkKey, record: bytes) -> None:
        raise AssertionError("nothing comes into host memory from outside the process")

    def raw_get(self, key: ChunkKey) -> bytes | None:
        [chunk] = self.hot.get_many([key], is_access=False)
        if chunk is None:
            return None
        record = chunk.head + bytes(chunk.memory.byte_array)
        chunk.release()
        return record


class DiskUnderTest(BackendUnderTest):
    def __init__(
        self, root: Path, wrap: Callable[[StorageBackend], StorageBackend] = lambda backend: backend
    ) -> None:
        self._root = root
        self.disk = DiskBackend(root, CAPACITY_BYTES)
        self.backend = wrap(self.disk)

    def raw_set(self, key: ChunkKey, record: bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record)

    def raw_get(self, key: ChunkKey) -> bytes | None:
        path = self._path(key)
        return path.read_bytes() if path.exists() else None

    def _path(self, key: ChunkKey) -> Path:
        name = hashlib.sha256(key.key.canonical()).hexdigest()
        return self._root / key.tenant / name[:2] / f"{name}.kvr"


class TestHot(BackendSuite):
    @pytest.fixture
    def under_test(self):
        yield (hot := HotUnderTest())
        hot.hot.check_integrity()


class TestDisk(ReadingBackendSuite):
    @pytest.fixture
    def under_test(self, tmp_path):
        yield (under_test := DiskUnderTest(tmp_path))
        under_test.disk.check_integrity()


class TestEncodedHot(EncodedSuite):
    @pytest.fixture
    def under_test(self):
        yield (hot := HotUnderTest(encoding))
        hot.hot.check_integrity()


class TestEncodedDisk(EncodedReadingSuite):
    @pytest.fixture
    def under_test(self, tmp_path):
        yield (under_test := DiskUnderTest(tmp_path, encoding))
        under_test.disk.check_integrity()


class TestWrapped(BackendSuite):
    @pytest.fixture(params=WRAPPERS)
    def under_test(self, request):
        yield (hot := HotUnderTest(WRAPPERS[request.param]))
        hot.hot.check_integrity()

    async def test_it_has_the_name_of_the_tier_inside(
        self, backend: StorageBackend, under_test: HotUnderTest
    ) -> None:
        assert backend.name == under_test.hot.name
