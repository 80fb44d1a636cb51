"""Routers believe of a sidecar what is there (`routing_judge.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.processes import Owner
from tests.vllm.routing_judge import JUDGES, Run, checked

pytestmark = [pytest.mark.since("0.32"), pytest.mark.timeout(600)]


@pytest.fixture
def run(tmp_path: Path, owner: Owner) -> Iterator[Run]:
    run = Run(tmp_path, owner, seed=5)
    yield run
    run.close()


def test_routers_believe_what_is_there(run: Run) -> None:
    """Five seconds after the last operation, whatever was lost on the way."""
    there = Counter[str]()
    for _, _, certain in checked(run, 600, every=200):
        for judge, belief in certain.items():
            assert (belief.too_many, belief.too_few) == (0, 0), judge
            there[judge] += belief.there
    assert min(there[judge] for judge in JUDGES) > 100
