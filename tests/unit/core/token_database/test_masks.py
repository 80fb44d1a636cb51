from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.token_database.chunked import num_masked_tokens


@given(st.lists(st.booleans(), max_size=12))
def test_only_falses_before_trues_are_a_mask(flags):
    mask = torch.tensor(flags, dtype=torch.bool)
    if flags != sorted(flags):
        with pytest.raises(ValueError, match="FFF"):
            num_masked_tokens(mask, len(flags), 1)
    else:
        assert num_masked_tokens(mask, len(flags), 1) == flags.count(False)


@pytest.mark.parametrize("num_false", range(10))
def test_falses_come_in_whole_chunks(num_false):
    mask = torch.arange(9) >= num_false
    if num_false % 3:
        with pytest.raises(
            ValueError, match=rf"\({num_false}\) is not a multiple of the chunk size \(3\)"
        ):
            num_masked_tokens(mask, 9, 3)
    else:
        assert num_masked_tokens(mask, 9, 3) == num_false


def test_no_mask_is_no_falses():
    assert num_masked_tokens(None, 9, 3) == 0
