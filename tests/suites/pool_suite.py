"""What every pool must do. A test module subclasses `PoolSuite` and gives it a `make_pool`
method.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest
import torch
from lmcache_core.config import LMCacheMemPoolMetadata
from lmcache_core.errors import ConfigError, IntegrityError
from lmcache_core.memory import BasePool, KVObj

from tests.suites.threads import interleave

NUM_LAYERS, CHUNK_SIZE, NUM_HEADS, HEAD_SIZE = 3, 8, 2, 5
KV_SHAPE = (NUM_LAYERS, 2, CHUNK_SIZE, NUM_HEADS, HEAD_SIZE)
DTYPE = torch.bfloat16
CHUNK_BYTES = NUM_LAYERS * 2 * CHUNK_SIZE * NUM_HEADS * HEAD_SIZE * 2
NUM_SLOTS = 4
NUM_TURNS = 200


def gigabytes(num_bytes: float) -> float:
    """As `max_local_cache_size` counts."""
    return num_bytes / (1 << 30)


def vllm_chunk(num_tokens: int = CHUNK_SIZE) -> torch.Tensor:
    """A chunk that engines with tokens before heads keep."""
    return torch.zeros(NUM_LAYERS, 2, num_tokens, NUM_HEADS, HEAD_SIZE, dtype=DTYPE)


def huggingface_chunk(num_tokens: int = CHUNK_SIZE) -> torch.Tensor:
    """A chunk that engines with heads before tokens keep."""
    return torch.zeros(NUM_LAYERS, 2, NUM_HEADS, num_tokens, HEAD_SIZE, dtype=DTYPE)


class PoolSuite(ABC):
    """The contract of `BasePool`."""

    @abstractmethod
    def make_pool(self, metadata: LMCacheMemPoolMetadata) -> BasePool:
        """The pool under test."""

    @pytest.fixture
    def pool(self) -> Iterator[BasePool]:
        """Of `NUM_SLOTS` slots and most of another; its books must balance at the end of each
        test.
        """
        made = self.make_pool(
            LMCacheMemPoolMetadata(KV_SHAPE, DTYPE, gigabytes((NUM_SLOTS + 0.99) * CHUNK_BYTES))
        )
        yield made
        made.check_integrity()

    def take(self, pool: BasePool, kv_chunk: torch.Tensor) -> KVObj:
        """A slot, which must be there, with the chunk copied into it."""
        kv_obj = pool.allocate(kv_chunk)
        assert kv_obj is not None
        kv_obj.data.copy_(kv_chunk)
        return kv_obj

    @pytest.mark.parametrize("make", [vllm_chunk, huggingface_chunk])
    @pytest.mark.parametrize("num_tokens", [CHUNK_SIZE, CHUNK_SIZE - 1, 1, 0])
    def test_the_view_is_as_the_chunk(self, pool: BasePool, make: type, num_tokens: int) -> None:
        kv_chunk = make(num_tokens).random_()
        kv_obj = self.take(pool, kv_chunk)
        assert (kv_obj.data.shape, kv_obj.data.dtype, kv_obj.data.is_contiguous()) == (
            kv_chunk.shape,
            DTYPE,
            True,
        )
        assert kv_obj.size == kv_chunk.nbytes
        assert torch.equal(kv_obj.data.cpu(), kv_chunk)

    def test_a_chunk_need_not_be_contiguous(self, pool: BasePool) -> None:
        kv_chunk = vllm_chunk().random_().transpose(2, 3)
        assert torch.equal(self.take(pool, kv_chunk).data.cpu(), kv_chunk)

    def test_slots_are_whole_do_not_overlap_and_keep_within_the_size(self, pool: BasePool) -> None:
        objects = [self.take(pool, vllm_chunk().fill_(i)) for i in range(NUM_SLOTS)]
        assert sorted(kv_obj.chunk_idx for kv_obj in objects) == list(range(NUM_SLOTS))
        assert all(bool((kv_obj.data == i).all()) for i, kv_obj in enumerate(objects))
        assert pool.allocate(vllm_chunk(1)) is None, "more slots than the size allows"

    def test_full_is_none_and_heals(self, pool: BasePool) -> None:
        objects = [self.take(pool, vllm_chunk(1)) for _ in range(NUM_SLOTS)]
        assert pool.allocate(vllm_chunk()) is None
        pool.free(objects[2])
        again = self.take(pool, huggingface_chunk())
        assert again.chunk_idx == objects[2].chunk_idx
        assert pool.allocate(vllm_chunk()) is None

    def test_allocating_moves_no_data(self, pool: BasePool) -> None:
        kv_obj = self.take(pool, vllm_chunk().fill_(7))
        pool.free(kv_obj)
        again = pool.allocate(vllm_chunk().fill_(9))
        assert again is not None
        assert not bool((again.data == 9).any())

    def test_what_is_not_handed_out_cannot_be_freed(self, pool: BasePool) -> None:
        kv_obj = self.take(pool, vllm_chunk())
        foreign = KVObj(kv_obj.chunk_idx, kv_obj.size, kv_obj.data)
        with pytest.raises(IntegrityError, match=str(kv_obj.chunk_idx)):
            pool.free(foreign)
        pool.free(kv_obj)
        successor = self.take(pool, vllm_chunk())
        with pytest.raises(IntegrityError, match=str(kv_obj.chunk_idx)):
            pool.free(kv_obj)
        pool.free(successor)

    @pytest.mark.parametrize(
        "shape",
        [
            (NUM_LAYERS, 2, CHUNK_SIZE + 1, NUM_HEADS, HEAD_SIZE),
            (NUM_LAYERS, 2, NUM_HEADS, CHUNK_SIZE + 1, HEAD_SIZE),
            (NUM_LAYERS - 1, 2, CHUNK_SIZE, NUM_HEADS, HEAD_SIZE),
            (NUM_LAYERS, 2, CHUNK_SIZE, NUM_HEADS + 1, HEAD_SIZE),
            (NUM_LAYERS, 2, CHUNK_SIZE, NUM_HEADS, HEAD_SIZE - 1),
            (NUM_LAYERS, 1, CHUNK_SIZE, NUM_HEADS, HEAD_SIZE),
            (NUM_LAYERS, 2, CHUNK_SIZE, NUM_HEADS * HEAD_SIZE),
        ],
    )
    def test_what_does_not_fit_a_slot_is_refused(
        self, pool: BasePool, shape: tuple[int, ...]
    ) -> None:
        with pytest.raises(
            ValueError, match=f"{re.escape(str(shape))}.*{re.escape(str(KV_SHAPE))}"
        ):
            pool.allocate(torch.zeros(shape, dtype=DTYPE))

    def test_another_dtype_is_refused(self, pool: BasePool) -> None:
        with pytest.raises(ValueError, match=r"float32.*bfloat16"):
            pool.allocate(vllm_chunk().float())

    def test_a_size_for_no_chunk_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="max_local_cache_size"):
            self.make_pool(LMCacheMemPoolMetadata(KV_SHAPE, DTYPE, gigabytes(CHUNK_BYTES - 1)))

    def test_exactly_whole_chunks_are_no_chunk_more(self) -> None:
        pool = self.make_pool(LMCacheMemPoolMetadata(KV_SHAPE, DTYPE, gigabytes(2 * CHUNK_BYTES)))
        assert [pool.allocate(vllm_chunk()) is None for _ in range(3)] == [False, False, True]

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32, torch.uint8])
    def test_any_dtype(self, dtype: torch.dtype) -> None:
        pool = self.make_pool(LMCacheMemPoolMetadata(KV_SHAPE, dtype, gigabytes(2 * CHUNK_BYTES)))
        kv_chunk = torch.ones(KV_SHAPE, dtype=torch.float32).to(dtype)
        assert torch.equal(self.take(pool, kv_chunk).data.cpu().float(), kv_chunk.float())

    def test_threads_leak_nothing_and_write_over_nothing(self, pool: BasePool) -> None:
        def work(seed: int) -> None:
            rng = random.Random(seed)
            for turn in range(NUM_TURNS):
                kv_obj = pool.allocate(vllm_chunk(rng.randint(1, CHUNK_SIZE)))
                pool.check_integrity()
                if kv_obj is not None:
                    kv_obj.data.fill_(turn % 100)
                    is_whole = bool((kv_obj.data == turn % 100).all())
                    assert is_whole, "another thread has written over it"
                    pool.free(kv_obj)

        interleave(work)
        assert sorted(self.take(pool, vllm_chunk()).chunk_idx for _ in range(NUM_SLOTS)) == list(
            range(NUM_SLOTS)
        )
