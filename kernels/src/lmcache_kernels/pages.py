"""Pages of a paged KV cache: what they look like in memory, and the checks that every op makes
before it writes anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch

from lmcache_kernels.errors import KernelInputError

MAX_WORD_BYTES = 8
WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

UnitView = tuple[torch.Tensor, int]
HostArray = npt.NDArray[Any]
HostUnits = tuple[HostArray, int]


@dataclass(frozen=True, eq=False)
class Pages:
    """The pages of some layers, checked against each other once and then used for many copies. Make
    them with `Pages.of`.

    Holds references to the tensors: their memory lives as long as this object.

    Attributes:
        tensors: The first side of every layer, then the second: `num_sides * num_layers` tensors
            `[num_blocks, block_size, num_heads, head_size]`, all on one device and of one dtype.
            Strides are free and may differ between them, but the elements of a head are contiguous
            and nothing overlaps.
        num_sides: 2 for K and V, 1 for a latent.
    """

    tensors: tuple[torch.Tensor, ...]
    num_sides: int

    @classmethod
    def of(cls, *sides: Sequence[torch.Tensor]) -> Pages:
        """Check tensors against each other.

        Args:
            *sides: K of each layer and V of each layer; or one sequence alone, where a token has
                one vector for both. Each tensor is `[num_blocks, block_size, num_heads,
                head_size]`, all of one shape, dtype and device.

        Raises:
            KernelInputError: They do not fit together, or one has elements that overlap, or heads
                whose elements are not contiguous.
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

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.tensors) // self.num_sides

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.tensors[0].shape[1]

    @property
    def num_slots(self) -> int:
        """Slots in a layer; valid slots are `0 … num_slots - 1`."""
        return self.tensors[0].shape[0] * self.block_size

    @property
    def dtype(self) -> torch.dtype:
        """Of every tensor."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """Of every tensor."""
        return self.tensors[0].device

    @property
    def hidden_size(self) -> int:
        """Elements of one token on one side of one layer: `num_heads * head_size`."""
        return self.tensors[0].shape[2] * self.tensors[0].shape[3]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token on one side of one layer."""
        return self.hidden_size * self.dtype.itemsize

    @cached_property
    def run_bytes(self) -> int:
        """Bytes of one token that are contiguous in every tensor: a whole row, or one head."""
        head_size = self.tensors[0].shape[3]
        together = all(used_strides(page)[2] in (0, head_size) for page in self.tensors)
        return self.row_bytes if together else head_size * self.dtype.itemsize

    @cached_property
    def word_bytes(self) -> int:
        """The widest word (8, 4, 2 or 1 bytes) in which every contiguous run can be addressed."""
        return math.gcd(self.alignment_bytes, MAX_WORD_BYTES)

    @cached_property
    def alignment_bytes(self) -> int:
        """What every address, stride and contiguous run is a multiple of."""
        size = self.dtype.itemsize
        numbers = [self.run_bytes]
        for page in self.tensors:
            numbers += [
                page.data_ptr(),
                int(page.storage_offset()) * size,
                *(stride * size for stride in self._strides(page)),
            ]
        return math.gcd(*numbers)

    @cached_property
    def table(self) -> torch.Tensor:
        """For one launch over all tensors: int64 `[len(tensors), 5]` on their device.

        Of each tensor its address, its strides from block to block, token to token and head to head
        (all in bytes), and the block size.
        """
        size = self.dtype.itemsize
        rows = [
            (page.data_ptr(), *(stride * size for stride in self._strides(page)), self.block_size)
            for page in self.tensors
        ]
        return torch.tensor(rows, dtype=torch.int64).to(self.device)

    @cached_property
    def are_distinct(self) -> bool:
        """Whether no two tensors begin at the same address."""
        return len({page.data_ptr() for page in self.tensors}) == len(self.tensors)

    @cached_property
    def words(self) -> tuple[torch.Tensor, ...]:
        """Each tensor as untyped words, sharing memory: `[num_blocks, block_size, row]`; `[…,
        num_heads, head]` where heads lie apart.
        """
        views = []
        for page in self.tensors:
            block, token, head = self._strides(page)
            if self.run_bytes == self.row_bytes:
                view = page.detach().as_strided(
                    (*page.shape[:2], self.hidden_size), (block, token, 1)
                )
            else:
                view = page.detach().as_strided(page.shape, (block, token, head, 1))
            views.append(view.view(WORD_DTYPES[self.word_bytes]))
        return tuple(views)

    @cached_property
    def are_rows_adjacent(self) -> bool:
        """Whether in every tensor the tokens of a block follow each other without a gap."""
        return self.run_bytes == self.row_bytes and all(
            used_strides(page)[1] in (0, self.hidden_size) for page in self.tensors
        )

    def unit_shape(self, unit: int) -> tuple[int, ...]:
        """Shape of `unit` neighbouring tokens of a block, in words: flat where they are one
        contiguous run.
        """
        row = tuple(self.words[0].shape[2:])
        return (unit * row[0],) if self.are_rows_adjacent else (unit, *row)

    def unit_views(self, unit: int) -> tuple[UnitView | None, ...]:
        """Each tensor cut into units of neighbouring tokens, so that one index names a unit.

        Args:
            unit: Tokens in a unit; divides the block size.

        Returns:
            For each tensor a view `[…, *unit_shape(unit)]` and how many units apart two blocks are
            in it; None where the distance of two blocks is not a whole number of units. Units
            between two blocks belong to somebody else.
        """
        if unit not in self._cuts:
            self._cuts[unit] = self._cut(unit)
        return self._cuts[unit]

    @cached_property
    def host_words(self) -> tuple[HostArray, ...]:
        """`words` of pages in host memory, as numpy's."""
        return tuple(words.numpy() for words in self.words)

    def host_units(self, unit: int) -> tuple[HostUnits | None, ...]:
        """`unit_views` of pages in host memory, as numpy's."""
        if unit not in self._host_cuts:
            self._host_cuts[unit] = tuple(
                None if cut is None else (cut[0].numpy(), cut[1]) for cut in self.unit_views(unit)
            )
        return self._host_cuts[unit]

    @cached_property
    def _cuts(self) -> dict[int, tuple[UnitView | None, ...]]:
        """What `unit_views` has been asked for: at most one entry for each divisor of the block
        size.
        """
        return {}

    @cached_property
    def _host_cuts(self) -> dict[int, tuple[HostUnits | None, ...]]:
        return {}

    def _cut(self, unit: int) -> tuple[UnitView | None, ...]:
        shape = self.unit_shape(unit)
        inner = slice(2, None) if len(shape) == 1 else slice(1, None)
        views: list[UnitView | None] = []
        for words in self.words:
            num_blocks, block_size = words.shape[:2]
            apart, rest = (
                divmod(words.stride(0), unit * words.stride(1))
                if num_blocks > 1 and unit < block_size
                else (1, 0)
            )
            step = words.stride(0) if unit == block_size else unit * words.stride(1)
            num_units = (num_blocks - 1) * apart + block_size // unit
            strides = (step, *words.stride()[inner])
            views.append(None if rest else (words.as_strided((num_units, *shape), strides), apart))
        return tuple(views)

    def _strides(self, page: torch.Tensor) -> tuple[int, int, int]:
        block, token, head = used_strides(page)
        return block, token, 0 if self.run_bytes == self.row_bytes else head


def used_strides(page: torch.Tensor) -> tuple[int, int, int]:
    """Strides of blocks, tokens and heads, in elements; 0 where a dimension has one entry only
    and is never stepped along.
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
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(page.shape[:3], page.stride()[:3], strict=True)
        if size > 1
    ):
        if stride < extent:
            raise KernelInputError(
                f"{name}: heads, tokens or blocks overlap (shape {tuple(page.shape)}, strides"
                f" {page.stride()})"
            )
        extent += (size - 1) * stride
