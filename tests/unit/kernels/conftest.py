"""Paged caches of random bytes, cut out of one poisoned pool, so that a test can see every byte
that an op changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from lmcache_kernels.pages import Pages

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
# (layers, blocks, block_size, heads, head_size, tokens, padding after each block in elements)
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


FORMS = ("NHD", "HND", "NHD packed", "HND packed", "latent")
"""Order of the axes in memory; "packed": K and V of a head side by side; "latent": one side
only.
"""


@dataclass
class Case:
    """A paged cache, a chunk and a slot mapping; `pool` is all the memory of both, guards
    included.
    """

    pool: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    slots: torch.Tensor
    blob: torch.Tensor

    def args(self) -> tuple[Pages, torch.Tensor, torch.Tensor]:
        return (
            Pages.of(self.keys, self.values) if self.values else Pages.of(self.keys),
            self.slots,
            self.blob,
        )

    def _rows(self):
        """Pairs of byte views, page row and chunk row, one for each side, layer and token."""
        block_size = self.keys[0].shape[1]
        for page, chunk in zip((*self.keys, *self.values), self.blob.flatten(0, 1), strict=True):
            by_byte = page.view(torch.uint8)
            for token, slot in enumerate(self.slots.tolist()):
                yield (
                    by_byte[slot // block_size, slot % block_size],
                    chunk[token].view(torch.uint8).view(by_byte.shape[2:]),
                )

    def gather_slowly(self) -> None:
        for page_row, chunk_row in self._rows():
            chunk_row.copy_(page_row)

    def scatter_slowly(self) -> None:
        for page_row, chunk_row in self._rows():
            page_row.copy_(chunk_row)


def strides_of(form, shape) -> tuple[int, int, int, int]:
    """Strides of block, token, head and element, in elements."""
    _, _, block_size, heads, head_size, _, padding = shape
    cell = head_size * (2 if "packed" in form else 1)
    block = block_size * heads * cell + padding
    return (block, cell, block_size * cell, 1) if "HND" in form else (block, heads * cell, cell, 1)


def build_case(dtype, shape, seed=0, slots=None, device="cpu", aligned=False, form="NHD") -> Case:
    """The same case for the same arguments; pages hold random bytes, the chunk and everything
    between them the poison.

    Args:
        dtype: Of pages and chunk.
        shape: One of `SHAPES`.
        seed: Of contents and slots.
        slots: Slot mapping, by default distinct slots in random order.
        device: Of everything.
        aligned: Begin every piece at a multiple of 8 bytes, instead of at every alignment that the
            dtype allows.
        form: One of `FORMS`.
    """
    layers, blocks, block_size, heads, head_size, tokens, _ = shape
    random = torch.Generator().manual_seed(seed)
    size, row, sides = dtype.itemsize, heads * head_size, 1 if form == "latent" else 2
    if slots is None:
        slots = torch.randperm(blocks * block_size, generator=random)[:tokens].tolist()
    strides = strides_of(form, shape)
    piece_bytes = blocks * strides[0] * size
    num_pieces = layers * (1 if "packed" in form else sides)
    blob_bytes = sides * layers * len(slots) * row * size
    step = -(-(piece_bytes + GUARD_BYTES) // 8) * 8 + (0 if aligned else size)
    pool = torch.full(
        (GUARD_BYTES + num_pieces * step + blob_bytes + GUARD_BYTES,), POISON, dtype=torch.uint8
    )
    begins = [GUARD_BYTES + i * step for i in range(num_pieces)]
    for begin in begins:
        pool[begin : begin + piece_bytes] = torch.randint(
            0, 256, (piece_bytes,), dtype=torch.uint8, generator=random
        )
    pool = pool.to(device)
    usable = pool[: pool.numel() // size * size].view(dtype)
    starts = [begin // size for begin in begins]
    if "packed" in form:
        starts += [start + head_size for start in starts]
    cut = [
        usable.as_strided((blocks, block_size, heads, head_size), strides, start)
        for start in starts
    ]
    blob_begin = (GUARD_BYTES + num_pieces * step) // size
    blob = usable[blob_begin : blob_begin + blob_bytes // size].view(sides, layers, len(slots), row)
    return Case(
        pool,
        cut[:layers],
        cut[layers:],
        torch.tensor(slots, dtype=torch.int64, device=device),
        blob,
    )


@pytest.fixture(scope="session")
def make_case():
    return build_case


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    return request.param


@pytest.fixture(params=FORMS)
def form(request):
    return request.param
