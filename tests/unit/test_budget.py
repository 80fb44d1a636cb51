"""No package has more tokens of code than its budget."""

from __future__ import annotations

import pytest

from tests.stats import BUDGET, budget, sizes

SIZES = {name: tokens for name, (tokens, _) in sizes().items() if "." not in name}


def test_every_package_has_a_budget() -> None:
    assert budget().keys() == SIZES.keys()


@pytest.mark.parametrize("package", SIZES)
def test_a_package_is_within_its_budget(package: str) -> None:
    limit = budget()[package]
    assert SIZES[package] <= limit, (
        f"{package} has {SIZES[package]:,} tokens, and may have {limit:,}: raise its budget in"
        f" docs/adr/{BUDGET.name} in the same commit, and give the reason there"
    )
