"""`paged_gather` on the CPU: the slots are cut into runs once, then each layer is one pass over
blocks instead of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lmcache_kernels.paged_copy import PagedCopy
from lmcache_kernels.slot_runs import find_runs


def paged_gather_host(copy: PagedCopy) -> Iterator[int]:
    """As `paged_gather_reference`, one of the pages after the other; at least one token.

    Yields:
        How many of the pages, from the first, are in the chunk completely.
    """
    runs = find_runs(copy.slots.numpy(), copy.pages.block_size)
    with torch.inference_mode():
        pages, blob = copy.page_words(), copy.blob_words()
        for run in runs.edges:
            for page, chunk in zip(pages, blob.numpy(), strict=True):
                chunk[run.token : run.token + run.length] = page.numpy()[
                    run.block, run.offset : run.offset + run.length
                ]
        if not len(runs.blocks):
            return
        cuts = copy.unit_views(runs.unit)
        index = {
            apart: torch.from_numpy(runs.blocks * apart + runs.places)
            for apart in {cut[1] for cut in cuts if cut is not None}
        }
        units = copy.blob_units(runs.begin, runs.end, runs.unit).unbind(0)
    for done, (page, cut, target) in enumerate(zip(pages, cuts, units, strict=True), 1):
        with torch.inference_mode():  # not around the yield: it would hold for the caller too
            if cut is not None:
                torch.index_select(cut[0], 0, index[cut[1]], out=target)
            else:
                blocks, offsets = (torch.from_numpy(part) for part in runs.token_slots())
                target.copy_(page[blocks, offsets].view(target.shape))
        yield done
