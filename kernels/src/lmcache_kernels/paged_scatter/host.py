"""`paged_scatter` on the CPU: the slots are cut into runs once, then each layer is one pass over
blocks instead of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_kernels.paged_copy import PagedCopy
from lmcache_kernels.slot_runs import find_runs


def paged_scatter_host(copy: PagedCopy) -> Iterator[int]:
    """As `paged_scatter_reference`, one of the pages after the other; at least one token.

    The assignment by index is numpy's, which copies a unit in one piece; torch's goes element by
    element and takes three times as long.

    Yields:
        How many of the pages, from the first, have their part of the chunk.
    """
    runs = find_runs(copy.slots.numpy(), copy.pages.block_size)
    pages = copy.host_words()
    for run in runs.edges:
        for page, chunk in zip(pages, copy.blob_words().numpy(), strict=True):
            page[run.block, run.offset : run.offset + run.length] = chunk[
                run.token : run.token + run.length
            ]
    if not len(runs.blocks):
        return
    cuts = copy.host_units(runs.unit)
    places = {apart: runs.units_at(apart) for apart in {cut[1] for cut in cuts if cut is not None}}
    units = copy.blob_units(runs.begin, runs.end, runs.unit).numpy()
    for done, (page, cut, source) in enumerate(zip(pages, cuts, units, strict=True), 1):
        if cut is not None:
            cut[0][places[cut[1]]] = source
        else:
            page[runs.token_slots()] = source.reshape(-1, *page.shape[2:])
        yield done
