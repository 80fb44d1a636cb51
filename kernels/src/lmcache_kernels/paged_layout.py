"""What a paged KV cache looks like in memory, and the checks that every op on one makes before it writes anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lmcache_kernels.errors import KernelInputError

MAX_WORD_BYTES = 8
WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PagedLayout:
    """Pages, chunk and slots of one op, checked against each other.

    Attributes:
        pages: K of every layer, then V of every layer: `2 * num_layers` tensors `[num_blocks, block_size, num_heads, head_size]`, all on
            one device and of one dtype. Strides may differ between them; the heads of a token are contiguous.
        slots: int64 `[num_tokens]`, contiguous; `slot = block * block_size + offset`.
        blob: Contiguous `[2, num_layers, num_tokens, num_heads * head_size]`, same device and dtype.
    """

    pages: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    blob: torch.Tensor

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.pages[0].shape[1]

    @property
    def num_slots(self) -> int:
        """Slots in a layer; valid slots are `0 … num_slots - 1`."""
        return self.pages[0].shape[0] * self.block_size

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.blob.shape[3] * self.blob.element_size()

    def word_bytes(self) -> int:
        """The widest word (8, 4, 2 or 1 bytes) in which every row of pages and chunk can be addressed."""
        starts = [
            start for tensor in (*self.pages, self.blob) for start in (tensor.data_ptr(), tensor.storage_offset() * tensor.element_size())
        ]
        strides = [stride * page.element_size() for page in self.pages for stride in row_strides(page)]
        return math.gcd(MAX_WORD_BYTES, self.row_bytes, *starts, *strides)

    def page_words(self) -> Iterator[torch.Tensor]:
        """Each of the pages as untyped words `[num_blocks, block_size, row_words]`, sharing memory."""
        kind = WORD_DTYPES[self.word_bytes()]
        for page in self.pages:
            row = page.shape[2] * page.shape[3]
            yield page.as_strided((*page.shape[:2], row), (*row_strides(page), 1)).view(kind)

    def blob_words(self) -> torch.Tensor:
        """The chunk as untyped words `[2 * num_layers, num_tokens, row_words]`, in the order of `pages`, sharing memory."""
        flat = self.blob.view(-1).view(WORD_DTYPES[self.word_bytes()])
        return flat.view(len(self.pages), self.slots.numel(), -1)


def checked_layout(
    keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], slot_mapping: torch.Tensor, blob: torch.Tensor
) -> PagedLayout:
    """Check pages, chunk and slots against each other; the slots' values are `check_slots`' business.

    Args:
        keys: K of each layer, `[num_blocks, block_size, num_heads, head_size]`, all alike.
        values: V of each layer, as `keys`.
        slot_mapping: int64 `[num_tokens]`, on the pages' device or the CPU.
        blob: `[2, num_layers, num_tokens, num_heads * head_size]`, contiguous, of the pages' dtype and device.

    Raises:
        KernelInputError: They do not fit together.
    """
    if not keys or len(keys) != len(values):
        raise KernelInputError(f"keys and values must be one tensor for each layer, not {len(keys)} and {len(values)}")
    first = keys[0]
    if first.ndim != 4 or first.shape[1:].numel() == 0:
        raise KernelInputError(f"keys[0] must be [num_blocks, block_size, num_heads, head_size], not {tuple(first.shape)}")
    for name, side in (("keys", keys), ("values", values)):
        for layer, page in enumerate(side):
            _check_page(f"{name}[{layer}]", page, first)
    if slot_mapping.dtype != torch.int64 or slot_mapping.ndim != 1:
        raise KernelInputError(f"slot_mapping must be int64 [num_tokens], not {slot_mapping.dtype} {tuple(slot_mapping.shape)}")
    if slot_mapping.device != first.device and slot_mapping.device.type != "cpu":
        raise KernelInputError(f"slot_mapping is on {slot_mapping.device}, the pages are on {first.device}")
    expected = (2, len(keys), slot_mapping.shape[0], first.shape[2] * first.shape[3])
    if tuple(blob.shape) != expected or not blob.is_contiguous():
        kind = "contiguous" if blob.is_contiguous() else "not contiguous"
        raise KernelInputError(f"the chunk is {tuple(blob.shape)}, {kind}; expected {expected}, contiguous")
    if blob.dtype != first.dtype or blob.device != first.device:
        raise KernelInputError(f"the chunk is {blob.dtype} on {blob.device}; the pages are {first.dtype} on {first.device}")
    return PagedLayout((*keys, *values), slot_mapping.contiguous(), blob)


def check_slots(layout: PagedLayout, once: bool) -> None:
    """Check that every slot exists. Waits for the device when the slots are on one.

    Args:
        layout: From `checked_layout`.
        once: Also demand that no slot occurs twice, and that no two pages are the same memory: for an op that writes to the pages.

    Raises:
        KernelInputError: A slot is negative, behind the last block, or (with `once`) not alone.
    """
    if once and len({page.data_ptr() for page in layout.pages}) != len(layout.pages):
        raise KernelInputError("two of the keys and values are the same memory: what would be written there is ambiguous")
    if layout.slots.numel() == 0:
        return
    facts = [*torch.aminmax(layout.slots)]
    if once:
        ordered = layout.slots.sort().values
        facts.append((ordered[1:] == ordered[:-1]).sum())
    low, high, *repeats = torch.stack(facts).tolist()
    if low < 0 or high >= layout.num_slots:
        wrong = low if low < 0 else high
        raise KernelInputError(f"slot_mapping holds {wrong}; the slots of these pages are 0 … {layout.num_slots - 1}")
    if any(repeats):
        raise KernelInputError(f"slot_mapping names {repeats[0]} slots more than once: what would be written there is ambiguous")


def row_strides(page: torch.Tensor) -> tuple[int, int]:
    """Strides of blocks and of tokens in a block, in elements; 0 where a dimension has one entry only and is never stepped along."""
    return (page.stride(0) if page.shape[0] > 1 else 0), (page.stride(1) if page.shape[1] > 1 else 0)


def _check_page(name: str, page: torch.Tensor, first: torch.Tensor) -> None:
    if page.shape != first.shape or page.dtype != first.dtype or page.device != first.device:
        got, expected = (f"{tuple(t.shape)} of {t.dtype} on {t.device}" for t in (page, first))
        raise KernelInputError(f"{name} is {got}; keys[0] is {expected}")
    num_blocks, block_size, num_heads, head_size = page.shape
    row = num_heads * head_size
    head_stride, stride = page.stride()[2:]
    if (head_size > 1 and stride != 1) or (num_heads > 1 and head_stride != head_size):
        raise KernelInputError(f"{name}: the heads of a token are not contiguous (strides {page.stride()})")
    block_stride, token_stride = row_strides(page)
    if (block_size > 1 and token_stride < row) or (num_blocks > 1 and block_stride < (block_size - 1) * token_stride + row):
        raise KernelInputError(f"{name}: tokens or blocks overlap in memory (strides {page.stride()})")
