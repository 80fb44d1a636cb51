"""Token ids of every integer dtype are the same tokens in every call, and anything else is refused
by the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lmcache_core.engine import LMCacheEngine

from tests.fixtures.embedded import embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, empty_kv
from tests.fixtures.prompts import kv_of

IDS = list(range(100, 100 + 2 * CHUNK_SIZE))
TOKENS = torch.tensor(IDS)
CALLS: dict[str, Callable[[LMCacheEngine, Any], object]] = {
    "lookup": lambda engine, tokens: engine.lookup(tokens),
    "retrieve": lambda engine, tokens: engine.retrieve(tokens, kvcaches=empty_kv(len(IDS))),
    "store": lambda engine, tokens: engine.store(tokens, kvcaches=kv_of(TOKENS)),
    "prefetch": lambda engine, tokens: engine.prefetch(tokens),
}
OTHER: dict[str, Any] = {
    "negative": np.array([-1, *IDS[1:]], np.int16),
    "above 2^64": [1 << 64, *IDS[1:]],
    "None inside": [None, *IDS[1:]],
    "None": None,
    "booleans": np.ones(len(IDS), np.bool_),
    "bfloat16": torch.tensor(IDS, dtype=torch.bfloat16),
    "text": "x" * len(IDS),
    "two dimensions": TOKENS[None],
    "rows of several lengths": [[1, 2], [3]],
    "a generator": (token for token in IDS),
    "on no device": torch.empty(len(IDS), dtype=torch.int64, device="meta"),
}


@pytest.mark.parametrize("handles_errors", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_anything_but_token_ids_is_refused_by_every_call(call: str, handles_errors: bool) -> None:
    with embedded_engine(error_handling=handles_errors) as cache:
        for form, tokens in OTHER.items():
            with pytest.raises(ValueError, match="token"):
                CALLS[call](cache.engine, tokens)
            assert cache.hot.stats()["num_chunks"] == 0, form
