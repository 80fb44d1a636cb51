"""A router that others have written believes of a sidecar what is there (`routing_judge.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.processes import Owner
from tests.vllm.routing_judge import Run, checked

pytestmark = [pytest.mark.since("0.32"), pytest.mark.timeout(600)]


@pytest.fixture
def run(tmp_path: Path, owner: Owner) -> Iterator[Run]:
    run = Run(tmp_path, owner, seed=5)
    yield run
    run.close()


def test_dynamos_indexer_believes_what_is_there(run: Run) -> None:
    """Five seconds after the last operation, whatever was lost on the way."""
    held = 0
    for _, _, (too_many, too_few, there) in checked(run, 600, every=200):
        assert (too_many, too_few) == (0, 0)
        held += there
    assert held > 100
