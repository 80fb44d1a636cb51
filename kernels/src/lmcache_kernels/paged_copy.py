"""One copy between pages and a chunk, checked: what both ops work on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.pages import WORD_DTYPES, HostArray, HostUnits, Pages, UnitView

HOST_DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True, eq=False)
class CheckedSlots:
    """Slots that have been checked against pages, once for all copies that go there. Make them with
    `CheckedSlots.of`.

    Attributes:
        pages: The pages.
        slots: int64 `[num_tokens]`, contiguous, on the pages' device; `slot = block * block_size +
            offset`. All exist.
        are_distinct: Whether no slot occurs twice; False where nobody has looked.
    """

    pages: Pages
    slots: torch.Tensor
    are_distinct: bool

    @classmethod
    def of(cls, pages: Pages, slot_mapping: torch.Tensor, once: bool) -> CheckedSlots:
        """Check slots against pages. Waits for the device when the slots are on one.

        Args:
            pages: The pages.
            slot_mapping: int64 `[num_tokens]`, on the pages' device or the CPU.
            once: Demand that no slot occurs twice.

        Raises:
            KernelInputError: They do not fit the pages, a slot does not exist or (with `once`) is
                not alone.
        """
        if slot_mapping.dtype != torch.int64 or slot_mapping.ndim != 1:
            raise KernelInputError(
                f"slot_mapping must be int64 [num_tokens], not {slot_mapping.dtype}"
                f" {tuple(slot_mapping.shape)}"
            )
        if slot_mapping.device != pages.device and slot_mapping.device.type != "cpu":
            raise KernelInputError(
                f"slot_mapping is on {slot_mapping.device}, the pages are on {pages.device}"
            )
        slots = slot_mapping.contiguous()
        if slots.shape[0]:
            _check_slots(slots, pages.num_slots, once)
        return cls(pages, slots.to(pages.device), once)

    def part(self, begin: int, end: int) -> CheckedSlots:
        """The slots of tokens `[begin, end)`."""
        return CheckedSlots(self.pages, self.slots[begin:end], self.are_distinct)

    def copy_with(self, blob: torch.Tensor, writes_pages: bool) -> PagedCopy:
        """A copy between these slots and a chunk.

        Args:
            blob: `[num_sides, num_layers, num_tokens, hidden_size]`, contiguous, of the pages'
                dtype and device.
            writes_pages: Also demand that no slot occurs twice and no two page tensors are the same
                memory.

        Raises:
            KernelInputError: They do not fit together.
        """
        pages = self.pages
        expected = (pages.num_sides, pages.num_layers, self.slots.shape[0], pages.hidden_size)
        if tuple(blob.shape) != expected or not blob.is_contiguous():
            kind = "contiguous" if blob.is_contiguous() else "not contiguous"
            raise KernelInputError(
                f"the chunk is {tuple(blob.shape)}, {kind}; expected {expected}, contiguous"
            )
        if blob.dtype != pages.dtype or blob.device != pages.device:
            raise KernelInputError(
                f"the chunk is {blob.dtype} on {blob.device}; the pages are {pages.dtype} on"
                f" {pages.device}"
            )
        if writes_pages and not pages.are_distinct:
            raise KernelInputError(
                "two of the keys and values are the same memory: what would be written there is"
                " ambiguous"
            )
        if writes_pages and not self.are_distinct:
            raise KernelInputError("these slots were checked for reading: one may occur twice")
        return PagedCopy(pages, self.slots, blob)


@dataclass(frozen=True, eq=False)
class PagedCopy:
    """Pages, chunk and slots of one copy, checked against each other. Make it with `checked_copy`.

    Attributes:
        pages: The pages.
        slots: int64 `[num_tokens]`, contiguous, on the pages' device; `slot = block * block_size +
            offset`.
        blob: The chunk: contiguous `[num_sides, num_layers, num_tokens, hidden_size]`, of the
            pages' dtype and device.
    """

    pages: Pages
    slots: torch.Tensor
    blob: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens to copy."""
        return self.slots.shape[0]

    @property
    def page_bytes(self) -> int:
        """What one of the pages has in the chunk, bytes: one side of one layer, all tokens."""
        return self.blob.numel() * self.blob.element_size() // len(self.pages.tensors)

    @cached_property
    def alignment_bytes(self) -> int:
        """What every address, stride and contiguous run of pages and chunk is a multiple of."""
        return math.gcd(
            self.pages.alignment_bytes,
            self.blob.data_ptr(),
            self.blob.storage_offset() * self.blob.element_size(),
        )

    @cached_property
    def word_bytes(self) -> int:
        """The widest word (8, 4, 2 or 1 bytes) in which pages and chunk can be addressed."""
        return math.gcd(self.pages.word_bytes, self.alignment_bytes)

    def page_words(self) -> tuple[torch.Tensor, ...]:
        """As `Pages.words`, in this copy's words."""
        return tuple(self._narrowed(page) for page in self.pages.words)

    def unit_views(self, unit: int) -> tuple[UnitView | None, ...]:
        """As `Pages.unit_views`, in this copy's words."""
        return tuple(
            None if cut is None else (self._narrowed(cut[0]), cut[1])
            for cut in self.pages.unit_views(unit)
        )

    def host_words(self) -> tuple[HostArray, ...]:
        """As `Pages.host_words`, in this copy's words."""
        return tuple(self._narrowed_array(page) for page in self.pages.host_words)

    def host_units(self, unit: int) -> tuple[HostUnits | None, ...]:
        """As `Pages.host_units`, in this copy's words."""
        return tuple(
            None if cut is None else (self._narrowed_array(cut[0]), cut[1])
            for cut in self.pages.host_units(unit)
        )

    def blob_words(self) -> torch.Tensor:
        """The chunk as untyped words, sharing memory: `[len(pages.tensors), num_tokens, *row]`,
        `row` as in `page_words`.
        """
        row = list(self.pages.words[0].shape[2:])
        row[-1] *= self.pages.word_bytes // self.word_bytes
        flat = self.blob.detach().view(-1).view(WORD_DTYPES[self.word_bytes])
        return flat.view(len(self.pages.tensors), self.num_tokens, *row)

    def blob_units(self, begin: int, end: int, unit: int) -> torch.Tensor:
        """Tokens `[begin, end)` of the chunk in the shape of `unit_views`: `[len(pages.tensors),
        num_units, …]`, sharing memory.
        """
        words = self.blob_words()[:, begin:end]
        units = words.view(len(words), (end - begin) // unit, unit, *words.shape[2:])
        return units.flatten(2) if self.pages.are_rows_adjacent else units

    def _narrowed(self, view: torch.Tensor) -> torch.Tensor:
        if self.word_bytes == self.pages.word_bytes:
            return view
        narrowed: torch.Tensor = view.view(WORD_DTYPES[self.word_bytes])
        return narrowed

    def _narrowed_array(self, array: HostArray) -> HostArray:
        return (
            array
            if self.word_bytes == self.pages.word_bytes
            else array.view(HOST_DTYPES[self.word_bytes])
        )


def checked_copy(
    pages: Pages,
    slot_mapping: torch.Tensor,
    blob: torch.Tensor,
    writes_pages: bool,
    once: bool = False,
) -> PagedCopy:
    """Check chunk and slots against the pages. Waits for the device when the slots are on one.

    Args:
        pages: The pages.
        slot_mapping: int64 `[num_tokens]`, on the pages' device or the CPU.
        blob: `[num_sides, num_layers, num_tokens, hidden_size]`, contiguous, of the pages' dtype
            and device.
        writes_pages: Also demand that no slot occurs twice and no two page tensors are the same
            memory.
        once: Demand that no slot occurs twice although the pages are only read.

    Raises:
        KernelInputError: They do not fit together, a slot does not exist or (with `writes_pages` or
            `once`) is not alone.
    """
    return CheckedSlots.of(pages, slot_mapping, once or writes_pages).copy_with(blob, writes_pages)


def _check_slots(slots: torch.Tensor, num_slots: int, once: bool) -> None:
    facts = [*torch.aminmax(slots)]
    if once:
        ordered = slots.sort().values
        facts.append((ordered[1:] == ordered[:-1]).sum())
    low, high, *repeats = torch.stack(facts).tolist()
    if low < 0 or high >= num_slots:
        raise KernelInputError(
            f"slot_mapping holds {low if low < 0 else high}; the slots of these pages are 0 …"
            f" {num_slots - 1}"
        )
    if any(repeats):
        raise KernelInputError(
            f"slot_mapping names {repeats[0]} slots more than once: a slot has the KV of one token"
        )
