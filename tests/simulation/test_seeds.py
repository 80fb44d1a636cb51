"""More and longer runs than `make test` has time for."""

from __future__ import annotations

import random

import pytest

from tests.simulation.test_scenario import check

SECONDS = 300.0
pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("seed", [2, 4, 5, 6])
def test_known_seeds(seed: int) -> None:
    check(seed, SECONDS)


@pytest.mark.parametrize("number", range(6))
def test_fresh_seeds(number: int) -> None:
    check(random.SystemRandom().randrange(1 << 31), SECONDS)
