"""No package has more tokens of code than its budget."""

from __future__ import annotations

from tests.stats import BUDGET, budget, sizes


def test_every_package_is_within_its_budget() -> None:
    used = {name: tokens for name, (tokens, _) in sizes().items() if "." not in name}
    limits = budget()
    assert limits.keys() == used.keys()
    for package, tokens in used.items():
        assert tokens <= limits[package], (
            f"{package} has {tokens:,} tokens, and may have {limits[package]:,}: raise its budget"
            f" in docs/adr/{BUDGET.name} in the same commit, and give the reason there"
        )
