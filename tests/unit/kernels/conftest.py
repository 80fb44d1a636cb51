"""Paged caches of random bytes, cut out of one poisoned pool, so that a test can see every byte that an op changed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

POISON = 0xA5
GUARD_BYTES = 64
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.float64,
)
# (layers, blocks, block_size, heads, head_size, tokens, padding between blocks in elements)
SHAPES = (
    (1, 1, 1, 1, 1, 1, 0),
    (2, 7, 1, 3, 5, 4, 0),
    (3, 5, 3, 2, 7, 11, 0),
    (3, 5, 3, 2, 7, 15, 9),
    (2, 4, 16, 1, 64, 33, 0),
    (1, 3, 16, 4, 40, 48, 8),
    (2, 2, 128, 8, 16, 129, 0),
    (1, 40, 2, 1, 576, 17, 1),
    (4, 6, 4, 2, 8, 0, 0),
)


@dataclass
class Case:
    """A paged cache, a chunk and a slot mapping; `pool` is all the memory of both, guards included."""

    pool: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    slots: torch.Tensor
    blob: torch.Tensor

    @property
    def pages(self) -> list[torch.Tensor]:
        return [*self.keys, *self.values]

    def args(self) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
        return self.keys, self.values, self.slots, self.blob

    def _rows(self):
        """Pairs of byte views, page row and chunk row, one for each page and token."""
        block_size = self.pages[0].shape[1]
        for page, chunk in zip(self.pages, self.blob.flatten(0, 1), strict=True):
            by_byte = page.view(torch.uint8)
            for token, slot in enumerate(self.slots.tolist()):
                yield by_byte[slot // block_size, slot % block_size], chunk[token].view(torch.uint8).view(by_byte.shape[2:])

    def gather_slowly(self) -> None:
        for page_row, chunk_row in self._rows():
            chunk_row.copy_(page_row)

    def scatter_slowly(self) -> None:
        for page_row, chunk_row in self._rows():
            page_row.copy_(chunk_row)


def build_case(dtype, shape, seed=0, slots=None, device="cpu", aligned=False) -> Case:
    """The same case for the same arguments; pages hold random bytes, the chunk and everything between them the poison.

    Args:
        dtype: Of pages and chunk.
        shape: One of `SHAPES`.
        seed: Of contents and slots.
        slots: Slot mapping, by default distinct slots in random order.
        device: Of everything.
        aligned: Begin every piece at a multiple of 8 bytes, instead of at every alignment that the dtype allows.
    """
    layers, blocks, block_size, heads, head_size, tokens, padding = shape
    random = torch.Generator().manual_seed(seed)
    size, row = dtype.itemsize, heads * head_size
    if slots is None:
        slots = torch.randperm(blocks * block_size, generator=random)[:tokens].tolist()
    page_bytes = (blocks * block_size * row + (blocks - 1) * padding) * size
    blob_bytes = 2 * layers * len(slots) * row * size
    step = -(-(page_bytes + GUARD_BYTES) // 8) * 8 + (0 if aligned else size)
    pool = torch.full((GUARD_BYTES + 2 * layers * step + blob_bytes + GUARD_BYTES,), POISON, dtype=torch.uint8)
    pages = []
    for i in range(2 * layers):
        begin = GUARD_BYTES + i * step
        pages.append((begin // size, (blocks, block_size, heads, head_size)))
        pool[begin : begin + page_bytes] = torch.randint(0, 256, (page_bytes,), dtype=torch.uint8, generator=random)
    pool = pool.to(device)
    usable = pool[: pool.numel() // size * size].view(dtype)
    strides = (block_size * row + padding, row, head_size, 1)
    cut = [usable.as_strided(dims, strides, begin) for begin, dims in pages]
    blob_begin = (GUARD_BYTES + 2 * layers * step) // size
    blob = usable[blob_begin : blob_begin + blob_bytes // size].view(2, layers, len(slots), row)
    return Case(pool, cut[:layers], cut[layers:], torch.tensor(slots, dtype=torch.int64, device=device), blob)


@pytest.fixture(scope="session")
def make_case():
    return build_case


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    return request.param
