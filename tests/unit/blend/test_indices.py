"""The documented helpers for indices and masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.blend import create_index, indices_to_mask, mask_to_indices


@given(st.lists(st.booleans(), max_size=20))
def test_a_mask_and_its_indices_are_equivalent(mask):
    indices = mask_to_indices(torch.tensor(mask, dtype=torch.bool))
    assert indices.dtype == torch.int64
    assert indices.tolist() == [i for i, is_set in enumerate(mask) if is_set]
    assert indices_to_mask(indices, len(mask)).tolist() == mask


def test_a_mask_of_numbers_counts_what_is_not_zero():
    assert mask_to_indices(torch.tensor([0, 2, 0, 1])).tolist() == [1, 3]


@pytest.mark.parametrize("indices", [[4], [-1], [0, 5]])
def test_indices_out_of_range_are_refused(indices):
    with pytest.raises(ValueError, match=f"from {min(indices)} to {max(indices)}; the mask has 4"):
        indices_to_mask(torch.tensor(indices), 4)


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_an_index_takes_some_of_one_dimension(dim):
    x, rows = torch.arange(60).view(3, 4, 5), torch.tensor([2, 0])
    assert torch.equal(x[create_index(3, dim, rows)], x.index_select(dim, rows))
    assert torch.equal(x[create_index(3, dim, slice(1, 2))], x.narrow(dim, 1, 1))


@pytest.mark.parametrize("dim", [-4, 3])
def test_a_dimension_out_of_range_is_refused(dim):
    with pytest.raises(ValueError, match=f"dimension {dim} of a tensor of 3"):
        create_index(3, dim, slice(None))
