"""More and longer runs than `make test` has time for."""

from __future__ import annotations

import pytest

from tests.simulation.many import fresh_seeds
from tests.simulation.test_scenario import check

SECONDS = 300.0
pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("seed", [2, 4, 5, 6])
def test_known_seeds(seed: int) -> None:
    check(seed, SECONDS)


@pytest.mark.parametrize("seed", fresh_seeds(5)[1:])
def test_seeds_of_this_state_of_the_product(seed: int) -> None:
    check(seed, SECONDS)
