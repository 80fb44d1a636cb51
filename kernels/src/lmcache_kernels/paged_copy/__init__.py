"""Copies between the pages of a KV cache and a contiguous chunk. The maths: `README.md`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.paged_copy.reference import paged_gather_reference, paged_scatter_reference
from lmcache_kernels.paged_copy.slot_runs import find_runs
from lmcache_kernels.pages import MAX_WORD_BYTES, WORD_DTYPES, HostArray, Pages

__all__ = [
    "CheckedSlots",
    "PagedCopy",
    "paged_gather_reference",
    "paged_gather_steps",
    "paged_scatter_reference",
    "paged_scatter_steps",
]


@dataclass(frozen=True, eq=False)
class CheckedSlots:
    """Slots that have been checked against pages once, for any number of copies. Create them with
    `CheckedSlots.of`.

    Attributes:
        pages: The pages.
        slots: int64 `[num_tokens]`, contiguous, on the pages' device; `slot = block * block_size +
            offset`. All exist.
        are_distinct: Whether no slot occurs twice; False if that was not checked.
    """

    pages: Pages
    slots: torch.Tensor
    are_distinct: bool

    @classmethod
    def of(cls, pages: Pages, slot_mapping: torch.Tensor, once: bool) -> CheckedSlots:
        """Check slots against pages. Waits for the device if the slots are on one.

        Args:
            pages: The pages.
            slot_mapping: int64 `[num_tokens]`, on the pages' device or the CPU.
            once: Require that no slot occurs twice.

        Raises:
            KernelInputError: They do not match the pages, or a slot does not exist or (with `once`)
                occurs twice.
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
        """Return the slots of tokens `[begin, end)`."""
        return CheckedSlots(self.pages, self.slots[begin:end], self.are_distinct)

    def copy_with(
        self, blob: torch.Tensor, writes_pages: bool, first: int = 0, num_tokens: int | None = None
    ) -> PagedCopy:
        """Return a copy between these slots and a chunk, or consecutive tokens of one.

        Args:
            blob: `[num_sides, num_layers, num_tokens, hidden_size]`, contiguous, of the pages'
                dtype and device.
            writes_pages: Also require that no slot occurs twice and no two page tensors share
                memory.
            first: The chunk's token that belongs to the first slot.
            num_tokens: Tokens in the chunk; None: one for each slot.

        Raises:
            KernelInputError: They do not match.
        """
        pages, num_slots = self.pages, self.slots.shape[0]
        num_tokens = num_slots if num_tokens is None else num_tokens
        if not 0 <= first <= num_tokens - num_slots:
            raise KernelInputError(
                f"{num_slots} slots for tokens from {first} of a chunk of {num_tokens}"
            )
        expected = (pages.num_sides, pages.num_layers, num_tokens, pages.hidden_size)
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
                "two of the keys and values share memory: the result of writing there would be"
                " ambiguous"
            )
        if writes_pages and not self.are_distinct:
            raise KernelInputError("these slots were checked for reading: one may occur twice")
        return PagedCopy(pages, self.slots, blob, first)


@dataclass(frozen=True, eq=False)
class PagedCopy:
    """Pages, chunk and slots of one copy, checked against each other. Create it with
    `CheckedSlots.copy_with`.

    Attributes:
        pages: The pages.
        slots: int64 `[num_slots]`, contiguous, on the pages' device; `slot = block * block_size +
            offset`.
        blob: The chunk: contiguous `[num_sides, num_layers, num_tokens, hidden_size]`, of the
            pages' dtype and device.
        first: The chunk's token that belongs to the first slot. Tokens without a slot are not
            copied.
    """

    pages: Pages
    slots: torch.Tensor
    blob: torch.Tensor
    first: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of the chunk that belong to one page tensor: one side of one layer, all tokens."""
        return self.blob.nbytes // len(self.pages.tensors)

    @cached_property
    def alignment_bytes(self) -> int:
        """Common divisor of every address, stride and contiguous run of pages and chunk."""
        offset_bytes = int(self.blob.storage_offset()) * self.blob.element_size()
        return math.gcd(self.pages.alignment_bytes, self.blob.data_ptr(), offset_bytes)

    @property
    def word_bytes(self) -> int:
        """The widest word (8, 4, 2 or 1 bytes) in which pages and chunk can be addressed."""
        return math.gcd(self.alignment_bytes, MAX_WORD_BYTES)


def paged_gather_steps(copy: PagedCopy) -> Iterator[int]:
    """Fill the chunk of a checked copy with the KV of its slots, bit for bit, step by step: a
    caller may check several copies first, and interleave them with other work. Does not wait for
    the device to finish.

    Yields:
        How many of the pages, from the first, have been copied completely; on a device once, when
            all copies have been launched.
    """
    return _steps(copy, to_pages=False)


def paged_scatter_steps(copy: PagedCopy) -> Iterator[int]:
    """Write the chunk of a checked copy into its slots, bit for bit, step by step; no other slot
    changes. Does not wait for the device to finish.

    Yields:
        How many of the pages, from the first, have been filled; on a device once, when all copies
            have been launched.
    """
    return _steps(copy, to_pages=True)


def _steps(copy: PagedCopy, to_pages: bool) -> Iterator[int]:
    if copy.slots.shape[0] == 0:
        return
    if copy.pages.device.type == "cpu":
        yield from _copy_on_host(copy, to_pages)
        return
    if copy.pages.device.type == "cuda":
        from lmcache_kernels.paged_copy.kernel import launch

        with torch.cuda.device(copy.pages.device):
            launch(copy, to_pages)
    elif to_pages:
        paged_scatter_reference(copy)
    else:
        paged_gather_reference(copy)
    yield len(copy.pages.tensors)


def _copy_on_host(copy: PagedCopy, to_pages: bool) -> Iterator[int]:
    """Split the slots into runs once; then each page tensor is one pass over blocks, not tokens."""
    runs = find_runs(copy.slots.numpy(), copy.pages.block_size)
    pages: list[HostArray] = [page.numpy() for page in copy.pages.words(copy.word_bytes)]
    row = pages[0].shape[2:]
    flat = copy.blob.detach().view(-1).view(WORD_DTYPES[copy.word_bytes]).numpy()
    tokens = slice(copy.first, copy.first + len(copy.slots))
    chunks = flat.reshape(len(pages), copy.blob.shape[2], *row)[:, tokens]
    for run in runs.edges:
        tokens = slice(run.token, run.token + run.length)
        place = run.block, slice(run.offset, run.offset + run.length)
        for page, chunk in zip(pages, chunks, strict=True):
            if to_pages:
                page[place] = chunk[tokens]
            else:
                chunk[tokens] = page[place]
    if not len(runs.blocks):
        return
    cuts = copy.pages.units(copy.word_bytes, runs.unit)
    places = {
        cut[1]: _as_slice(runs.blocks * cut[1] + runs.places) for cut in cuts if cut is not None
    }
    for done, (page, cut, chunk) in enumerate(zip(pages, cuts, chunks, strict=True), 1):
        rows = chunk[runs.begin : runs.end]
        if cut is None:
            if to_pages:
                page[runs.token_slots()] = rows
            else:
                rows[...] = page[runs.token_slots()]
        else:
            view, numbers = cut[0], places[cut[1]]
            units = rows.reshape(len(runs.blocks), *view.shape[1:])
            if to_pages:
                view[numbers] = units
            elif isinstance(numbers, slice):
                units[...] = view[numbers]
            else:
                # All numbers exist; with "clip" numpy fills the chunk without a buffer.
                view.take(numbers, axis=0, out=units, mode="clip")
        yield done


def _as_slice(numbers: HostArray) -> HostArray | slice:
    """Return consecutive numbers as a slice, which numpy copies faster; others unchanged."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1 and bool((numbers[1:] - numbers[:-1] == 1).all()):
        return slice(first, last + 1)
    return numbers


def _check_slots(slots: torch.Tensor, num_slots: int, once: bool) -> None:
    facts_of = _facts_on_host if slots.device.type == "cpu" else _facts_on_device
    low, high, *repeats = facts_of(slots, num_slots, once)
    if low < 0 or high >= num_slots:
        raise KernelInputError(
            f"slot_mapping contains {low if low < 0 else high}; the slots of these pages are 0 …"
            f" {num_slots - 1}"
        )
    if any(repeats):
        raise KernelInputError(
            f"slot_mapping names {repeats[0]} slots more than once: a slot has the KV of one token"
        )


def _facts_on_host(slots: torch.Tensor, num_slots: int, once: bool) -> list[int]:
    """Return the smallest and the largest slot and, if they exist, how many were named before: by
    numpy, as torch would take threads whose processors the engine uses.
    """
    host: HostArray = slots.numpy()
    low, high = int(host.min()), int(host.max())
    if not once or low < 0 or high >= num_slots:
        return [low, high]
    numbers = np.arange(len(host), dtype=np.int32)
    kept = np.empty(high + 1, np.int32)
    kept[host] = numbers  # a slot keeps one of its tokens; the others do not find theirs again
    return [low, high, int(np.count_nonzero(kept[host] != numbers))]


def _facts_on_device(slots: torch.Tensor, num_slots: int, once: bool) -> list[int]:
    """Return the same; wait for the device once."""
    facts = [*torch.aminmax(slots)]
    if once:
        ordered = slots.sort().values
        facts.append((ordered[1:] == ordered[:-1]).sum())
    found: list[int] = torch.stack(facts).tolist()
    return found
