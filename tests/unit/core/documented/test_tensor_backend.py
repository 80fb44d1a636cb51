"""Tensors over real tiers: host memory, a disk, and a server behind lm://."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmcache_core.concurrency import LoopThread
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.storage import LMCBackendInterface, StackTensorBackend, StorageManager
from lmcache_core.telemetry import Counters

from tests.fixtures.kv import make_config
from tests.fixtures.wire import MemoryStore, serving
from tests.suites.chunks import make_key

ARENA_BYTES = 4 << 20
KV_SHAPE = (3, 2, 16, 2, 8)
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@pytest.fixture
def allocator() -> Iterator[HostMemoryAllocator]:
    allocator = HostMemoryAllocator(ARENA_BYTES)
    yield allocator
    allocator.check_integrity()
    assert allocator.used_bytes == 0, "a reference was not given back"


def make_backend(allocator: HostMemoryAllocator, **options: object) -> StackTensorBackend:
    store = StorageManager(make_config(tier_timeout_s=10.0, **options), allocator, Counters())
    store.open(lambda salt: None)
    return StackTensorBackend(store, "cpu")


@pytest.fixture
def backend(allocator: HostMemoryAllocator) -> Iterator[StackTensorBackend]:
    backend = make_backend(allocator)
    yield backend
    backend.close()
    backend.close()


def key(name: object):
    return make_key(name).key


def make_tensor(
    seed: int = 0, shape: tuple[int, ...] = KV_SHAPE, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(got: torch.Tensor | None, want: torch.Tensor) -> bool:
    """Equal bit for bit, in shape and in dtype."""
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return False
    return torch.equal(
        got.contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [KV_SHAPE, (2, 3, 16, 24), (5, 7, 576), (1,), (), (2, 0, 3)], ids=str
)
def test_any_shape_and_dtype_comes_back(
    backend: StackTensorBackend, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    stored = make_tensor(shape=shape, dtype=dtype)
    backend.put(key("a"), stored)
    assert backend.contains(key("a"))
    assert same(backend.get(key("a")), stored)


def test_a_view_is_stored_as_it_looks(backend: StackTensorBackend) -> None:
    whole = make_tensor(shape=(16, 3, 8, 2)).requires_grad_()
    for name, view in (
        ("permuted", whole.permute(1, 3, 0, 2)),
        ("strided", whole[::2, 1:]),
        ("expanded", whole[:1].expand(4, 3, 8, 2)),
    ):
        backend.put(key(name), view)
        assert same(backend.get(key(name)), view.detach())


@pytest.mark.parametrize("blocking", [True, False])
def test_the_tensor_may_change_as_soon_as_it_is_put(
    backend: StackTensorBackend, blocking: bool
) -> None:
    stored = make_tensor()
    given = stored.clone()
    backend.put(key("a"), given, blocking)
    given.zero_()
    assert backend.contains(key("a"))
    assert same(backend.get(key("a")), stored)


def allocated_at(backend: StackTensorBackend, name: object) -> list[int]:
    chunks = backend._store.get([key(name)])
    backend._store.release(chunks)
    return [chunk.memory.metadata.address for chunk in chunks]


def test_what_was_got_is_never_reused(backend: StackTensorBackend) -> None:
    stored = make_tensor()
    backend.put(key("a"), stored)
    got = backend.get(key("a"))
    [where] = allocated_at(backend, "a")
    assert backend._store.evict([key("a")]) == 1
    backend.put(key("b"), torch.zeros_like(stored))
    assert allocated_at(backend, "b") == [where], "its memory has been used for another since"
    assert same(got, stored)


def test_batches_stand_in_the_order_of_their_keys_and_misses_are_none(
    backend: StackTensorBackend,
) -> None:
    num = 12
    stored = {i: make_tensor(i) for i in range(num) if i % 5 != 2}
    assert backend.batched_put((key(i), tensor) for i, tensor in stored.items()) == len(stored)
    got = list(backend.batched_get(key(i) for i in range(num)))
    assert len(got) == num
    for i, tensor in enumerate(got):
        assert tensor is None if i not in stored else same(tensor, stored[i])
    assert list(backend.batched_get([])) == []
    assert backend.batched_put([]) == 0


def test_what_finds_no_room_is_not_stored(backend: StackTensorBackend) -> None:
    large = torch.zeros(ARENA_BYTES + 1, dtype=torch.uint8)
    small = make_tensor()
    backend.batched_put([(key("large"), large), (key("small"), small)])
    assert backend.get(key("large")) is None
    assert same(backend.get(key("small")), small)


def test_what_no_record_can_hold_is_refused_and_leaks_nothing(backend: StackTensorBackend) -> None:
    for tensor in (torch.zeros(3, dtype=torch.complex64), torch.zeros((1,) * 9)):
        with pytest.raises(ValueError, match=r"dtype|shape"):
            backend.batched_put([(key("good"), make_tensor()), (key("bad"), tensor)])
    assert not backend.contains(key("bad"))


def test_tensors_come_back_from_the_disk_and_from_the_server(
    allocator: HostMemoryAllocator, tmp_path: Path
) -> None:
    served = MemoryStore()
    loop = LoopThread("test-server")
    loop.open()
    server = serving(served)
    url = f"lm://127.0.0.1:{loop.run(server.__aenter__(), 10).port}"
    tensors = [make_tensor(i) for i in range(12)]
    disk = {"local_disk": f"file://{tmp_path}", "max_local_disk_size": 0.01}
    try:
        writer = make_backend(allocator, **disk, remote_url=url)
        assert writer.batched_put((key(i), tensor) for i, tensor in enumerate(tensors)) == 12
        writer.close()
        assert len(served.chunks) == len(list(tmp_path.rglob("*.kvr"))) == 12
        for options in (
            disk | {"remote_url": None},
            {"remote_url": url},
            disk | {"remote_url": url},
        ):
            reader = make_backend(allocator, **options)
            assert reader.contains(key(7))
            assert not reader.contains(key("never"))
            got = list(reader.batched_get([key("never"), *(key(i) for i in range(12))]))
            assert got[0] is None
            assert all(
                same(tensor, stored) for tensor, stored in zip(got[1:], tensors, strict=True)
            )
            assert reader.get(key("never")) is None
            reader.close()
    finally:
        loop.run(server.__aexit__(None, None, None), 10)
        loop.close()


def test_a_closed_backend_is_an_empty_one(allocator: HostMemoryAllocator) -> None:
    backend = make_backend(allocator)
    backend.put(key("a"), make_tensor())
    backend.close()
    assert backend.get(key("a")) is None
    assert not backend.contains(key("a"))
    backend.put(key("b"), make_tensor())
    assert not backend.contains(key("b"))


class Plain(LMCBackendInterface):
    def __init__(self, dst_device: str = "cuda") -> None:
        super().__init__(dst_device)
        self.tensors: dict[object, torch.Tensor] = {}

    def put(self, key, kv_chunk, blocking=True):
        self.tensors[key] = kv_chunk

    def contains(self, key):
        return key in self.tensors

    def get(self, key):
        return self.tensors.get(key)

    def close(self): ...


def test_the_interface_batches_for_those_who_do_not() -> None:
    plain = Plain()
    assert plain.dst_device == "cuda"
    assert plain.batched_put([(key(i), make_tensor(i)) for i in range(3)]) == 3
    got = list(plain.batched_get([key(1), key("never")]))
    assert same(got[0], make_tensor(1))
    assert got[1] is None
    with pytest.raises(RuntimeError):
        Plain("abacus")
    with pytest.raises(TypeError):
        LMCBackendInterface("cpu")  # type: ignore[abstract]
