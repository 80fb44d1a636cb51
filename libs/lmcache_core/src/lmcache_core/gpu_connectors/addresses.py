"""The slots of a transfer's tokens in an engine's pages: checked once, then used for every
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.paged_copy import CheckedSlots, PagedCopy
from lmcache_kernels.paged_copy.descriptors import Descriptors

from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.binding import Binding
from lmcache_core.record import TensorSpec


@dataclass(frozen=True, eq=False)
class Addresses:
    """The slots of tokens `[begin, end)` in the pages of each group, checked. Create them with
    `Addresses.of`.
    """

    binding: Binding
    begin: int
    end: int
    slots: tuple[CheckedSlots, ...]

    @classmethod
    def of(cls, binding: Binding, slot_mapping: Any, begin: int, end: int) -> Addresses:
        """Check slots against the pages.

        Args:
            slot_mapping: As `PagedGPUConnector` takes it.

        Raises:
            ValueError: There is no slot mapping.
            LayoutError: A token has no slot, a slot does not exist or has two tokens, or two groups
                share a block.
        """
        names = [group.name for group in binding.layout.groups]
        parts = [_part(mapping, begin, end) for mapping in _mappings(slot_mapping, names)]
        try:
            # Even for reading, a slot has one token: a second one would be stored with KV that is
            # not its own.
            slots = tuple(
                CheckedSlots.of(pages, part, once=True)
                for pages, part in zip(binding.pages, parts, strict=True)
            )
        except KernelInputError as exc:
            hint = "-1 marks the engine's own prefix, which these tokens must not overlap"
            raise LayoutError(f"tokens [{begin}, {end}): {exc} ({hint})") from exc
        for pair in binding.sharing:
            one, other = (
                {slot // binding.pages[i].block_size for slot in parts[i].tolist()} for i in pair
            )
            if one & other:
                shared = " and ".join(repr(names[i]) for i in pair)
                raise LayoutError(
                    f"tokens [{begin}, {end}): the groups {shared} are the same memory and both"
                    f" have block {min(one & other)}"
                )
        return cls(binding, begin, end, slots)

    def copies(
        self,
        staged: torch.Tensor,
        start: int,
        end: int,
        wanted: tuple[int, int],
        writes_pages: bool,
        group: int | None = None,
    ) -> list[tuple[int, PagedCopy]]:
        """Return one checked copy for each group, with its offset in the chunk in bytes.

        Args:
            staged: The chunk's bytes, on the pages' device.
            start: The chunk's first token.
            end: One past its last token.
            wanted: The same for the tokens to copy, which were checked.
            group: Number of the only group to copy; None: all.

        Raises:
            LayoutError: Some tokens were not checked, or the chunk does not fit.
        """
        copies = []
        with _explained(*wanted):
            for part, spec in self._parts(end - start, wanted, group):
                blob = staged[spec.offset : spec.offset + spec.length]
                blob = blob.view(part.pages.dtype).view(spec.shape)
                copy = part.copy_with(blob, writes_pages, wanted[0] - start, end - start)
                copies.append((spec.offset, copy))
        return copies

    def runs(
        self,
        start: int,
        end: int,
        wanted: tuple[int, int],
        writes_pages: bool,
        group: int | None = None,
    ) -> list[Descriptors] | None:
        """Return the runs of bytes of each group, for copy engines; None if a group has none.

        The arguments are those of `copies`.

        Raises:
            LayoutError: Some tokens were not checked, or do not fit into the chunk.
        """
        found = []
        with _explained(*wanted):
            for part, spec in self._parts(end - start, wanted, group):
                runs = part.runs(writes_pages, wanted[0] - start, end - start)
                if runs is None:
                    return None
                found.append(replace(runs, chunk=runs.chunk + np.uint64(spec.offset)))
        return found

    def _parts(
        self, num_tokens: int, wanted: tuple[int, int], group: int | None
    ) -> list[tuple[CheckedSlots, TensorSpec]]:
        """Return the slots of the wanted tokens in each group, and the group's place in a chunk."""
        first, last = wanted
        if not self.begin <= first <= last <= self.end:
            raise LayoutError(
                f"tokens [{first}, {last}) are not among those whose slots were checked,"
                f" [{self.begin}, {self.end})"
            )
        specs = self.binding.layout.tensor_specs(num_tokens)
        parts = [one.part(first - self.begin, last - self.begin) for one in self.slots]
        both = list(zip(parts, specs, strict=True))
        return both if group is None else [both[group]]


@contextmanager
def _explained(first: int, last: int) -> Iterator[None]:
    try:
        yield
    except KernelInputError as exc:
        raise LayoutError(f"tokens [{first}, {last}): {exc}") from exc


def _mappings(slot_mapping: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """Return one slot mapping for each group."""
    if isinstance(slot_mapping, torch.Tensor):
        return [slot_mapping] * len(names)
    if isinstance(slot_mapping, Mapping):
        slot_mapping = [slot_mapping.get(name) for name in names]
    if not isinstance(slot_mapping, Sequence) or not all(
        isinstance(mapping, torch.Tensor) for mapping in slot_mapping
    ):
        raise ValueError(
            "slot_mapping is missing: pass an int64 tensor with the slot of every token of the"
            " sequence (or one for each group)"
        )
    if len(slot_mapping) != len(names):
        raise LayoutError(
            f"slot_mapping has {len(slot_mapping)} parts; the layout has the groups"
            f" {', '.join(names)}"
        )
    return list(slot_mapping)


def _part(slot_mapping: torch.Tensor, start: int, end: int) -> torch.Tensor:
    if slot_mapping.ndim != 1 or not 0 <= start <= end <= slot_mapping.shape[0]:
        raise LayoutError(
            f"tokens [{start}, {end}) are not all in slot_mapping, whose shape is"
            f" {tuple(slot_mapping.shape)}"
        )
    return slot_mapping[start:end]
