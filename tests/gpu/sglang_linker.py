"""Our linker inside SGLang, which compares what is loaded with what was stored, byte by byte."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache_core.gpu_connectors.staging import StagingPair
from lmcache_core.integrations.sglang.linker import LMCacheLinker
from sglang.srt.mem_cache.hicache_storage import PoolName

from tests.gpu.copies import Copies
from tests.gpu.sglang import DIGESTS, PINNED


class CheckedLinker(LMCacheLinker):
    """Digests pages behind a store and behind a load, both while SGLang keeps their slots."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._copies = Copies()
        StagingPair.near = self._copies.watched(StagingPair.near)  # type: ignore[method-assign]
        super().__init__(*arguments, **more)
        self._digests = Path(os.environ[DIGESTS])
        self._storing: deque[Any] = deque()
        self._queued: dict[str, Any] = {}
        self._loading: list[Any] = []

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        is_queued = super().offload(transfers, session_id)
        if is_queued:
            self._storing.extend(transfers)
        return is_queued

    def pop_completed_offload(self) -> bool:
        self._note_copies()
        for page, digest in self._pages_of(self._storing.popleft()):
            (self._digests / page).write_text(digest)
        return super().pop_completed_offload()

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        (self._queued[rid],) = transfers
        return super().load(rid, transfers)

    def cancel_queued_load(self, rid: str) -> bool:
        self._queued.pop(rid, None)
        return super().cancel_queued_load(rid)

    def start_layer_wise_loading(self) -> int:
        self._loading, self._queued = list(self._queued.values()), {}
        return super().start_layer_wise_loading()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        is_loaded = super().finish_layer_wise_loading(counter_index)
        self._note_copies()
        if is_loaded:
            with (self._digests / "loaded").open("a") as file:
                for transfer in self._loading:
                    for page, digest in self._pages_of(transfer):
                        is_equal = (self._digests / page).read_text() == digest
                        print("equal" if is_equal else "other", file=file)
        return is_loaded

    def _note_copies(self) -> None:
        for thread, is_pinned in list(self._copies.are_pinned.items()):
            (self._digests / thread).write_text(PINNED if is_pinned else "pageable")

    def _pages_of(self, transfer: Any) -> Iterator[tuple[str, str]]:
        """Yield each page's name and the digest of its KV of all layers."""
        pool = self.pools[PoolName.KV]
        page_size = len(transfer.device_indices) // len(transfer.keys)
        pages = transfer.device_indices[::page_size].to(torch.int64) // page_size
        digests = [hashlib.sha256() for _ in transfer.keys]
        for layer in pool.kvcaches:
            for tensor in layer if isinstance(layer, tuple) else (layer,):
                rows = tensor[pages].view(torch.uint8).cpu().numpy()
                for digest, row in zip(digests, rows, strict=True):
                    digest.update(row.tobytes())
        yield from zip(transfer.keys, (digest.hexdigest() for digest in digests), strict=True)
