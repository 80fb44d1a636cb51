from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def poison():
    """Whatever torch allocates without a value holds NaN, or the largest number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
