"""Pages of a paged KV cache: their memory layout, checked before anything is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_kernels.errors import KernelInputError

MAX_WORD_BYTES = 8
WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

HostArray = npt.NDArray[Any]


class Pages:
    """The pages of some layers, checked against each other once and then used for many copies.
    Create them with `Pages.of`.

    Holds references to the tensors, which keep their memory alive.

    Attributes:
        tensors: The first side of every layer, then the second: `num_sides * num_layers` tensors
            `[num_blocks, block_size, num_heads, head_size]`, all on one device and of one dtype.
            Strides are arbitrary and may differ between them, but the elements of a head are
            contiguous and nothing overlaps.
        num_sides: 2 for K and V, 1 for a latent.
        num_layers: Layers.
        block_size: Tokens in a block.
        num_slots: Slots in a layer; valid slots are `0 … num_slots - 1`.
        hidden_size: Elements of one token on one side of one layer: `num_heads * head_size`.
        row_bytes: Bytes of one token on one side of one layer.
        run_bytes: Bytes of one token that are contiguous in every tensor: a whole row, or one head.
        are_rows_adjacent: Whether the tokens of a block are one contiguous run in every tensor.
        alignment_bytes: Common divisor of every address, stride and contiguous run.
        are_distinct: Whether no two tensors begin at the same address.
        dtype: Dtype of every tensor.
        device: Device of every tensor.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], num_sides: int) -> None:
        first = tensors[0]
        num_blocks, self.block_size, num_heads, head_size = first.shape
        self.tensors, self.num_sides = tensors, num_sides
        self.num_layers = len(tensors) // num_sides
        self.num_slots = num_blocks * self.block_size
        self.hidden_size = num_heads * head_size
        self.dtype, self.device = first.dtype, first.device
        size = first.dtype.itemsize
        self.row_bytes = self.hidden_size * size
        strides = [_used_strides(page) for page in tensors]
        is_one_run = all(head in (0, head_size) for _, _, head in strides)
        self.run_bytes = self.row_bytes if is_one_run else head_size * size
        self.are_rows_adjacent = is_one_run and all(
            token in (0, self.hidden_size) for _, token, _ in strides
        )
        self._strides = [
            (block, token, 0 if is_one_run else head) for block, token, head in strides
        ]
        addresses = {page.data_ptr() for page in tensors}
        self.are_distinct = len(addresses) == len(tensors)
        self.alignment_bytes = math.gcd(
            self.run_bytes,
            *addresses,
            *(int(page.storage_offset()) * size for page in tensors),
            *(stride * size for of_page in self._strides for stride in of_page),
        )
        self._words: dict[int, tuple[torch.Tensor, ...]] = {}
        self._units: dict[tuple[int, int], list[tuple[HostArray, int] | None]] = {}

    @classmethod
    def of(cls, *sides: Sequence[torch.Tensor]) -> Pages:
        """Check tensors against each other.

        Args:
            *sides: K of each layer and V of each layer; or a single sequence, if a token has one
                vector for both. Each tensor is `[num_blocks, block_size, num_heads, head_size]`,
                all of the same shape, dtype and device.

        Raises:
            KernelInputError: They do not match, one has elements that overlap, or heads whose
                elements are not contiguous.
        """
        if not 1 <= len(sides) <= 2 or not sides[0] or len(sides[0]) != len(sides[-1]):
            raise KernelInputError(
                "keys and values must be one tensor for each layer, not"
                f" {' and '.join(str(len(s)) for s in sides)}"
            )
        first = sides[0][0]
        if first.ndim != 4 or first.shape[1:].numel() == 0:
            raise KernelInputError(
                "a page tensor must be [num_blocks, block_size, num_heads, head_size], not"
                f" {tuple(first.shape)}"
            )
        for name, side in zip(("keys", "values"), sides, strict=False):
            for layer, page in enumerate(side):
                _check_page(f"{name}[{layer}]", page, first)
        return cls(tuple(page for side in sides for page in side), len(sides))

    @cached_property
    def table(self) -> torch.Tensor:
        """Description of all tensors for one launch: `rows`, int64, on their device."""
        return torch.from_numpy(self.rows).to(self.device)

    @cached_property
    def rows(self) -> HostArray:
        """Description of all tensors, int64 `[len(tensors), 5]`: for each its address, its strides
        between blocks, tokens and heads (all in bytes), and the block size.
        """
        size = self.dtype.itemsize
        return np.array(
            [
                (page.data_ptr(), *(stride * size for stride in strides), self.block_size)
                for page, strides in zip(self.tensors, self._strides, strict=True)
            ],
            np.int64,
        )

    def words(self, word_bytes: int) -> tuple[torch.Tensor, ...]:
        """Return each tensor as untyped words, sharing memory: `[num_blocks, block_size, row]`, or
        `[…, num_heads, head]` if heads are separate. Cached per size.

        Args:
            word_bytes: 1, 2, 4 or 8; divides `alignment_bytes`.
        """
        if word_bytes not in self._words:
            views = []
            for page, (block, token, head) in zip(self.tensors, self._strides, strict=True):
                if self.run_bytes == self.row_bytes:
                    sizes, strides = (*page.shape[:2], self.hidden_size), (block, token, 1)
                    view = page.detach().as_strided(sizes, strides)
                else:
                    view = page.detach().as_strided(page.shape, (block, token, head, 1))
                views.append(view.view(WORD_DTYPES[word_bytes]))
            self._words[word_bytes] = tuple(views)
        return self._words[word_bytes]

    def units(self, word_bytes: int, unit: int) -> list[tuple[HostArray, int] | None]:
        """Return each tensor in host memory split into units of adjacent tokens, so that one index
        selects a unit. Cached per pair of arguments.

        Args:
            word_bytes: See `words`.
            unit: Tokens in a unit; divides the block size.

        Returns:
            For each tensor a view `[…, *shape of a unit]` and the distance of two blocks in units;
                None if that distance is not a whole number of units. A unit is flat if its tokens
                are one contiguous run. Units between two blocks belong to other data.
        """
        if (word_bytes, unit) not in self._units:
            self._units[word_bytes, unit] = [
                _cut(words, unit, self.are_rows_adjacent) for words in self.words(word_bytes)
            ]
        return self._units[word_bytes, unit]


