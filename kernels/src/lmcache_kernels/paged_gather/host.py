"""`paged_gather` on the CPU: the slots are cut into runs once, then each layer is one pass over blocks instead of tokens."""

from __future__ import annotations

import torch

from lmcache_kernels.paged_copy import PagedCopy
from lmcache_kernels.slot_runs import find_runs


def paged_gather_host(copy: PagedCopy) -> None:
    """As `paged_gather_reference`; at least one token."""
    runs = find_runs(copy.slots.numpy(), copy.pages.block_size)
    with torch.inference_mode():
        pages, blob = copy.page_words(), copy.blob_words()
        for run in runs.edges:
            for page, chunk in zip(pages, blob.numpy(), strict=True):
                chunk[run.token : run.token + run.length] = page.numpy()[run.block, run.offset : run.offset + run.length]
        if not len(runs.blocks):
            return
        cuts = copy.unit_views(runs.unit)
        index = {apart: torch.from_numpy(runs.blocks * apart + runs.places) for apart in {cut[1] for cut in cuts if cut is not None}}
        for page, cut, target in zip(pages, cuts, copy.blob_units(runs.begin, runs.end, runs.unit), strict=True):
            if cut is not None:
                torch.index_select(cut[0], 0, index[cut[1]], out=target)
            else:
                blocks, offsets = (torch.from_numpy(part) for part in runs.token_slots())
                target.copy_(page[blocks, offsets].view(target.shape))