def _cut(words: torch.Tensor, unit: int, is_flat: bool) -> tuple[HostArray, int] | None:
    num_blocks, block_size, *row = words.shape
    block_stride, token_stride, *row_strides = words.stride()
    if unit == block_size:
        step, apart, rest = block_stride, 1, 0
    else:
        step = unit * token_stride
        apart, rest = divmod(block_stride, step) if num_blocks > 1 else (1, 0)
    if rest:
        return None
    num_units = (num_blocks - 1) * apart + block_size // unit
    if is_flat:
        return words.as_strided((num_units, unit * row[0]), (step, *row_strides)).numpy(), apart
    sizes, strides = (num_units, unit, *row), (step, token_stride, *row_strides)
    return words.as_strided(sizes, strides).numpy(), apart


def _used_strides(page: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of blocks, tokens and heads, in elements; 0 for a dimension of size 1,
    which is never stepped along.
    """
    block, token, head = (
        stride if size > 1 else 0
        for size, stride in zip(page.shape[:3], page.stride()[:3], strict=True)
    )
    return block, token, head


def _check_page(name: str, page: torch.Tensor, first: torch.Tensor) -> None:
    if page.shape != first.shape or page.dtype != first.dtype or page.device != first.device:
        got, expected = (f"{tuple(t.shape)} of {t.dtype} on {t.device}" for t in (page, first))
        raise KernelInputError(f"{name} is {got}; keys[0] is {expected}")
    head_size = page.shape[3]
    if head_size > 1 and page.stride(3) != 1:
        raise KernelInputError(
            f"{name}: the elements of a head are not contiguous (strides {page.stride()})"
        )
    extent = head_size
    steps = zip(page.stride()[:3], page.shape[:3], strict=True)
    for stride, size in sorted(step for step in steps if step[1] > 1):
        if stride < extent:
            raise KernelInputError(
                f"{name}: heads, tokens or blocks overlap (shape {tuple(page.shape)}, strides"
                f" {page.stride()})"
            )
        extent += (size - 1) * stride
